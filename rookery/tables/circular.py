"""A circular buffer of batches: each is trained on several times, in a random order (IMPACT, Luo et al. 2020).

New batches come from a queue. A batch leaves after `uses` updates; if the buffer is full when a new one comes, the
oldest makes room, and is counted as evicted if it was never trained on. The learner goes on with what is here while
its actors are busy, and its actors go on while it is busy.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import numpy as np
import torch

from rookery.core.types import Delivery, Sample
from rookery.tables.queue import LagQueue, RoundQueue
from rookery.tables.table import Losses, Plain


@dataclass(eq=False)
class Kept:
    sample: Sample  # as the queue gave it
    uses: int = 0


class CircularTable(Plain):
    """Around a queue: what is not about the buffer is the queue's."""

    def __init__(self, queue: RoundQueue | LagQueue, batches: int, uses: int, seed: int):
        assert batches >= 1 and uses >= 1, (batches, uses)
        self.queue, self.batches, self.uses = queue, batches, uses
        self.rounds, self.ahead, self.paced_by_env = queue.rounds, queue.ahead, queue.paced_by_env
        self._kept: list[Kept] = []  # the oldest first
        self._rng = random.Random(seed)
        self._losses = Losses()
        self._left, self._left_uses = 0, 0  # batches that have left, and how often they were used

    def __len__(self) -> int:
        return len(self.queue)

    @property
    def steps(self) -> int:
        return self.queue.steps + sum(kept.sample.fresh for kept in self._kept if not kept.uses)

    @property
    def due(self) -> bool:
        return bool(self._kept) or self.queue.due

    @property
    def open(self) -> bool:
        return self.queue.open

    @property
    def settled(self) -> bool:
        return self.queue.settled and not (self.rounds and self.due)

    @property
    def patience(self) -> float:
        return 0.0 if self._kept else self.queue.patience

    def wants(self, actor: int, going: bool) -> bool:
        return self.queue.wants(actor, going) and not (self.rounds and self._kept)

    def ordered(self, actor: int, version: int) -> None:
        self.queue.ordered(actor, version)

    def insert(self, delivery: Delivery) -> None:
        self.queue.insert(delivery)

    def next(self, version: int, progress: float) -> Sample | None:
        if (new := self.queue.next(version, progress)) is not None:
            if len(self._kept) == self.batches:
                self._leave(self._kept[0])
            self._kept.append(Kept(new))
        if not self._kept:
            return None
        drawn = self._rng.choice(self._kept)
        batch, fresh = drawn.sample.batch, drawn.sample.fresh
        if drawn.uses:  # statistics of observations and rewards count it once
            batch, fresh = replace(batch, replayed=torch.ones(len(batch.lane), dtype=torch.bool)), 0
        drawn.uses += 1  # now, not after the update: its steps do not wait here any more
        return drawn.sample._replace(batch=batch, fresh=fresh, keys=drawn)

    def update(self, sample: Sample, priorities: np.ndarray | None, version: int) -> None:
        kept: Kept = sample.keys
        if kept.uses >= self.uses:
            self._leave(kept)

    def _leave(self, kept: Kept) -> None:
        self._kept.remove(kept)
        if not kept.uses:
            self._losses.evicted += kept.sample.fresh
        self._left, self._left_uses = self._left + 1, self._left_uses + kept.uses
        self.queue.update(kept.sample, None, 0)  # its memory

    def lost(self, actor: int) -> int:
        return self.queue.lost(actor)

    def losses(self) -> Losses:
        losses, own = self.queue.losses(), self._losses.taken()
        losses.evicted += own.evicted
        return losses

    def stats(self) -> dict[str, float]:
        return self.queue.stats() | {
            "kept_batches": float(len(self._kept)), "uses_per_batch": self._left_uses / max(1, self._left),
        }  # fmt: skip

    def stop(self) -> None:
        """What was trained on at least once is not due any more: the rest is trained on once."""
        for kept in [kept for kept in self._kept if kept.uses]:
            self._leave(kept)
        self.uses = 1

    def close(self) -> None:
        for kept in list(self._kept):
            self._leave(kept)
        self.queue.close()
