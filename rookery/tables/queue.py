"""Where unrolls wait for the learner. Single-threaded, over given memory; it decides, it never waits.

`QueueTable` trains every unroll once. With max_lag 0 a batch is one unroll of every actor, put together in the order
of their numbers, so that the result does not depend on who came first.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rookery.core import tree
from rookery.core.types import Unroll


class QueueTable:
    def __init__(self, unrolls: int):
        self.unrolls = unrolls  # per batch
        self._waiting: dict[tuple[int, int], tuple[Unroll, Callable[[], None]]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def steps(self) -> int:
        """Live environment steps that wait here."""
        return sum(int(np.sum(unroll.live)) for unroll, _ in self._waiting.values())

    def can_insert(self) -> bool:
        return len(self._waiting) < self.unrolls

    def can_sample(self) -> bool:
        """Whether every actor has delivered the oldest unroll."""
        oldest = min(self._waiting)[0] if self._waiting else 0
        return sum(sequence == oldest for sequence, _ in self._waiting) >= self.unrolls

    def insert(self, unroll: Unroll, actor: int, sequence: int, release: Callable[[], None] = lambda: None) -> None:
        """`unroll` holds numpy arrays; `release` is called once the batch has been copied out of them."""
        key = (sequence, actor)
        assert key not in self._waiting, f"unroll {sequence} of actor {actor} came twice"
        self._waiting[key] = (unroll, release)

    def sample(self) -> Unroll:
        """The next batch, as torch tensors that own their memory: lanes side by side, ordered by actor."""
        assert self.can_sample(), f"{len(self)} unrolls wait, a batch has one of each of {self.unrolls} actors"
        keys = sorted(self._waiting)[: self.unrolls]
        taken = [self._waiting.pop(key) for key in keys]
        parts = [tree.map_fields(unroll, tree.to_torch) for unroll, _ in taken]
        axis = {"version": 0, "lane": 0}
        fields = {
            name: tree.concat([getattr(part, name) for part in parts], axis.get(name, 1))
            for name in Unroll.__dataclass_fields__
        }
        for _, release in taken:
            release()
        return Unroll(**fields)
