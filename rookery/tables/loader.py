"""Threads that draw whole batches ahead of the learner, so that it does not wait for memory to be gathered."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

LOOK = 0.02  # seconds between two looks of a thread that has nothing to do
STOP = 10.0  # seconds for a thread to finish the batch it is drawing

T = TypeVar("T")


class Loader(Generic[T]):
    def __init__(self, draw: Callable[[], T | None], depth: int, threads: int, pause: float = LOOK):
        """`draw` returns the next batch, or None if there is none yet; it does its own locking.

        `pause`: seconds until it is asked again; 0 if it waits by itself.
        """
        self._draw, self._full, self._pause = draw, queue.Queue[T](depth), pause
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._threads = [threading.Thread(target=self._work, name=f"loader-{i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    def __len__(self) -> int:
        return self._full.qsize()

    def get(self, timeout: float) -> T | None:
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

    def close(self) -> None:
        """Stop. Batches that were drawn and not taken are discarded."""
        self._stop.set()
        for thread in self._threads:
            thread.join(STOP)

    def _work(self) -> None:
        torch.set_num_threads(1)  # belongs to the calling thread
        try:
            while not self._stop.is_set():
                drawn = self._draw()
                if drawn is None:
                    self._stop.wait(self._pause)
                    continue
                while not self._put(drawn) and not self._stop.is_set():
                    pass
        except BaseException as error:
            self._error = error

    def _put(self, drawn: T) -> bool:
        try:
            self._full.put(drawn, timeout=LOOK)
            return True
        except queue.Full:
            return False
