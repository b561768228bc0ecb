"""What every table promises: where data waits for the learner, who may act, and what is trained on next.

A table never waits: `wants`, `next` and `due` answer at once, and the training loop (`topologies/loop.py`) waits. It
knows no process and no journal; it counts what it loses, and the loop writes that into the ledger.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from rookery.core.types import Delivery, Sample
from rookery.tables.memory import ReplayMemory
from rookery.tables.snapshot import Snapshot

POLL = 0.2  # seconds to wait for deliveries while there is nothing to train on


class Table(Protocol):
    rounds: bool  # actors and learner take turns: one unroll of every actor, then all that is due is learnt
    ahead: int  # unrolls that one actor may have ordered or waiting
    publish_every: float  # seconds between two publications of weights; 0: before each order
    small_updates: bool  # an update is short: what only records need is computed when a record is due
    paced_by_env: bool  # progress counts steps taken, not steps trained on

    @property
    def memory(self) -> ReplayMemory | None:
        """What is saved beside the checkpoints."""
        ...

    def __len__(self) -> int:
        """Unrolls, items or gradients that wait."""
        ...

    @property
    def steps(self) -> int:
        """Environment steps that wait here and were not trained on yet."""
        ...

    @property
    def due(self) -> bool:
        """Whether something is to be trained on before the run may end."""
        ...

    @property
    def open(self) -> bool:
        """Whether a round has begun and is not complete."""
        ...

    @property
    def settled(self) -> bool:
        """Whether a checkpoint may be written now: between two rounds, if actors and learner take turns."""
        ...

    @property
    def patience(self) -> float:
        """Seconds the loop may wait for deliveries: 0 if there is something to train on."""
        ...

    def wants(self, actor: int, going: bool) -> bool:
        """Whether this actor should fill one more unroll. `going`: more environment steps are to be taken.

        While `going`, the answer is the same for every actor that has room for an order.
        """
        ...

    def ordered(self, actor: int, version: int) -> None:
        """An actor was told to fill one, with weights of this version or newer ones."""
        ...

    def insert(self, delivery: Delivery) -> None: ...

    def next(self, version: int, progress: float) -> Sample | None:
        """What to train on now, or None. `version`: of the learner's weights. `progress`: share of the run behind."""
        ...

    def update(self, sample: Sample, priorities: np.ndarray | None, version: int) -> None:
        """The sample was trained on: new priorities, if there are any, and what has to follow."""
        ...

    def lost(self, actor: int) -> int:
        """An actor was replaced: its orders are void. Environment steps that waited with it and are lost."""
        ...

    def losses(self) -> Losses:
        """What was lost since the last call, for the ledger."""
        ...

    def stats(self) -> dict[str, float]: ...

    def snapshot(self) -> Snapshot:
        """The memory as it is now, for saving; only where there is one."""
        ...

    def stop(self) -> None:
        """Shutdown was requested: only what cannot be resumed is still due."""
        ...

    def close(self) -> None:
        """No more deliveries come and nothing more is trained on."""
        ...


class Losses:
    """Environment steps that left a table without being trained on."""

    def __init__(self) -> None:
        self.evicted = 0
        self.dropped: dict[str, int] = {}  # by reason

    def drop(self, steps: int, reason: str) -> None:
        if steps:
            self.dropped[reason] = self.dropped.get(reason, 0) + steps

    def taken(self) -> Losses:
        """These, and start from zero."""
        taken = Losses()
        taken.evicted, taken.dropped = self.evicted, self.dropped
        self.evicted, self.dropped = 0, {}
        return taken


class Plain:
    """What tables without a memory, and without drawing ahead, have in common."""

    ahead: int = 1
    publish_every: float = 0.0
    small_updates: bool = False
    memory: ReplayMemory | None = None

    @property
    def open(self) -> bool:
        return False

    def stats(self) -> dict[str, float]:
        return {}

    def snapshot(self) -> Snapshot:
        raise AssertionError("there is no memory to save")

    def stop(self) -> None:
        pass

    def close(self) -> None:
        pass
