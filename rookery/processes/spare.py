"""One process with its libraries loaded and nothing to do, so that a worker can be replaced without waiting for torch.

It is started some seconds after the workers, so that short runs do not pay for it, and again some seconds after it was
used. It has made no environment. One that dies is replaced silently, a few times; then the crew works without a spare.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rookery.core.errors import RookeryError
from rookery.processes.worker import Worker

AFTER = 5.0  # seconds from the start of the workers, or of the last replacement
TRIES = 3  # spares that may fail


class Spare:
    """`start` starts a worker with a message {"spare": True, ...}; None: no spare is wanted."""

    def __init__(self, start: Callable[[], Worker] | None, clock: Callable[[], float] = time.monotonic):
        self.worker: Worker | None = None
        self._start, self._clock = start, clock
        self._due: float | None = None  # when one is to be started; None: not until the workers are up
        self._failed = 0

    def expect(self) -> None:
        """The workers are up: have one ready soon."""
        self._due = self._clock() + AFTER

    def look(self) -> None:
        """Start one if it is time. Call it now and then."""
        if self._start is None or self._due is None or self._failed >= TRIES:
            return
        if self.worker is not None and not self.worker.gone():
            return
        if self.worker is not None:
            self._drop()
        elif self._clock() >= self._due:
            try:
                self.worker = self._start()
            except RookeryError:  # no memory, no processes
                self._drop()

    def take(self) -> Worker | None:
        """The process, if there is one; another one will follow."""
        worker, self.worker = self.worker, None
        if self._due is not None:
            self.expect()
        if worker is not None and worker.gone():
            worker.channel.close()
            return None
        return worker

    def _drop(self) -> None:
        self._failed += 1
        if self.worker is not None:
            self.worker.channel.close()
        self.worker = None
        self.expect()
