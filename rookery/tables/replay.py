"""The replay memory as a table of the training loop: when it is drawn from, and what follows an update.

`ReplayTable`: actors and learner take turns. One unroll of every actor comes in, in the order of the actors; then as
many updates follow as the ratio of draws to insertions asks for (without a ratio: one). It repeats bit for bit.
`FreeReplayTable`: actors run ahead, and threads draw batches ahead of the learner (without any, it draws itself). A
batch is picked under the lock and copied outside of it; items that were overwritten meanwhile are replaced by others.
"""

from __future__ import annotations

import threading

import numpy as np

from rookery.core.types import Delivery, Replay, Sample
from rookery.tables.loader import Loader
from rookery.tables.memory import Drawn, ReplayMemory
from rookery.tables.rounds import Rounds
from rookery.tables.snapshot import Snapshot
from rookery.tables.table import POLL, Losses

AHEAD = 3  # unrolls per actor that runs ahead: it goes on filling while the learner is busy with an update
PUBLISH = 0.1  # seconds between two publications of weights, where actors run ahead
LOOK = 0.002  # seconds to wait for a delivery while a batch is being drawn
PIECE = 10_000  # items removed at once where loaders wait for the lock: 10 ms, if ranks are kept


class ReplayTable:
    rounds, ahead, publish_every = True, 1, 0.0
    small_updates, paced_by_env = True, True

    def __init__(self, memory: ReplayMemory, plan: Replay, actors: int):
        self.memory, self.config = memory, plan.memory
        self._round = Rounds(actors)
        self._turn = False  # without a ratio, one update follows each round
        self._trimming = False  # a soft capacity is exceeded by more than is removed at once
        self._stopped = False
        self._evicted = memory.steps_evicted  # as far as the ledger knows

    def __len__(self) -> int:
        return len(self.memory)

    @property
    def steps(self) -> int:
        held = sum(_steps(delivery) for delivery in self._round.delivered.values())
        return self.memory.steps_waiting + held

    @property
    def due(self) -> bool:
        if self._stopped or self._round.open:
            return False
        return self.memory.can_sample() and (self.config.samples_per_insert > 0 or self._turn)

    @property
    def open(self) -> bool:
        return self._round.open

    @property
    def settled(self) -> bool:
        return not (self._round.open or self.due)

    @property
    def patience(self) -> float:
        return 0.0 if self.due else POLL

    def wants(self, actor: int, going: bool) -> bool:
        return self._round.wants(actor, going) and not self.due

    def ordered(self, actor: int, version: int) -> None:
        self._round.order(actor)

    def insert(self, delivery: Delivery) -> None:
        self._round.deliver(delivery)
        if self._round.complete:
            self._take_in()

    def _take_in(self) -> None:
        for delivery in self._round.take():
            self.memory.insert(delivery.arrays, delivery.actor)
            delivery.release()
            self._turn = True

    def next(self, version: int, progress: float) -> Sample | None:
        return _sample(self.memory.sample(progress)) if self.due else None

    def update(self, sample: Sample, priorities: np.ndarray | None, version: int) -> None:
        if priorities is not None:
            self.memory.update(sample.keys, priorities)
        self._trim(version, None)
        self._turn = False

    def _trim(self, version: int, most: int | None) -> None:
        """Keep to a soft capacity, removing at most so many items at once."""
        if self.config.remover == "soft" and version % self.config.remove_every == 0:
            self._trimming = True
        if self._trimming:
            self._trimming = self.memory.remove_to_fit(most)

    def lost(self, actor: int) -> int:
        self._round.lost(actor)
        self.memory.forget(actor)  # its successor counts frames from 0
        return 0

    def losses(self) -> Losses:
        losses = Losses()
        losses.evicted = self.memory.steps_evicted - self._evicted
        self._evicted += losses.evicted
        return losses

    def stats(self) -> dict[str, float]:
        return self.memory.stats()

    def snapshot(self) -> Snapshot:
        """The memory as it is now, for saving."""
        return Snapshot(self.memory)

    def stop(self) -> None:
        self._stopped = True  # the memory and its ratio are saved: what is due now is due after resuming

    def close(self) -> None:
        self._take_in()  # of a round that was not completed


