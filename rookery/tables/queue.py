"""Queues of unrolls, each trained on once.

`RoundQueue`: one unroll of every actor is a batch; actors wait for the learner and the learner for the actors.
`LagQueue`: first come, first trained. So many unrolls may wait or be ordered that none is older than `max_lag` versions
when its turn comes; one that took longer is dropped and counted.

Both are single-threaded, and work on the memory that actors have filled: it is given back once a batch was copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from rookery.core import tree
from rookery.core.types import Delivery, Sample
from rookery.core.unroll import Unroll, as_unroll
from rookery.tables.rounds import Rounds
from rookery.tables.table import POLL, Losses, Plain


class RoundQueue(Plain):
    rounds, paced_by_env = True, False

    def __init__(self, actors: int):
        self._round = Rounds(actors)

    def __len__(self) -> int:
        return len(self._round.delivered)

    @property
    def steps(self) -> int:
        return sum(_live(delivery) for delivery in self._round.delivered.values())

    @property
    def due(self) -> bool:
        return self._round.complete

    @property
    def open(self) -> bool:
        return self._round.open and not self._round.complete

    @property
    def settled(self) -> bool:
        return not self._round.open

    @property
    def patience(self) -> float:
        return 0.0 if self.due else POLL

    def wants(self, actor: int, going: bool) -> bool:
        return self._round.wants(actor, going)

    def ordered(self, actor: int, version: int) -> None:
        self._round.order(actor)

    def insert(self, delivery: Delivery) -> None:
        self._round.deliver(delivery)

    def next(self, version: int, progress: float) -> Sample | None:
        return _batch(self._round.take()) if self._round.complete else None

    def update(self, sample: Sample, priorities: np.ndarray | None, version: int) -> None:
        pass

    def lost(self, actor: int) -> int:
        self._round.lost(actor)
        return 0

    def losses(self) -> Losses:
        return Losses()


class LagQueue(Plain):
    """At most (max_lag + 1) batches of unrolls wait or are ordered: the last of them is trained max_lag updates on.

    An order that is older than that already does not count: its actor is slow, or is being replaced, and its unroll
    will be dropped when it comes. So up to max_lag batches of slow actors never stop the others.
    """

    rounds, paced_by_env = False, True

    def __init__(self, actors: int, batch: int, max_lag: int):
        assert batch >= 1 and max_lag >= 1, (batch, max_lag)
        self.batch, self.max_lag, self.bound = batch, max_lag, (max_lag + 1) * batch
        self.ahead = 1 + -(-self.bound // actors)
        self._orders: list[deque[int]] = [deque() for _ in range(actors)]  # versions at the time of the order
        self._young: deque[int] = deque()  # the same of all actors, in order, without those that are too old
        self._waiting: deque[tuple[int, Delivery]] = deque()  # version, unroll
        self._version = 0
        self._losses = Losses()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def steps(self) -> int:
        return sum(_live(delivery) for _, delivery in self._waiting)

    @property
    def due(self) -> bool:
        return len(self._waiting) >= self.batch

    @property
    def settled(self) -> bool:
        return True

    @property
    def patience(self) -> float:
        return 0.0 if self.due else POLL

    def wants(self, actor: int, going: bool) -> bool:
        return going and len(self._waiting) + len(self._young) < self.bound

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

    def _drop(self, delivery: Delivery) -> None:
        self._losses.drop(_live(delivery), "too_old")
        delivery.release()

    def next(self, version: int, progress: float) -> Sample | None:
        if version != self._version:
            self._version = version
            self._drop_old()
        return _batch([self._waiting.popleft()[1] for _ in range(self.batch)]) if self.due else None

    def _drop_old(self) -> None:
        while self._young and self._young[0] < self._oldest:
            self._young.popleft()
        waiting, self._waiting = self._waiting, deque()
        for version, delivery in waiting:
            if version < self._oldest:
                self._drop(delivery)
            else:
                self._waiting.append((version, delivery))

    def update(self, sample: Sample, priorities: np.ndarray | None, version: int) -> None:
        pass

    def lost(self, actor: int) -> int:
        while self._orders[actor]:
            self._void(self._orders[actor].popleft())
        return 0

    def losses(self) -> Losses:
        return self._losses.taken()


def _live(delivery: Delivery) -> int:
    return int(np.count_nonzero(delivery.arrays["live"]))


def _batch(deliveries: Sequence[Delivery]) -> Sample:
    """Unrolls side by side, as torch tensors that own their memory; that of the unrolls is given back."""
    parts = [tree.map_fields(as_unroll(delivery.arrays), tree.to_torch) for delivery in deliveries]
    axis = {"version": 0, "lane": 0}
    fields = {
        name: tree.concat([getattr(part, name) for part in parts], axis.get(name, 1))
        for name in Unroll.__dataclass_fields__
    }
    for delivery in deliveries:
        delivery.release()
    batch = Unroll(**fields)
    return Sample(batch, batch.version.numpy(), int(batch.live.sum()))
