"""One part of a replay memory: it holds the items of some actors, and draws when it is asked to. No transport.

The table in front (`tables/shards.py`) decides when, from which part and how much is drawn, and holds the ratio of
draws to insertions; see there. Every answer carries the books after it. `storage/saved_shard.py` adds checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from rookery.core.seeding import seed_of
from rookery.core.types import Arrays, EnvSpec, Replay, Shapes
from rookery.tables.drawn import Keys
from rookery.tables.factory import check_room
from rookery.tables.memory import ReplayMemory
from rookery.tables.shard import Answer, Books, Part


@dataclass(frozen=True)
class ShardSetup:
    """What one shard of a memory is made from; as plain values it can be sent to another process."""

    plan: Replay  # of the whole memory
    shapes: Shapes  # of what actors hand over
    spec: EnvSpec
    actors: int  # of the run
    seed: int
    index: int = 0

    def builtins(self) -> dict[str, Any]:
        return msgspec.to_builtins(self)

    @staticmethod
    def read(message: Mapping[str, Any]) -> ShardSetup:
        return msgspec.convert(message, ShardSetup)

    @property
    def own_plan(self) -> Replay:
        """Without a ratio and a size to wait for: the table in front has both."""
        memory = self.plan.memory
        capacity = -(-memory.capacity // memory.shards)
        own = replace(memory, capacity=capacity, min_size=1, samples_per_insert=0.0, slack=0.0, shards=1)
        return replace(self.plan, memory=own)

    @property
    def own_actors(self) -> int:
        return -(-self.actors // self.plan.memory.shards)

    @property
    def bytes_needed(self) -> int:
        return ReplayMemory.bytes_needed(self.own_plan, self.shapes, self.spec, self.own_actors)

    @property
    def own_seed(self) -> int:
        return seed_of(self.seed, "shard", self.index)


class Shard:
    """`memory`: one of its own kind, for `setup`."""

    memory: ReplayMemory

    def __init__(self, setup: ShardSetup, memory: type[ReplayMemory] = ReplayMemory):
        self.setup = setup
        check_room(setup.own_plan, setup.shapes, setup.spec, setup.own_actors)
        self.memory = memory(setup.own_plan, setup.shapes, setup.spec, setup.own_actors, setup.own_seed)
        self._tracks_lowest = self.memory.memory.weights == "memory"

    def insert(self, parcel: Arrays, actor: int, largest: float) -> Answer:
        """`largest`: the largest priority so far, of all shards.

        Items that refer to frames which another shard has got, before this one took its place, are not kept.
        """
        self.memory.raise_largest(largest)
        self.memory.insert(parcel, actor)
        return self.answer()

    def draw(self, count: int) -> Answer:
        """`count` items, or none if it is empty."""
        memory = self.memory
        if not len(memory) or not count:
            return self.answer()
        picked = memory.pick(0.0, count)
        return self.answer(Part(memory.read(picked.keys), picked.keys, picked.probability, picked.fresh))

    def update(self, slot: np.ndarray, id: np.ndarray, priorities: np.ndarray) -> Answer:
        """New raw priorities of drawn items; those that have gone are passed over and counted."""
        self.memory.update(Keys(slot, id), priorities)
        return self.answer()

    def trim(self) -> Answer:
        """Keep to a soft capacity."""
        self.memory.remove_to_fit()
        return self.answer()

    def forget(self, actor: int) -> Answer:
        """A new life of that actor begins, or its items went elsewhere for a while."""
        self.memory.forget(actor)
        return self.answer()

    def stats(self) -> Answer:
        return self.answer(self.memory.stats())

    def answer(self, value: Any = None) -> Answer:
        memory, mass = self.memory, self.memory.sampler.mass
        lowest = memory.sampler.lowest() * mass if self._tracks_lowest and len(memory) else 0.0
        books = Books(
            len(memory), memory.full, mass, lowest, memory.largest, memory.steps_waiting, memory.steps_evicted,
            memory.evicted, memory.gone,
        )  # fmt: skip
        return Answer(books, value)
