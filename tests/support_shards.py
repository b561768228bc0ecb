"""Shards that answer when the test says so, and a table in front of them."""

from __future__ import annotations

import copy
from collections import deque
from concurrent.futures import Future
from typing import Any

import numpy as np
from support_parcels import SERIAL, VECTOR, Maker, replay

from rookery.core.types import ActorReport, Delivery, EnvSpec, Replay, Sample
from rookery.roles.shard import Shard, ShardSetup
from rookery.tables.service import ServiceLost
from rookery.tables.shard import Answer
from rookery.tables.shards import ShardedReplay

ITEMS, FRAMES = 6, 8


class StepShard:
    """A handle whose shard answers one question for each `step`."""

    def __init__(self, setup: ShardSetup):
        self.setup, self.life, self.up, self.why = setup, 0, True, ""
        self.shard = Shard(setup)
        self._asked: deque[tuple[Future[Answer], str, tuple[Any, ...]]] = deque()

    def ask(self, op: str, *args: Any) -> Future[Answer]:
        future: Future[Answer] = Future()
        if self.up:
            self._asked.append((future, op, args))
        else:
            future.set_exception(ServiceLost("away"))
        return future

    def look(self) -> None:
        pass

    def step(self, most: int = 1) -> bool:
        """Answer so many; whether there was one."""
        for _ in range(min(most, len(self._asked))):
            future, op, args = self._asked.popleft()
            future.set_result(getattr(self.shard, op)(*args))
            most = 0
        return most == 0

    def kill(self, why: str) -> None:
        self.life, self.up, self.why = self.life + 1, False, why
        while self._asked:
            self._asked.popleft()[0].set_exception(ServiceLost(why))

    def revive(self) -> None:
        self.shard, self.up = Shard(self.setup), True


class ShardRig:
    def __init__(
        self, spec: EnvSpec = VECTOR, shards: int = 2, actors: int = 4, deadline: float = 60.0,
        plan: Replay | None = None, **memory: Any,
    ):  # fmt: skip
        settings = {"capacity": 40, "min_size": 5, "batch": 8, "shards": shards} | memory
        self.plan = plan or replay(**settings)
        self.spec, self.serials = spec, [0]
        self.makers = [Maker(spec, self.plan, ITEMS, FRAMES, seed, self.serials, 9) for seed in range(actors)]
        setups = [ShardSetup(self.plan, self.makers[0].shapes, spec, actors, 3, index) for index in range(shards)]
        self.handles = [StepShard(ShardSetup.read(setup.builtins())) for setup in setups]
        self.table = ShardedReplay(self.handles, self.plan, actors, 7, deadline)
        self.released: list[int] = []
        self.items: dict[int, dict] = {}  # by serial number: what each must look like when it is drawn
        self.steps = self.trained = self.evicted = self.dropped = 0
        self.version = 0

    def put(self, *actors: int, items: int = ITEMS, priority: Any = 1.0) -> None:
        for actor in actors:
            parcel, made = self.makers[actor].make(items, FRAMES if self.makers[actor].seen else 0, priority)
            self.items |= {int(item[SERIAL]): item for item in made}
            self.steps += sum(int(item["steps"]) for item in made)
            delivery = Delivery(
                actor, 0, copy.deepcopy(parcel), ActorReport(items), lambda actor=actor: self.released.append(actor)
            )
            self.table.insert(delivery)

    def answer(self) -> None:
        """Everything that was asked, and what follows from it."""
        while sum(handle.step(100) for handle in self.handles):  # all of them, and not up to the first
            self.table.hear()
        self.table.hear()

    def take(self) -> Sample | None:
        """The next sample, if one is due, once all is answered."""
        for _ in range(3):  # what is inserted is known with its answer, what is drawn with the next
            if (sample := self.table.next(self.version, 0.0)) is not None:
                break
            self.answer()
            for draw in self.table._draws:
                if draw.batch is not None:
                    draw.batch.result(60)
        if sample is not None:
            self.trained += sample.fresh
        return sample

    def balanced(self) -> bool:
        losses = self.table.losses()
        self.evicted += losses.evicted
        self.dropped += sum(losses.dropped.values())
        return self.steps == self.trained + self.evicted + self.dropped + self.table.steps

    def check_whole(self, batch: Any) -> None:
        """Every row of a batch is one item, in all its columns."""
        for row, serial in enumerate(batch.version.tolist()):
            item = self.items[serial]
            np.testing.assert_array_equal(batch.reward[..., row].numpy(), item["reward"])
            for key, leaf in batch.obs.items():
                rows = leaf[:, row] if self.plan.sequence else leaf[row]
                np.testing.assert_array_equal(rows.numpy(), item[f"obs/{key}"])
