"""Messages between a parent and one child: dicts as msgpack over a socket pair that only the two can reach.

Small things travel here: orders, numbers of slots, errors, states for a checkpoint. Unrolls and weights do not (see
shm.py). A message is a length and a body; what is read is data and never code. Every wait has a deadline. A channel
belongs to one thread.
"""

from __future__ import annotations

import contextlib
import select
import selectors
import socket
import struct
import time
from collections.abc import Iterable
from typing import Any

import msgspec

MAX_BYTES = 1 << 28  # of one message: a larger one is a mistake or a corrupt stream
_HEAD = struct.Struct("<I")
_CHUNK = 1 << 16

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder()


class ChannelClosed(ConnectionError):
    """The peer is gone, or sent what is not a message: nothing more can be received."""


class ChannelTimeout(TimeoutError):
    """The peer did not send, or did not receive, before the deadline."""


class Channel:
    """One end of a socket pair."""

    def __init__(self, sock: socket.socket, limit: int = MAX_BYTES):
        sock.setblocking(False)
        self._sock = sock
        self._limit = limit
        self._poller = select.poll()
        self._in = bytearray()  # received, not yet asked for; survives a timeout in the middle of a message
        self._out = bytearray()  # the message being sent
        self._ended = ""  # why nothing more can be received
        self._torn = False  # a message was sent in part: what follows would not be understood

    @classmethod
    def from_fd(cls, fd: int, limit: int = MAX_BYTES) -> Channel:
        """The child's end, from the descriptor it was started with."""
        return cls(socket.socket(fileno=fd), limit)

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, message: dict[str, Any], timeout: float) -> None:
        """Hand the message to the kernel, whole.

        While the peer does not read, its messages are received, so that two senders cannot block each other. A
        message that the deadline cut in two ends the sending side: later sends raise ChannelClosed.
        """
        if self._torn or self.fileno() < 0:
            raise ChannelClosed("the channel was closed on our side")
        _encoder.encode_into(message, self._out, _HEAD.size)
        size = len(self._out) - _HEAD.size
        if size > self._limit:
            raise ValueError(f"a message of {size} bytes; the limit is {self._limit}")
        _HEAD.pack_into(self._out, 0, size)
        until = time.monotonic() + timeout
        sent = 0
        with memoryview(self._out) as view:
            while sent < len(view):
                try:
                    sent += self._sock.send(view[sent:])
                except BlockingIOError:
                    listening = not self._ended and len(self._in) <= self._limit
                    events = self._wait(select.POLLOUT | (select.POLLIN if listening else 0), until)
                    if not events:
                        self._torn = sent > 0
                        raise ChannelTimeout(f"the peer took {sent} of {len(view)} bytes in {timeout:g} s") from None
                    if listening and events & select.POLLIN:
                        self._fill()
                except OSError as error:  # EPIPE, ECONNRESET
                    self._torn = True
                    raise ChannelClosed(f"the peer is gone ({error.strerror})") from error

    def recv(self, timeout: float) -> dict[str, Any]:
        """The next message. What was sent before the peer's end is still delivered."""
        until = time.monotonic() + timeout
        while not self._whole():
            if self._ended:
                raise ChannelClosed(self._ended)
            if not self._fill() and not self._wait(select.POLLIN, until):
                raise ChannelTimeout(f"no message in {timeout:g} s")
        end = _HEAD.size + _HEAD.unpack_from(self._in)[0]
        try:
            with memoryview(self._in) as view, view[_HEAD.size : end] as body:
                message = _decoder.decode(body)
        except msgspec.DecodeError as error:
            message = error
        del self._in[:end]
        if not isinstance(message, dict):
            self._end(f"the peer sent something that is not a message: {message!r:.80}")
            raise ChannelClosed(self._ended)
        return message

    def poll(self) -> bool:
        """Whether recv would come back at once: with a message, or with ChannelClosed."""
        while not self._whole() and not self._ended:
            if not self._fill():
                return False
        return True

    def close(self) -> None:
        self._sock.close()
        self._end("the channel was closed on our side")

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # a constructor that failed
            self._sock.close()

    @property
    def ended(self) -> bool:
        """Whether the peer's end of stream has been seen (messages may still lie here)."""
        return bool(self._ended)

    def _end(self, why: str) -> None:
        self._ended = self._ended or why
        self._torn = True
        self._in.clear()

    def _whole(self) -> bool:
        """Whether a whole message has been received."""
        if len(self._in) < _HEAD.size:
            return False
        size = _HEAD.unpack_from(self._in)[0]
        if size > self._limit:
            self._end(f"the peer announces a message of {size} bytes; the limit is {self._limit}")
            return False
        return len(self._in) >= _HEAD.size + size

    def _fill(self) -> bool:
        """Take in what has arrived; False if there is nothing yet."""
        try:
            chunk = self._sock.recv(max(_CHUNK, min(len(self._in), 1 << 20)))
        except BlockingIOError:
            return False
        except OSError as error:
            self._ended = f"the peer is gone ({error.strerror})"
            return True
        if chunk:
            self._in += chunk
        else:
            self._ended = "the peer is gone (end of stream)"
        return True

    def _wait(self, events: int, until: float) -> int:
        """Events that came before the deadline, 0 if none did."""
        self._poller.register(self._sock, events)
        ready = self._poller.poll(max(0.0, until - time.monotonic()) * 1000)
        return ready[0][1] if ready else 0


def pair(limit: int = MAX_BYTES) -> tuple[Channel, int]:
    """Our end as a channel, and the child's end as a descriptor: pass it on, then close it here."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return Channel(ours, limit), theirs.detach()


def wait(channels: Iterable[Channel], timeout: float, wake: int | None = None) -> list[Channel]:
    """The channels on which recv would come back at once; empty at the deadline, or when `wake` becomes readable."""
    channels = list(channels)
    until = time.monotonic() + timeout
    poller = select.poll()
    for channel in channels:
        if channel.fileno() >= 0:
            poller.register(channel, select.POLLIN)
    if wake is not None:
        poller.register(wake, select.POLLIN)
    while True:
        ready = [channel for channel in channels if channel.poll()]
        if ready:
            return ready
        left = until - time.monotonic()
        events = poller.poll(max(0.0, left) * 1000)
        if left <= 0 or not events or any(fd == wake for fd, _ in events):
            return [channel for channel in channels if channel.poll()]


class Listener:
    """Many channels that are waited on together. A wait costs nothing for channels that have nothing to say."""

    def __init__(self, wake: int | None = None):
        """`wake`: a descriptor that ends a wait when it becomes readable."""
        self._selector = selectors.DefaultSelector()
        if wake is not None:
            self._selector.register(wake, selectors.EVENT_READ)

    def add(self, channel: Channel) -> None:
        self._selector.register(channel.fileno(), selectors.EVENT_READ, channel)

    def wake_on(self, fd: int) -> None:
        """Have another descriptor end a wait too, for as long as this listener is open."""
        self._selector.register(fd, selectors.EVENT_READ)

    def remove(self, channel: Channel) -> None:
        """Before it is closed; one that is not listened to is passed over."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(channel.fileno())

    def wait(self, timeout: float) -> list[Channel]:
        """The channels on which something has arrived, or that have ended; empty at the deadline. Read them empty."""
        return [key.data for key, _ in self._selector.select(timeout) if key.data is not None]

    def close(self) -> None:
        self._selector.close()
