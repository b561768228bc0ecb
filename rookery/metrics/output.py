"""Standard output and standard error: a blocked or closed one must not affect a run.

`BestEffort` is for a run. A thread of its own writes to the descriptor, so that a pipe that is not read or a stopped
terminal (Ctrl-S) never blocks the caller; after an error, or where too much waits, text is discarded. `Answer` is for
what a user has asked for (`eval --json`, help): it waits as long as the reader takes, like any program, and remembers
an error for the exit code. Neither ever raises. `standard_streams` puts one of the two in the place of `sys.stdout` and
`sys.stderr`.

Imports nothing heavy: the command line uses it before it has parsed its arguments.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, BinaryIO, TextIO, cast

LIMIT = 1 << 20  # bytes that wait for a reader
PATIENCE = 2.0  # seconds for the last lines of a run
MOMENT = 0.05  # seconds


class Descriptor(io.RawIOBase):
    """Bytes for a descriptor that we do not close. `error` is the first failure; nothing is written after it."""

    def __init__(self, fd: int):
        self._fd = fd
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def close(self) -> None:
        """Stays open: a text stream around it closes it when it is collected, and others may use it."""

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        while left and self.error is None:
            try:
                left = left[os.write(self._fd, left) :]
            except BlockingIOError:  # another process that shares the terminal or pipe made it non-blocking
                poll = select.poll()
                poll.register(self._fd, select.POLLOUT)
                poll.poll()
            except OSError as error:
                self.error = error


class Answer(Descriptor):
    """Blocks until the reader has taken everything."""

    def write(self, data: Any) -> int:
        self._write(data := bytes(data))
        return len(data)


class BestEffort(Descriptor):
    """Never blocks. What waits is bounded: what does not fit is discarded."""

    def __init__(self, fd: int, limit: int = LIMIT):
        super().__init__(fd)
        self._limit = limit
        self._chunks: list[bytes] = []
        self._size = 0  # bytes not written, also those that the thread has in hand
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._terminal, self._stuck = os.isatty(fd), False

    @property
    def waiting(self) -> int:
        """Bytes that have not been written yet."""
        return self._size

    def write(self, data: Any) -> int:
        data = bytes(data)
        if os.getpid() != self._process:  # forked: the thread is not in this process, and may have held the lock
            self._write(data)
            return len(data)
        with self._changed:
            if self.error is None and self._size + len(data) <= self._limit and self._start():
                self._chunks.append(data)
                self._size += len(data)
                self._changed.notify_all()
        return len(data)

    def flush(self) -> None:
        """On a terminal that is not stopped, wait a moment: a debugger writes its prompt past this stream."""
        if self._terminal and not self._stuck and os.getpid() == self._process:
            self._stuck = not self.drain(MOMENT)

    def give_up(self) -> None:
        """Write nothing more: the descriptor may soon be reused for another file."""
        with self._changed:
            self.error = self.error or TimeoutError(errno.ETIMEDOUT, "not read in time")
            self._chunks.clear()
            self._size = 0
            self._changed.notify_all()

    def drain(self, timeout: float) -> bool:
        """Wait until everything is written, or cannot be; whether that came in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._size == 0, max(0.0, timeout))

    def _start(self) -> bool:
        if self._thread is None:
            thread = threading.Thread(target=self._work, name=f"output {self._fd}", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # a limit on threads, or the interpreter is about to end
                return False
            self._thread = thread
        return True

    def _work(self) -> None:
        while self.error is None:
            with self._changed:
                while not self._chunks and self.error is None:
                    self._changed.wait()
                data = b"".join(self._chunks)
                self._chunks.clear()
            self._write(data)
            with self._changed:
                if self.error is not None:
                    self._chunks.clear()
                self._size = sum(map(len, self._chunks))
                self._stuck = False
                self._changed.notify_all()


def text(raw: Descriptor, like: TextIO, errors: str = "strict") -> TextIO:
    """A text stream around a descriptor, with the encoding of another; what is written is handed on at once."""
    return io.TextIOWrapper(cast(BinaryIO, raw), encoding=like.encoding, errors=errors, write_through=True)


def best_effort(stream: Any) -> BestEffort | None:
    """The best-effort writer behind a text stream; a new one for an ordinary file, None where there is no descriptor.

    A notebook's stream, or a test's, is not ordinary even where it has a `fileno`.
    """
    raw = getattr(stream, "buffer", None)
    if isinstance(raw, BestEffort):
        return raw
    ordinary = type(stream) is io.TextIOWrapper and type(getattr(raw, "raw", raw)) is io.FileIO
    return BestEffort(stream.fileno()) if ordinary and not stream.closed else None


class Streams:
    """The replacements of `sys.stdout` and `sys.stderr`, and their errors."""

    def __init__(self, run: bool):
        self._run = run
        self._new: dict[str, TextIO] = {}
        self._raw: dict[str, Descriptor] = {}

    def replace(self, name: str) -> None:
        stream = getattr(sys, name)
        if stream is None:  # it was closed when we were started
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif (raw := best_effort(stream)) is not None:
            with contextlib.suppress(OSError):
                stream.flush()
            self._raw[name] = self._shared(raw) if self._run else Answer(raw.fileno())
            self._new[name] = self._text(self._raw[name], stream)
            setattr(sys, name, self._new[name])

    def finish(self, timeout: float = PATIENCE) -> OSError | None:
        """Write what is left. The error that an answer met, unless its reader has closed the pipe."""
        until = time.monotonic() + timeout
        for name, raw in self._raw.items():
            self._new[name].flush()
            if isinstance(raw, BestEffort):
                raw.drain(until - time.monotonic())
        error = self._raw["stdout"].error if "stdout" in self._raw and not self._run else None
        return None if error is None or error.errno == errno.EPIPE else error

    def give_up(self) -> None:
        for raw in self._raw.values():
            if isinstance(raw, BestEffort):
                raw.give_up()

    def _shared(self, raw: BestEffort) -> Descriptor:
        """With 2>&1 both are one file: one thread writes to it, so that the order stays."""
        return next((other for other in self._raw.values() if _same(other.fileno(), raw.fileno())), raw)

    def _text(self, raw: Descriptor, like: TextIO) -> TextIO:
        if self._run:  # a character that the encoding lacks must not change the exit code
            return text(raw, like, "replace" if like.errors == "strict" else like.errors or "replace")
        buffer, at_once = io.BufferedWriter(raw), getattr(like, "line_buffering", False)
        return io.TextIOWrapper(buffer, like.encoding, like.errors, line_buffering=at_once)


@contextlib.contextmanager
def standard_streams(run: bool) -> Iterator[Streams]:
    """Best effort for a `run`, else answers. Streams that are not ordinary stay; afterwards all are as they were."""
    _reopen_closed()
    before, streams = (sys.stdout, sys.stderr), Streams(run)
    try:
        for name in ("stdout", "stderr"):
            streams.replace(name)
        yield streams
    finally:
        sys.stdout, sys.stderr = before
        streams.give_up()


def _same(one: int, other: int) -> bool:
    with contextlib.suppress(OSError):
        return os.path.sameopenfile(one, other)
    return False


def _reopen_closed() -> None:
    """Connect 0, 1 and 2 to the null device where they are closed: else a checkpoint gets the number and the prints."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            fd = os.open(os.devnull, os.O_RDWR)  # the lowest free number is this one
            os.set_inheritable(fd, True)
