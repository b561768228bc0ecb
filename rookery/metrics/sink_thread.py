"""One sink on a separate thread: the learner hands a record over and continues.

The queue is bounded. While the sink is blocked, by a slow disk or a file server that is gone, the newest records wait;
older ones are discarded and counted. Closing has a deadline: a sink that is still blocked then is abandoned. Its thread
is a daemon and holds no lock that the end of the interpreter asks for, so the process can exit.

Handing over takes no lock and wakes no thread: the sink thread polls the queue a few times a second. On a busy
machine, waking a thread costs the one that wakes it milliseconds, because the woken one takes its place.

This is no pool and no retry logic: a sink that can try again (`JsonlSink`) does that by itself. A sink with a queue
`news` tells the user through it; of the others, the first failure is a warning.
"""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any

from rookery.core.errors import RookeryError

LIMIT = 10_000  # records that wait; about three hours at one per second
LOOK = 0.2  # seconds between two polls of the queue
STUCK = 30.0  # seconds for one record, after which the user is told


class SinkThread:
    """For one producer. Failures are counted and warned of once; after `patience` in a row, the sink is left out."""

    patience = 10

    def __init__(self, sink: Any, limit: int = LIMIT, clock: Callable[[], float] = time.monotonic):
        self.sink, self.name = sink, getattr(sink, "name", type(sink).__name__)
        self.failures = 0
        self._streak = 0  # failures in a row
        self._offered = self._written = 0  # records
        self._in_hand = False  # the sink is writing one
        self._clock = clock
        self._since: float | None = None  # when it began to
        self._told_stuck = False
        self._why = ""  # the last failure
        self._waiting: deque[Any] = deque(maxlen=limit)
        self._closing, self._abandoned = threading.Event(), False
        self._thread: threading.Thread | None = None

    def put(self, record: Any) -> None:
        """Takes microseconds. The record is encoded later, on the thread: it must not be changed from now on."""
        self._offered += 1
        if not self._closing.is_set():
            self._waiting.append(record)  # discards the oldest if the queue is full
            self._start()

    def news(self) -> list[str]:
        """What the user should know and was not told yet. Takes microseconds, as `put` does."""
        told = []
        queue = getattr(self.sink, "news", ())
        while queue:
            told.append(f"{self.name}: {queue.popleft()}")
        since = self._since
        if since is not None and not self._told_stuck and self._clock() - since > STUCK:
            self._told_stuck = True
            told.append(f"{self.name} has been blocked for {STUCK:.0f} s: training continues, and its records wait")
        return told

    def ask_to_close(self) -> None:
        """Write what waits, then close the sink. Does not wait for that."""
        self._closing.set()
        self._start()

    def join(self, timeout: float) -> bool:
        """After `ask_to_close`: wait for the thread to end. If it does not, it will write no further record."""
        if self._thread is None:  # none could be started
            return False
        self._thread.join(max(0.0, timeout))
        self._abandoned = self._thread.is_alive()
        return not self._abandoned

    def abandon(self) -> None:
        """After `join`: end what the sink may have started, if it is still blocked. Takes a second at most."""
        if self._abandoned and self._thread is not None and hasattr(self.sink, "abandon"):
            self.sink.abandon()
            self._thread.join(1.0)

    @property
    def lost(self) -> int:
        """Records that were handed over and are not written."""
        lost = self._offered - self._written
        if hasattr(self.sink, "unwritten"):  # a sink that keeps records counts the one in hand itself
            lost += self.sink.unwritten - self._in_hand
        return lost

    @property
    def why(self) -> str:
        """The reason for that, where there is one."""
        reason = self._why or getattr(self.sink, "why", "") or "more records than it could take"
        return "blocked" if self._abandoned else reason

    def _start(self) -> None:
        if self._thread is not None:
            return
        thread = threading.Thread(target=self._work, name=f"sink {self.name}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # a limit on threads: the next record tries again
            self._why = str(error)
        else:
            self._thread = thread

    def _work(self) -> None:
        closing = False
        while not closing:
            closing = self._closing.wait(LOOK)
            while self._waiting and not self._abandoned:
                record, self._in_hand, self._since = self._waiting.popleft(), True, self._clock()
                taken = self._streak < self.patience and self._try(self.sink.write, record)
                self._in_hand, self._since = False, None
                self._written += taken
                self._streak = 0 if taken else self._streak
        self._try(self.sink.close)

    def _try(self, call: Callable[..., None], *args: Any) -> bool:
        try:
            call(*args)
        except Exception as error:  # a sink must not stop a run
            self.failures += 1
            self._streak += 1
            self._why = str(error) if isinstance(error, RookeryError) else f"{type(error).__name__}: {error}"
            if self.failures > 1:
                return False
            if hasattr(self.sink, "news"):
                self.sink.news.append(f"failed, training continues: {self._why}")
            else:
                with contextlib.suppress(Warning):  # a filter may turn it into an exception: not in this thread
                    warnings.warn(f"{type(self.sink).__name__} failed, training continues: {self._why}", stacklevel=2)
            return False
        return True
