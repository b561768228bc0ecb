"""The child's side of `worker.py`: how a process becomes a worker, and how its errors reach the parent.

A worker module calls `serve(body)` and nothing else. `assigned` is for a body that can also be started as a spare: it
loads its libraries first; which worker it replaces is sent later.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from rookery.core.errors import RookeryError
from rookery.pipes.channel import Channel, ChannelClosed, ChannelTimeout
from rookery.processes.signals import CODES, SIGNAL, Signals
from rookery.processes.worker_log import open_to_append

# The parent decides when a child ends; Ctrl-C and batch systems signal every process.
DEAF = frozenset(CODES)
IDLE = 3600.0  # seconds without a message from the parent; its end closes the channel at once

Body = Callable[[Channel, dict[str, Any], dict[str, int]], None]


class NotNeeded(Exception):
    """The run has ended without a use for this spare process."""


def serve(body: Body) -> None:
    """All that the `__main__` of a worker module needs: body(channel, start_message, fds), with errors reported.

    Import torch and environments inside the body: until `child_entry` has run, the child does not notice that its
    parent has died.
    """
    channel, message, fds = child_entry()
    try:
        body(channel, message, fds)
    except NotNeeded:
        return
    except ChannelClosed:  # the parent is gone: no one to report to
        os._exit(1)
    except BaseException as error:
        report_failure(channel, error)


def heed(channel: Channel, signals: Signals) -> None:
    """From here on a thread receives from the parent: its request to shut down is like a signal to this process."""

    def listen() -> None:
        while True:
            try:
                message = channel.recv(timeout=IDLE)
            except ChannelTimeout:
                continue
            except ChannelClosed:
                return
            if message["op"] == "shutdown":
                signals.request(SIGNAL[message["code"]])
            elif message["op"] == "stop":
                return

    threading.Thread(target=listen, daemon=True).start()


def child_entry(timeout: float = 60.0) -> tuple[Channel, dict[str, Any], dict[str, int]]:
    """Make this process a worker of its parent; returns the channel, the start message and the descriptors."""
    fd, parent = (int(word) for word in sys.argv[-2:])
    del sys.argv[1:]  # ours, and nothing for an environment to parse
    _die_with(parent)
    if not faulthandler.is_enabled():
        faulthandler.enable(all_threads=True)
    for number in DEAF:
        # A handler that does nothing, and not SIG_IGN, which the programs an environment starts would inherit.
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup, where these must ignore it too
            signal.signal(number, _deaf)
            signal.siginterrupt(number, False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, DEAF)
    os.set_inheritable(fd, False)  # a grandchild must not hold the channel open
    channel = Channel.from_fd(fd)
    os.register_at_fork(after_in_child=lambda: _become_ordinary(channel))
    envelope = channel.recv(timeout)
    sys.path[:] = envelope["sys_path"]
    os.environ.pop("PYTHONPATH", None)
    if envelope["pythonpath"] is not None:
        os.environ["PYTHONPATH"] = envelope["pythonpath"]
    for number in envelope["fds"].values():
        os.set_inheritable(number, False)
    return channel, envelope["message"], envelope["fds"]


def assigned(channel: Channel, start: dict[str, Any]) -> dict[str, Any]:
    """The start message; a spare process waits for the one of the worker that it replaces, and takes over its log."""
    if not start.get("spare"):
        return start
    order = channel.recv(IDLE)
    while order["op"] != "assign":
        if order["op"] == "stop":
            raise NotNeeded
        order = channel.recv(IDLE)
    if order["log"] is not None:
        with contextlib.suppress(OSError):
            fd = open_to_append(Path(order["log"]))
            os.dup2(fd, 1)
            os.dup2(fd, 2)
            os.close(fd)
    channel.send({"op": "assigned"}, timeout=IDLE)
    return order["message"]


def report_failure(channel: Channel, error: BaseException) -> NoReturn:
    """Tell the parent, write the traceback to the log, exit with code 1 whatever threads an environment has left."""
    failure = failure_message(error)
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.write(failure["traceback"])
        sys.stderr.flush()
    with contextlib.suppress(Exception):
        channel.send(failure, timeout=5.0)
    os._exit(1)


def failure_message(error: BaseException) -> dict[str, Any]:
    """What a worker says of the error that ends it."""
    return {
        "op": "failed",
        "error": str(error) if isinstance(error, RookeryError) else f"{type(error).__name__}: {error}",
        "reason": str(getattr(error, "reason", "worker_error")),
        "exit_code": int(getattr(error, "exit_code", 1)),
        "traceback": "".join(traceback.format_exception(error)),
    }


def _die_with(parent: int) -> None:
    """Have the kernel kill us when the parent ends, also by kill -9."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it ended before we asked
        os._exit(1)


def _deaf(number: int, frame: object) -> None:
    pass


def _become_ordinary(channel: Channel) -> None:
    """In a process that an environment forks: restore signal handling, close the channel."""
    channel.close()
    for number in DEAF:
        if signal.getsignal(number) is _deaf:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
