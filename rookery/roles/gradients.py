"""The role of a worker that learns by itself: weights in, a gradient out (Gorila, Nair et al. 2015; A3C, Mnih 2016).

It acts, keeps a table of its own (a replay memory, or just the unroll of the moment), and computes a gradient on the
weights of that moment. If the table has nothing to train on, it takes one more unroll first. Target networks follow the
version of the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch

from rookery.algorithms.base import Algorithm
from rookery.core.config import RunConfig
from rookery.core.seeding import seed_of
from rookery.core.types import ActorReport, Arrays, Delivery, GradientReport, Sample
from rookery.envs.lanes import Lanes
from rookery.roles.learner import Learner
from rookery.roles.producer import Producer, empty_arrays, handover_shapes
from rookery.roles.weights import AllWeights
from rookery.tables.factory import make_table, share_of


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
        self.table = make_table(plan, shapes, lanes.spec, 1, seed, alone=True)
        self._pending = 0  # steps that the producer holds back
        self._evicted = 0  # steps that left the table without being trained on

    def load(self, vector: torch.Tensor, version: int) -> None:
        before, self.learner.version = self.learner.version, version
        self.weights.load(vector)
        self.learner.algorithm.pulled(self.learner.nets, before, version)

    def fill(self, arrays: Arrays, progress: float, tick: Callable[[int], object] | None = None) -> GradientReport:
        """Fill the array "gradient" if the table has something to train on, if need be after one more unroll."""
        report, table = GradientReport(steps=0, pending=self._pending), self.table
        if not table.due:
            report = GradientReport(**vars(self._act(tick)))
        if (sample := table.next(self.learner.version, progress)) is not None:
            self._gradient(sample, report, torch.from_numpy(arrays["gradient"]), progress)
        self._evicted += table.losses().evicted
        report.version = self.learner.version
        report.waiting, report.evicted = table.steps, self._evicted
        report.more, self._pending = table.due, report.pending
        return report

    def _act(self, tick: Callable[[int], object] | None) -> ActorReport:
        sequence = self.producer.actor.sequence
        acted = self.producer.fill(self._arrays, self.learner.version, tick)
        self.table.ordered(0, self.learner.version)
        self.table.insert(Delivery(0, sequence, self._arrays, acted, release=_keep))
        return acted

    def _gradient(self, sample: Sample, report: GradientReport, out: torch.Tensor, progress: float) -> None:
        started = perf_counter()
        output = self.learner.first_gradients(sample.batch, progress)
        self.weights.read_gradients(out)
        priorities = output.priorities
        if priorities is not None and not torch.isfinite(priorities).all():
            out.fill_(torch.nan)  # the applier skips and counts it
            priorities = None
        self.table.update(sample, None if priorities is None else priorities.detach().numpy(), self.learner.version)
        report.gradient, report.fresh = True, sample.fresh
        report.loss = float(sum(float(loss.detach()) for loss in output.losses.values()))
        report.metrics = {name: float(value) for name, value in output.metrics.items()}
        report.learn_s = perf_counter() - started


def _keep() -> None:
    """The arrays stay here: they are filled again with the next unroll."""
