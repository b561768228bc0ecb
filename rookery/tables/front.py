"""The numbers of a replay memory in parts that are not in the parts: the ratio of draws to insertions, the random
generator, and which part holds the items of which actor. They are saved with every part."""

from __future__ import annotations

from typing import Any

import numpy as np

from rookery.core.config import ReplayConfig
from rookery.core.errors import CheckpointError
from rookery.core.seeding import seed_of
from rookery.tables.limiter import Limiter
from rookery.tables.verify import MOST


class Front:
    def __init__(self, memory: ReplayConfig, actors: int, seed: int):
        self.limiter = Limiter(memory.min_size, memory.batch, memory.samples_per_insert, memory.slack)
        self.rng = np.random.Generator(np.random.PCG64(seed_of(seed, "shards")))
        self.homes = np.arange(actors, dtype=np.int64) % memory.shards  # [actors] the shard of each

    def state(self) -> dict[str, Any]:
        return {
            "limiter": self.limiter.state(), "rng": self.rng.bit_generator.state, "homes": self.homes.copy(),
        }  # fmt: skip

    def load(self, state: dict[str, Any]) -> None:
        self.limiter.load(state["limiter"])
        self.rng.bit_generator.state = state["rng"]
        self.homes[:] = state["homes"]


def check_front(state: dict[str, Any], memory: ReplayConfig, actors: int) -> None:
    """CheckpointError unless a table in front of so many shards could have written it."""
    homes, limiter = state["homes"], state["limiter"]
    if homes.shape != (actors,) or homes.min() < 0 or homes.max() >= memory.shards:
        raise CheckpointError(f"homes of actors are {homes[:8]}, and there are {actors} and {memory.shards} shards")
    if not all(isinstance(x, int | float) and 0 <= x < MOST for x in limiter.values()):
        raise CheckpointError(f"the ratio of draws to insertions is {limiter}")
    try:
        np.random.PCG64(0).state = state["rng"]
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise CheckpointError(f"the state of the random generator cannot be used ({error})") from error
