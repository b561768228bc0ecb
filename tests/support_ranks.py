"""Several ranks in threads of one process: a Reduce that waits for all of them, and what runs one function on each."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from rookery.core.reduce import Reduce

PATIENCE = 20.0  # seconds: a rank that waits longer than this waits for one that has left


class Rank(Reduce):
    """Adds in the order of ranks, so that all get the same bits. `in_place`: the result is written to the argument."""

    def __init__(self, rank: int, slots: list[torch.Tensor | None], barrier: threading.Barrier, in_place: bool):
        self.rank, self.size = rank, len(slots)
        self._slots, self._barrier, self._in_place = slots, barrier, in_place
        self.calls: list[tuple[int, ...]] = []  # shapes of what was reduced

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append(tuple(x.shape))
        self._slots[self.rank] = x
        self._barrier.wait(PATIENCE)
        shapes = {tuple(slot.shape) for slot in self._slots}
        assert len(shapes) == 1, f"ranks reduce different things: {shapes}"
        total = self._slots[0].clone()
        for slot in self._slots[1:]:
            total += slot
        self._barrier.wait(PATIENCE)  # nobody overwrites what another one still reads
        return x.copy_(total) if self._in_place else total

    def gather(self, message: bytes) -> list[bytes]:
        self._slots[self.rank] = message
        self._barrier.wait(PATIENCE)
        messages = list(self._slots)
        self._barrier.wait(PATIENCE)
        return messages


def ranks(size: int, in_place: bool = False) -> list[Rank]:
    slots: list[torch.Tensor | None] = [None] * size
    barrier = threading.Barrier(size)
    return [Rank(rank, slots, barrier, in_place) for rank in range(size)]


def together(group: list[Rank], body: Callable[[int], Any]) -> list[Any]:
    """body(rank) on all ranks at once: what each returned, or the exception that it raised.

    Everything that draws from torch's global generator (a Learner's first weights) must be made before.
    """
    results: list[Any] = [None] * len(group)

    def run(rank: int) -> None:
        try:
            results[rank] = body(rank)
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(group))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    waited = [error for error in results if isinstance(error, threading.BrokenBarrierError)]
    if waited:
        raise AssertionError(f"{len(waited)} of {len(group)} ranks waited for one that had left: {results}")
    return results


def agreed(results: list[Any]) -> list[Any]:
    """The results of `together`; an exception of any rank is raised here."""
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
