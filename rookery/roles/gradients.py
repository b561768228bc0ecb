"""The role of a worker that learns by itself: weights in, a gradient out (Gorila, Nair et al. 2015).

It acts, keeps a replay memory of its own, draws from it and computes a gradient on the weights of that moment. If the
memory allows no draw, it takes one more unroll first. Target networks follow the version of the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch

from rookery.algorithms.base import Algorithm
from rookery.core.config import RunConfig
from rookery.core.seeding import seed_of
from rookery.core.types import ActorReport, Arrays, GradientReport
from rookery.envs.lanes import Lanes
from rookery.roles.learner import Learner
from rookery.roles.producer import Producer, empty_arrays, handover_shapes
from rookery.roles.weights import AllWeights
from rookery.tables.factory import share_of
from rookery.tables.memory import ReplayMemory


class GradientMaker:
    wants_weights = True

    def __init__(
        self, config: RunConfig, algorithm: Algorithm, lanes: Lanes, index: int, say: Callable[[str], None]
    ):  # fmt: skip
        # The first worker draws as a serial run does: alone, it repeats one.
        seed = config.seed if index == 0 else seed_of(config.seed, "worker", index)
        self.learner = Learner(algorithm, seed)
        self.weights = AllWeights(self.learner)
        self.floats = self.weights.size
        self.producer = Producer(algorithm, self.learner.nets, lanes, config.seed, index, say)
        plan = share_of(self.producer.plan, config.actors)
        state = algorithm.initial_state(self.learner.nets, 1)
        shapes = handover_shapes(lanes.spec, self.producer.plan, lanes.count, state)
        self._arrays = empty_arrays(shapes)
        self.memory = ReplayMemory(plan, shapes, lanes.spec, 1, seed)
        self._limited, self._turn = plan.memory.samples_per_insert > 0, False
        self._pending = 0  # steps that the producer holds back

    def load(self, vector: torch.Tensor, version: int) -> None:
        before, self.learner.version = self.learner.version, version
        self.weights.load(vector)
        self.learner.algorithm.pulled(self.learner.nets, before, version)

    def fill(self, arrays: Arrays, progress: float, tick: Callable[[int], object] | None = None) -> GradientReport:
        """Fill the array "gradient" if the memory allows a draw, if need be after one more unroll."""
        report = GradientReport(steps=0, pending=self._pending)
        if not self._can_sample():
            acted: ActorReport = self.producer.fill(self._arrays, self.learner.version, tick)
            self.memory.insert(self._arrays, 0)
            self._turn = True
            report = GradientReport(**vars(acted))
        if self._can_sample():
            self._draw(report, torch.from_numpy(arrays["gradient"]), progress)
            self._turn = False
        report.version = self.learner.version
        report.waiting, report.evicted = self.memory.steps_waiting, self.memory.steps_evicted
        report.more, self._pending = self._can_sample(), report.pending
        return report

    def _can_sample(self) -> bool:
        return self.memory.can_sample() and (self._limited or self._turn)

    def _draw(self, report: GradientReport, out: torch.Tensor, progress: float) -> None:
        started = perf_counter()
        sample = self.memory.sample(progress)
        output = self.learner.first_gradients(sample.batch, progress)
        self.weights.read_gradients(out)
        if output.priorities is not None:
            if torch.isfinite(output.priorities).all():
                self.memory.update(sample.keys, output.priorities.detach().numpy())
            else:
                out.fill_(torch.nan)  # the applier skips and counts it
        report.gradient, report.fresh = True, sample.fresh
        report.loss = float(sum(float(loss.detach()) for loss in output.losses.values()))
        report.metrics = {name: float(value) for name, value in output.metrics.items()}
        report.learn_s = perf_counter() - started
