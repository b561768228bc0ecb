"""Straggler preemption (DD-PPO, Wijmans et al. 2020): once enough ranks have finished a rollout, the others stop.

A counter in the group's store counts the ranks that have finished. Each round has its own key, so no reset is needed
and no rank can read the count of another round (P23).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Protocol

LOOK = 0.002  # seconds between two looks at the store


class Counter(Protocol):
    rank: int
    size: int

    def count(self, key: str, more: int = 0) -> int: ...
    def forget(self, key: str) -> None: ...


class Preemption:
    """`share` of the ranks have to be finished. `due` is asked in the middle of a rollout, often."""

    def __init__(self, group: Counter, share: float, clock: Callable[[], float] = time.monotonic):
        self._group, self._clock = group, clock
        self._enough = max(1, math.ceil(share * group.size - 1e-9))
        self._round, self._due, self._looked = 0, False, -math.inf

    def begin(self, round: int) -> None:
        self._round, self._due = round, False

    def due(self) -> bool:
        """Whether enough ranks have finished this round."""
        if not self._due and self._clock() - self._looked >= LOOK:
            self._looked = self._clock()
            self._due = self._group.count(self._key(self._round)) >= self._enough
        return self._due

    def finished(self) -> None:
        """This rank has finished its rollout of the round."""
        self._group.count(self._key(self._round), 1)
        if self._group.rank == 0 and self._round > 0:  # all ranks have left that one: they vote before they train
            self._group.forget(self._key(self._round - 1))

    @staticmethod
    def _key(round: int) -> str:
        return f"finished/{round}"
