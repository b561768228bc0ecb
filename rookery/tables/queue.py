"""Queues of unrolls, each trained on once.

`RoundQueue`: one unroll of every actor is a batch; actors wait for the learner and the learner for the actors.
`LagQueue`: first come, first trained. So many unrolls may wait or be ordered that none is older than `max_lag` versions
when its turn comes; one that took longer is dropped and counted. Threads may put batches together ahead of the learner.

Both may add unrolls of earlier batches to each new one (a ring). The memory that actors have filled is given back once
a batch was copied from it.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from rookery.core.types import Delivery, Sample
from rookery.tables.batch import Batcher, Batches, Load, Loaded, live_steps, load_of
from rookery.tables.rounds import Rounds
from rookery.tables.table import POLL, Losses, Plain
from rookery.tables.unroll_ring import UnrollRing


class RoundQueue(Plain):
    rounds, paced_by_env = True, False

    def __init__(self, actors: int, ring: UnrollRing | None = None, batcher: Batches | None = None):
        self._round, self._ring = Rounds(actors), ring
        self._batcher = batcher or Batcher()
        self._losses = Losses()
        self._stale = self._steps = 0  # steps whose action is older than their unroll, and all steps

    def __len__(self) -> int:
        return len(self._round.delivered)

    @property
    def steps(self) -> int:
        under_way = sum(load.steps for load in self._batcher.under_way)
        return under_way + sum(live_steps(delivery.arrays) for delivery in self._round.delivered.values())

    @property
    def due(self) -> bool:
        return self._round.complete or bool(self._batcher.under_way)

    @property
    def open(self) -> bool:
        return self._round.open and not self._round.complete

    @property
    def settled(self) -> bool:
        return not (self._round.open or self._batcher.under_way)

    @property
    def patience(self) -> float:
        if self._batcher.under_way and not self._batcher.ready:
            return self._batcher.look
        return 0.0 if self.due else POLL

    def wants(self, actor: int, going: bool) -> bool:
        return self._round.wants(actor, going) and not self._batcher.under_way

    def ordered(self, actor: int, version: int) -> None:
        self._round.order(actor)

    def insert(self, delivery: Delivery) -> None:
        self._round.deliver(delivery)
        self._stale, self._steps = self._stale + delivery.report.stale, self._steps + delivery.report.steps

    def next(self, version: int, progress: float) -> Sample | None:
        if self._round.complete and not self._batcher.direct and self._batcher.room:
            self._batcher.start(load_of(self._round.take(), self._ring))
        if (loaded := self._batcher.take()) is not None:
            load, sample = loaded.load, loaded.sample
        elif self._round.complete and self._batcher.direct:
            load = load_of(self._round.take(), self._ring)
            sample = self._batcher.now(load)
        else:
            return None
        _hand_over(load, self._ring, version)
        if sample is None:
            self._losses.drop(load.steps, "lost")
        return sample

    def update(self, sample: Sample, priorities: np.ndarray | None, version: int) -> None:
        self._batcher.give_back(sample.keys)

    def lost(self, actor: int) -> int:
        self._round.lost(actor)
        return 0

    def losses(self) -> Losses:
        return self._losses.taken()

    def stats(self) -> dict[str, float]:
        stale = {"stale_share": self._stale / self._steps} if self._stale else {}
        return stale | self._batcher.stats() | ({} if self._ring is None else self._ring.stats())

    def close(self) -> None:
        self._batcher.close()


class LagQueue(Plain):
    """At most `batches` batches of unrolls (max_lag + 1) wait or are ordered: the last is trained max_lag updates on.

    An order that is older than that already does not count: its actor is slow, or is being replaced, and its unroll
    will be dropped when it comes. So up to max_lag batches of slow actors never stop the others. If a batch takes
    several updates, `max_lag` is larger than the number of batches.
    """

    rounds, paced_by_env = False, True

    def __init__(
        self,
        actors: int,
        batch: int,
        max_lag: int,
        batches: int | None = None,
        ring: UnrollRing | None = None,
        batcher: Batches | None = None,
    ):
        assert batch >= 1 and max_lag >= 1, (batch, max_lag)
        self.batch, self.max_lag, self.bound = batch, max_lag, (batches or max_lag + 1) * batch
        self.ahead = 1 + -(-self.bound // actors)
        self._orders: list[deque[int]] = [deque() for _ in range(actors)]  # versions at the time of the order
        self._young: deque[int] = deque()  # the same of all actors, in order, without those that are too old
        self._waiting: deque[tuple[int, Delivery]] = deque()  # version, unroll
        self._version = 0
        self._ring = ring
        self._batcher: Batches = batcher or Batcher()
        self._losses = Losses()
        self._taken = self._late = 0  # unrolls that were trained on, and that were too old

    def __len__(self) -> int:
        return len(self._waiting) + self._loading

    @property
    def _loading(self) -> int:
        return self.batch * len(self._batcher.under_way)

    @property
    def steps(self) -> int:
        waiting = sum(live_steps(delivery.arrays) for _, delivery in self._waiting)
        return waiting + sum(load.steps for load in self._batcher.under_way)

    @property
    def due(self) -> bool:
        return len(self._waiting) >= self.batch or self._loading > 0

    @property
    def settled(self) -> bool:
        return True

    @property
    def patience(self) -> float:
        if self._batcher.ready:
            return 0.0
        return self._batcher.look if self._loading else POLL * (not self.due)

    def wants(self, actor: int, going: bool) -> bool:
        return going and len(self) + len(self._young) < self.bound

    def ordered(self, actor: int, version: int) -> None:
        self._orders[actor].append(version)
        self._young.append(version)

    def insert(self, delivery: Delivery) -> None:
        self._void(self._orders[delivery.actor].popleft())
        self._waiting.append((int(delivery.arrays["version"][0]), delivery))
        if self._waiting[-1][0] < self._oldest:
            self._drop(self._waiting.pop()[1])

    def _void(self, version: int) -> None:
        """An order is done with. Which of those with the same version it was makes no difference."""
        if version in self._young:
            self._young.remove(version)

    @property
    def _oldest(self) -> int:
        """The oldest version that is still trained on."""
        return self._version - self.max_lag

    def _drop(self, delivery: Delivery, reason: str = "too_old") -> None:
        self._losses.drop(live_steps(delivery.arrays), reason)
        self._late += 1
        delivery.release()

    def next(self, version: int, progress: float) -> Sample | None:
        if version != self._version:
            self._version = version
            while self._young and self._young[0] < self._oldest:
                self._young.popleft()
            self._drop_older(self._oldest)
        loaded = self._loaded()
        self._load_ahead(version + (loaded is not None))
        if loaded is not None and loaded.sample is not None:
            return self._handed_over(loaded.load, loaded.sample)
        if self._loading or len(self._waiting) < self.batch or not self._batcher.direct:
            return None
        load = self._next_load()
        return self._handed_over(load, self._batcher.now(load))

    def _loaded(self) -> Loaded | None:
        """The batch whose turn it is, if threads have made it; one that took too long is dropped as a whole."""
        while (loaded := self._batcher.take()) is not None:
            if loaded.sample is None:
                for delivery in loaded.load.deliveries:
                    self._drop(delivery, "lost")
                continue
            if loaded.sample.versions.min() >= self._oldest:
                return loaded
            self._batcher.give_back(loaded.sample.keys)
            for delivery in loaded.load.deliveries:
                self._drop(delivery)
        return None

    def _handed_over(self, load: Load, sample: Sample) -> Sample:
        _hand_over(load, self._ring, self._version)
        self._taken += self.batch
        return sample

    def _load_ahead(self, version: int) -> None:
        """Have threads put together what is complete. `version`: of the weights when the next batch is trained on.

        Each batch under way puts the turn of those behind it off by a version: what will be too old by then is dropped
        now, or the rest of its batch would have to be dropped with it.
        """
        while self._batcher.room and len(self._waiting) >= self.batch:
            self._drop_older(version + len(self._batcher.under_way) - self.max_lag)
            if len(self._waiting) >= self.batch:
                self._batcher.start(self._next_load())

    def _next_load(self) -> Load:
        deliveries = [self._waiting.popleft()[1] for _ in range(self.batch)]
        return load_of(deliveries, self._ring)

    def _drop_older(self, oldest: int) -> None:
        waiting, self._waiting = self._waiting, deque()
        for version, delivery in waiting:
            if version < oldest:
                self._drop(delivery)
            else:
                self._waiting.append((version, delivery))

    def update(self, sample: Sample, priorities: np.ndarray | None, version: int) -> None:
        self._batcher.give_back(sample.keys)

    def lost(self, actor: int) -> int:
        while self._orders[actor]:
            self._void(self._orders[actor].popleft())
        return 0

    def losses(self) -> Losses:
        return self._losses.taken()

    def stats(self) -> dict[str, float]:
        share = self._late / max(1, self._late + self._taken)
        return {"late_share": share} | self._batcher.stats() | ({} if self._ring is None else self._ring.stats())

    def close(self) -> None:
        self._batcher.close()


def _hand_over(load: Load, ring: UnrollRing | None, version: int) -> None:
    """A batch was copied and is trained on now, by weights of this version."""
    for delivery in load.deliveries:
        delivery.release()
    if ring is not None:
        ring.trained(load.replayed, version)
