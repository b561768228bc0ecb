"""One worker's loop of `async_grads.py`, without the process around it: weights in, gradient out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from time import perf_counter

import torch

from rookery.algorithms.base import Algorithm
from rookery.core.config import RunConfig
from rookery.core.seeding import seed_of
from rookery.core.types import GradientReport, Replay
from rookery.envs.lanes import Lanes
from rookery.roles.learner import Learner
from rookery.roles.producer import Producer, empty_arrays, handover_shapes
from rookery.roles.weights import Whole
from rookery.tables.replay import ReplayTable


class GradientMaker:
    def __init__(self, config: RunConfig, algorithm: Algorithm, lanes: Lanes, index: int):
        # The first worker draws as a serial run does: alone, it repeats one.
        seed = config.seed if index == 0 else seed_of(config.seed, "worker", index)
        self.learner = Learner(algorithm, seed)
        self.whole = Whole(self.learner)
        self.producer = Producer(algorithm, self.learner.nets, lanes, config.seed, index)
        plan = self.producer.plan.table
        assert isinstance(plan, Replay), plan
        own = share(plan, config.actors)
        state = algorithm.initial_state(self.learner.nets, 1)
        shapes = handover_shapes(lanes.spec, self.producer.plan, lanes.count, state)
        self._arrays = empty_arrays(shapes)
        self.table = ReplayTable(own, shapes, lanes.spec, 1, seed)
        self._limited, self._turn = plan.memory.samples_per_insert > 0, False
        self._pending = 0  # steps that the producer holds back

    def load(self, vector: torch.Tensor, version: int) -> None:
        before, self.learner.version = self.learner.version, version
        self.whole.load(vector)
        self.learner.algorithm.pulled(self.learner.nets, before, version)

    def make(self, out: torch.Tensor, progress: float, tick: Callable[[int], None] | None = None) -> GradientReport:
        """Fill `out` with a gradient if the memory allows a draw, if need be after one more unroll."""
        report = GradientReport(steps=0, pending=self._pending)
        if not self._can_sample():
            acted = self.producer.fill(self._arrays, self.learner.version, tick)
            self.table.insert(self._arrays, 0)
            self._turn = True
            report = GradientReport(**vars(acted))
        if self._can_sample():
            self._draw(report, out, progress)
            self._turn = False
        report.version = self.learner.version
        report.waiting, report.evicted = self.table.steps_waiting, self.table.steps_evicted
        report.more, self._pending = self._can_sample(), report.pending
        return report

    def _can_sample(self) -> bool:
        return self.table.can_sample() and (self._limited or self._turn)

    def _draw(self, report: GradientReport, out: torch.Tensor, progress: float) -> None:
        started = perf_counter()
        sample = self.table.sample(progress)
        output = self.learner.first_gradients(sample.batch, progress)
        self.whole.read_gradients(out)
        if output.priorities is not None:
            if torch.isfinite(output.priorities).all():
                self.table.update(sample.keys, output.priorities.detach().numpy())
            else:
                out.fill_(torch.nan)  # the applier skips and counts it
        report.gradient, report.fresh = True, sample.fresh
        report.loss = float(sum(float(loss.detach()) for loss in output.losses.values()))
        report.metrics = {name: float(value) for name, value in output.metrics.items()}
        report.learn_s = perf_counter() - started


def share(plan: Replay, workers: int) -> Replay:
    """Each worker keeps its part of the whole memory."""
    memory = plan.memory
    capacity, min_size = max(memory.batch, memory.capacity // workers), max(1, memory.min_size // workers)
    return dataclasses.replace(plan, memory=dataclasses.replace(memory, capacity=capacity, min_size=min_size))
