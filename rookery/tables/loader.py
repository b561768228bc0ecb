"""Threads that draw whole batches ahead of the learner, so that it never waits for memory to be gathered.

A replay memory is single-threaded: everybody who touches it holds the lock, for the time of a copy at most.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch

from rookery.tables.replay import Sample

LOOK = 0.02  # seconds between two looks of a thread that has nothing to do
STOP = 10.0  # seconds for a thread to finish the batch it is drawing


class Loader:
    def __init__(self, draw: Callable[[], Sample | None], depth: int, threads: int):
        """`draw` returns the next batch, or None if there is none yet; it does its own locking."""
        self._draw, self._full = draw, queue.Queue(depth)
        self._stop, self._left = threading.Event(), []
        self._error: BaseException | None = None
        self._threads = [threading.Thread(target=self._work, name=f"loader-{i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    def __len__(self) -> int:
        return self._full.qsize()

    def get(self, timeout: float) -> Sample | None:
        """The next batch, or None if none is ready in time."""
        self.check()
        try:
            return self._full.get(timeout=timeout) if timeout > 0 else self._full.get_nowait()
        except queue.Empty:
            return None

    def check(self) -> None:
        """Raise what went wrong in a thread, if anything did."""
        if self._error is not None:
            raise self._error

    def close(self) -> list[Sample]:
        """Stop; returns the batches that were drawn for nothing."""
        self._stop.set()
        for thread in self._threads:
            thread.join(STOP)
        while not self._full.empty():
            self._left.append(self._full.get_nowait())
        return self._left

    def _work(self) -> None:
        torch.set_num_threads(1)  # belongs to the calling thread
        try:
            while not self._stop.is_set():
                sample = self._draw()
                if sample is None:
                    self._stop.wait(LOOK)
                    continue
                while not self._put(sample):
                    if self._stop.is_set():
                        self._left.append(sample)
                        return
        except BaseException as error:
            self._error = error

    def _put(self, sample: Sample) -> bool:
        try:
            self._full.put(sample, timeout=LOOK)
            return True
        except queue.Full:
            return False