class FreeReplayTable(ReplayTable):
    rounds, ahead, publish_every = False, AHEAD, PUBLISH

    def __init__(self, memory: ReplayMemory, plan: Replay, actors: int):
        super().__init__(memory, plan, actors)
        self.lock = threading.Lock()  # a memory is single-threaded: everyone who touches it holds this
        self._progress = 0.0
        self._ahead = 0  # steps in batches that were picked and not trained on yet
        self._under_way = 0  # these batches
        self._loader: Loader[Drawn] | None = None  # started with the first request

    @property
    def steps(self) -> int:
        with self.lock:  # a loader may be in the middle of a draw
            return self.memory.steps_waiting + self._ahead

    @property
    def due(self) -> bool:
        """What a ratio still asks for. Without one there is no end to it, and nothing is due."""
        if self._stopped or not self.config.samples_per_insert:
            return False
        with self.lock:
            return self._under_way > 0 or (self.memory.limiter.debt > 0 and self.memory.can_sample())

    @property
    def settled(self) -> bool:
        return True

    @property
    def patience(self) -> float:
        if not self.memory.can_sample() and not self._loaded:
            return POLL
        return 0.0 if self._loaded or not self.config.loaders else LOOK

    @property
    def _loaded(self) -> int:
        """Batches that threads have drawn."""
        return 0 if self._loader is None else len(self._loader)

    def wants(self, actor: int, going: bool) -> bool:
        return going and self.memory.can_insert()

    def ordered(self, actor: int, version: int) -> None:
        pass

    def insert(self, delivery: Delivery) -> None:
        with self.lock:
            self.memory.insert(delivery.arrays, delivery.actor)
        delivery.release()

    def next(self, version: int, progress: float) -> Sample | None:
        self._progress = progress
        drawn = None if self._stopped else self._next_batch()
        if drawn is None:
            return None
        with self.lock:
            self._ahead -= drawn.fresh
            self._under_way -= 1
        return _sample(drawn)

    def _next_batch(self) -> Drawn | None:
        if not self.config.loaders:
            return self._draw()
        if self._loader is None:
            self._loader = Loader(self._draw, self.config.prefetch, self.config.loaders)
        return self._loader.get(0.0)

    def _draw(self) -> Drawn | None:
        """In a loader's thread, or in the learner's if there is none."""
        memory = self.memory
        with self.lock:
            if not memory.can_sample():
                return None
            picked = memory.pick(self._progress)
            self._ahead += picked.fresh
            self._under_way += 1
        batch = memory.copy(picked)
        with self.lock:
            gone = memory.lacks(picked.keys)
            if gone.any():  # overwritten before, or while, they were copied
                self._ahead -= picked.fresh
                picked = memory.replaced(picked, gone, self._progress)
                self._ahead += picked.fresh
                batch = memory.copy(picked)
        return Drawn(batch, picked.keys, picked.fresh)

    def update(self, sample: Sample, priorities: np.ndarray | None, version: int) -> None:
        with self.lock:
            if priorities is not None:
                self.memory.update(sample.keys, priorities)
            self._trim(version, PIECE)

    def lost(self, actor: int) -> int:
        with self.lock:
            self.memory.forget(actor)
        return 0

    def snapshot(self) -> Snapshot:
        with self.lock:
            return Snapshot(self.memory)

    def close(self) -> None:
        loader, self._loader = self._loader, None  # it holds this table as this table holds it
        if loader is not None:
            loader.close()
            loader.check()


def _sample(drawn: Drawn) -> Sample:
    return Sample(drawn.batch, drawn.batch.version.numpy(), drawn.fresh, drawn.keys)


def _steps(delivery: Delivery) -> int:
    """Environment steps in the items of a parcel."""
    return int(delivery.arrays["steps"][: int(delivery.arrays["count"][0])].sum())
