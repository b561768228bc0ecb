"""Workers that learn by themselves and send gradients; one applier that takes them (Gorila, Nair et al. 2015).

Each worker has environments, a replay memory and a copy of the nets of its own; it acts, draws, and fills a slot of
shared memory with a gradient. The applier owns the weights and the one optimiser state: it applies what comes, in the
order in which it comes, and publishes. A gradient that was computed on weights too old, or whose loss is an outlier,
is dropped and counted.

With one worker that waits for its gradient to be applied this is `serial.py`, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch

from rookery.core.config import RunConfig
from rookery.core.errors import NumericError, UsageError
from rookery.core.types import EnvSpec, GradientReport, Queue, StepReport
from rookery.crews.process import POLL, Crew
from rookery.processes.signals import Signals
from rookery.roles.gradient import share
from rookery.roles.producer import handover_shapes
from rookery.roles.weights import Whole
from rookery.topologies.feed import check_room
from rookery.topologies.job import Job

MODULE = "rookery.crews.grad_worker"
SETTLED = 100  # gradients before the usual loss is known well enough to call another one an outlier


def run(config: RunConfig, folder: Path, signals: Signals, open_job: Callable[[EnvSpec], Job]) -> Job:
    with Crew(config, folder, signals, MODULE, GradientReport) as crew:
        job = open_job(crew.spec())
        plan = job.algorithm.plan()
        if isinstance(plan.table, Queue):
            raise UsageError(f"recipe {config.recipe} has no replay memory; --topology async_grads needs one")
        if not job.algorithm.remote_gradients:
            raise UsageError(f"recipe {config.recipe} cannot compute gradients elsewhere: its targets would not follow")
        if config.net.normalize_obs:
            raise UsageError("the applier sees no observations to normalise by; use --net.normalize-obs False")
        state = job.algorithm.initial_state(job.learner.nets, 1)
        shapes = handover_shapes(job.spec, plan, config.envs_per_actor, state)
        check_room(share(plan.table, config.actors), shapes, job.spec, memories=config.actors, saved=False)
        applier = Applier(job)
        with job.reserve, job.rescuing(applier):
            _run(job, crew, applier)
        return job


def _run(job: Job, crew: Crew, applier: Applier) -> None:
    config, learner, journal = job.config, job.learner, job.journal
    whole = Whole(learner)
    if config.actors > 1:
        job.threads.share(synchronous=False)
    crew.open(job, applier, {"gradient": ((whole.gradients,), "float32")}, config.actors, whole.size)
    crew.publish(whole.read(), learner.version)
    journal.begin()

    def order(actor: int, more: bool = False) -> None:
        """As long as there are steps to take, or drawn batches are still due for those that were taken."""
        if job.goes_on() or (more and job.signals.requested is None):
            crew.order(actor, progress=journal.progress)

    for actor in range(config.actors):
        order(actor)
    while crew.busy:
        if not job.goes_on():
            crew.finish()
        for actor, slot, report in crew.arrived(POLL):
            journal.told(report, config.actors)
            journal.split.add("learn", report.learn_s / config.actors)
            with journal.split.stage("learn"):
                applied = applier.take(actor, torch.from_numpy(crew.slots.arrays(slot)["gradient"]), report)
            crew.release(slot)
            if applied:
                with journal.split.stage("transfer"):
                    crew.publish(whole.read(), learner.version)
            if job.checkpoint_due():
                job.save(applier, lambda: [None] * config.actors)
            order(actor, report.more)
        journal.report()
    job.close(applier, lambda: [None] * config.actors)


class Applier:
    """Takes gradients, and keeps the books of what the workers hold."""

    def __init__(self, job: Job):
        self.job, self.limits = job, job.config.gradients
        self.held = [0] * job.config.actors  # steps in each worker's memory that were not trained on yet
        self._pending = [0] * job.config.actors  # steps that it holds back besides, until an item is whole
        self._evicted = [0] * job.config.actors  # as each worker counts, in its present life
        self._loss = self._spread = 0.0  # moving mean and mean deviation of the loss
        self._seen = 0
        self.applied = self.dropped = 0
        job.journal.paced_by_env = True
        job.journal.settle(0)
        if job.resumed_at is not None:
            job.journal.say("the workers' replay memories are not part of checkpoints: they are filled anew")

    @property
    def in_flight(self) -> int:
        return sum(self.held) + sum(self._pending)

    def take(self, actor: int, gradient: torch.Tensor, report: GradientReport) -> bool:
        """Apply a gradient or drop it; whether the weights have changed."""
        job, journal, learner = self.job, self.job.journal, self.job.learner
        job.sequences[actor] += 1
        journal.ledger.evicted += report.evicted - self._evicted[actor]
        self.held[actor], self._pending[actor] = report.waiting, report.pending
        self._evicted[actor] = report.evicted
        if not report.gradient:  # the worker only acted
            return False
        age = learner.version - report.version
        reason = self._refuse(age, report.loss)
        if reason:
            self.dropped += 1
            journal.ledger.drop(report.fresh, reason)
            return False
        job.threads.learning()
        try:
            norms = learner.accept(gradient, journal.progress)
        except NumericError as error:
            error.evidence = {"gradient": gradient}
            journal.ledger.drop(report.fresh, "numeric")
            raise
        self.applied += 1
        metrics = report.metrics | {name: float(norm) for name, norm in norms.items()}
        journal.trained(report.fresh, [age], StepReport(metrics | self.shares()), learner.updates)
        return True

    def _refuse(self, age: int, loss: float) -> str:
        if age > self.limits.max_age:
            return "stale_gradient"
        if not math.isfinite(loss):
            return ""  # the learner refuses it by itself
        limit = self._loss + self.limits.outlier * self._spread
        outlier = self.limits.outlier > 0 and self._seen >= SETTLED and loss > limit
        # Outliers count too, cut to the limit: if the loss stays up there, that is the usual loss before long.
        loss = min(loss, limit) if outlier else loss
        rate = 1 / min(SETTLED, self._seen + 1)
        self._spread += rate * (abs(loss - self._loss) - self._spread)
        self._loss += rate * (loss - self._loss)
        self._seen += 1
        return "outlier_gradient" if outlier else ""

    def shares(self) -> dict[str, float]:
        return {"gradients_dropped": self.dropped / max(1, self.applied + self.dropped)}

    def lost(self, actor: int, reason: str) -> None:
        """A worker was replaced: its memory went with it."""
        self.cut(actor, reason)
        self.job.journal.ledger.drop(self.held[actor], reason)
        self.held[actor] = self._evicted[actor] = 0

    def cut(self, actor: int, reason: str) -> None:
        """A worker gave up an unroll and goes on: what it held back is gone."""
        self.job.journal.ledger.drop(self._pending[actor], reason)
        self._pending[actor] = 0

    def save(self, last: bool = False) -> None:
        """The workers' memories stay with them."""
