"""The role of an actor: weights in, unrolls out, or the items of a replay memory made from them.

A role knows nothing of processes: `crews/actor_process.py` runs one in a process.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from rookery.algorithms.base import Algorithm
from rookery.core.config import RunConfig
from rookery.core.types import ActorReport, Arrays
from rookery.envs.lanes import Lanes
from rookery.roles.producer import Producer
from rookery.roles.weights import Published


class UnrollMaker:
    def __init__(
        self, config: RunConfig, algorithm: Algorithm, lanes: Lanes, index: int, say: Callable[[str], None]
    ):  # fmt: skip
        nets = algorithm.nets()
        self._published = Published(algorithm, nets)
        self.floats = self._published.size
        self.producer = Producer(algorithm, nets, lanes, config.seed, index, say)
        table = self.producer.plan.table
        self._refresh = 0 if table.in_turns else table.refresh
        self._rows = self.producer.plan.unroll * lanes.count  # resets included: an episode's end puts nothing off
        self._version, self._steps = -1, 0  # of the weights we act with, and steps taken with them

    @property
    def wants_weights(self) -> bool:
        return self._version < 0 or self._steps >= self._refresh

    def load(self, vector: torch.Tensor, version: int) -> None:
        self._published.load(vector)
        self._version, self._steps = version, 0

    def fill(self, arrays: Arrays, progress: float, tick: Callable[[int], object] | None = None) -> ActorReport:
        self._steps += self._rows
        return self.producer.fill(arrays, self._version, tick)
