"""Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP during a whole command: the first requests shutdown, the second exits.

The first signal only sets `requested`: the loop finishes the current update, writes a checkpoint and exits with that
code. The second kills the workers and exits at once. Nothing is raised into the middle of a computation; only before
the run begins, around work without a deadline (`interruptible`), a request ends that work.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from rookery.core.errors import INTERRUPT, REQUEUE, RookeryError

CODES = {signal.SIGINT: INTERRUPT, signal.SIGTERM: REQUEUE}
for name in ("SIGUSR1", "SIGHUP"):
    if hasattr(signal, name):
        CODES[signal.Signals[name]] = REQUEUE
# A background job of a shell ignores Ctrl-C, one under nohup SIGHUP, and both must keep doing so.
MAY_BE_IGNORED = {getattr(signal, name) for name in ("SIGINT", "SIGHUP") if hasattr(signal, name)}

SIGNAL = {INTERRUPT: signal.SIGINT, REQUEUE: signal.SIGTERM}  # that stands for an exit code

# `timeout` and batch systems signal a process and then its whole group: the same signal twice, one request.
ECHO = 0.2  # seconds


class Stopped(RookeryError):
    """Shutdown was requested before the run had begun: there is nothing to save."""

    def __init__(self, code: int):
        super().__init__("asked to stop before the run had begun: no step was taken")
        self.exit_code = code


class _Leave(KeyboardInterrupt):
    """Raised into what is `interruptible`; not caught by an environment's `except Exception`."""


class Signals:
    """Context manager, for the main thread; in any other thread it does nothing, and `requested` stays None.

    `kill` is called before an exit at once: it must kill the workers, and not wait for them. May be set later.
    """

    def __init__(self, kill: Callable[[], None] | None = None, clock: Callable[[], float] = time.monotonic):
        self.kill = kill
        self._clock = clock
        self._first: tuple[signal.Signals, float] | None = None  # signal and time of the request
        self._echoes = False  # the request was not a signal of this process, which may come as well
        self._old: dict[int, Any] = {}
        self._old_wakeup = -1
        self._pipe: tuple[int, int] | None = None
        self._patience: float | None = None  # seconds that interruptible work has left after a request

    @property
    def requested(self) -> int | None:
        """The exit code that was asked for, None if none was."""
        self._drain()
        return None if self._first is None else CODES[self._first[0]]

    @property
    def requested_at(self) -> float | None:
        """When that was."""
        self._drain()
        return None if self._first is None else self._first[1]

    def fileno(self) -> int:
        """Readable from a signal until `requested` is looked at: give it to `wait` so that a blocked one notices."""
        if self._pipe is None:
            raise ValueError("signals are not being watched: use it as a context manager")
        return self._pipe[0]

    def __enter__(self) -> Signals:
        read, write = os.pipe()
        self._pipe = (read, write)
        os.set_blocking(read, False)
        os.set_blocking(write, False)
        if threading.current_thread() is not threading.main_thread():
            return self
        # The descriptor is written by the C handler, so that a signal just before a poll still ends that poll.
        self._old_wakeup = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in CODES:
            old = signal.getsignal(number)
            if not (number in MAY_BE_IGNORED and old == signal.SIG_IGN):
                self._old[number] = old
                signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, old in self._old.items():
            if signal.getsignal(number) == self._handle:  # and not `ended`
                signal.signal(number, signal.SIG_DFL if old is None else old)  # None: was not installed from Python
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(self._old_wakeup)
        self._old = {}
        if self._pipe is not None:
            os.close(self._pipe[0])
            os.close(self._pipe[1])
            self._pipe = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now, came = self._clock(), signal.Signals(number)
        if self._first is None:
            self._first = (came, now)
            self._interrupt()
        elif self._echoes:
            self._echoes = False
        elif came != self._first[0] or now - self._first[1] > ECHO:
            if self.kill is not None:
                with contextlib.suppress(Exception):
                    self.kill()
            os._exit(CODES[came])

    def request(self, number: signal.Signals) -> None:
        """Ask for shutdown as if this signal had come; from any thread. Nothing if that was done before.

        A batch system signals every process of a job: the first signal after this counts as its echo.
        """
        if self._first is None:
            self._first, self._echoes = (number, self._clock()), True
            if self._pipe is not None:
                os.write(self._pipe[1], b"\0")

    def check(self) -> None:
        """Raise `Stopped` if shutdown was requested."""
        if (code := self.requested) is not None:
            raise Stopped(code)

    @contextlib.contextmanager
    def interruptible(self, patience: float) -> Iterator[None]:
        """Around work before a run begins that has no deadline, such as an environment's constructor.

        Ctrl-C ends it at once, another request after `patience` seconds: `Stopped` is raised. Code that is stuck in a
        call outside Python is not interrupted.
        """
        old = signal.getsignal(signal.SIGALRM)
        try:
            try:
                self._patience = patience
                self._interrupt()
                yield
            finally:
                self._patience = None  # from here on nothing is raised
        except _Leave:
            raise Stopped(self.requested or INTERRUPT) from None
        finally:
            if self._first is not None:
                signal.setitimer(signal.ITIMER_REAL, 0.0)
                signal.signal(signal.SIGALRM, signal.SIG_DFL if old is None else old)

    def _interrupt(self) -> None:
        """End what is interruptible, if shutdown was requested. The alarm is an environment's until then."""
        if self._first is None or self._patience is None:
            return
        signal.signal(signal.SIGALRM, lambda *_: self._leave())
        signal.setitimer(signal.ITIMER_REAL, max(0.001, self._patience), 1.0)  # again, if the first one was caught
        if self._first[0] == signal.SIGINT:
            self._leave()

    def _leave(self) -> None:
        if self._patience is not None:
            raise _Leave

    def _drain(self) -> None:
        """Forget wake-ups: those that are known by now, and those of signals that are not ours (SIGWINCH)."""
        if self._pipe is not None:
            with contextlib.suppress(BlockingIOError):
                os.read(self._pipe[0], 4096)


def ended(code: int) -> None:
    """The exit code is decided, and only the interpreter has to end: a signal that comes now ends it with that code."""
    for number in CODES:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda *_: os._exit(code))


class Patience:
    """Time for one wait, or for several that share it: `seconds`, and `hurried` ones once shutdown was requested.

    Those count from the request; from `since`, if that is later.
    """

    def __init__(
        self, signals: Signals, seconds: float, hurried: float, since: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ):  # fmt: skip
        self._signals, self._clock = signals, clock
        self._began, self._seconds, self._hurried, self._since = clock(), seconds, hurried, since

    def left(self) -> float:
        """Seconds, 0 when it has come to its end."""
        until, requested = self._began + self._seconds, self._signals.requested_at
        if requested is not None:
            until = min(until, max(requested, self._since) + self._hurried)
        return max(0.0, until - self._clock())

    def spent(self) -> float:
        return self._clock() - self._began
