"""The one training loop: order, take what has arrived, train on what is due, publish, checkpoint.

All topologies run it. They differ in who acts (a crew), where data waits (a table) and who trains: a `Learner`, or an
`Applier` of gradients that workers have computed. The table decides who may act and what is trained on next; the crew
waits. The loop knows neither processes nor algorithms.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any, Protocol

import torch

from rookery.core.errors import NumericError
from rookery.core.types import Failure, Sample, Shapes, StepReport
from rookery.crews.crew import Crew, Setup
from rookery.metrics.ledger import Round
from rookery.tables.factory import make_table
from rookery.tables.table import Table
from rookery.topologies.job import Job
from rookery.topologies.preempt import Preemption
from rookery.topologies.resume import restore_table
from rookery.topologies.vote import Decision


class Trainer(Protocol):
    @property
    def version(self) -> int: ...
    @property
    def updates(self) -> int: ...
    def step(self, batch: Any, progress: float, tell: bool = True) -> StepReport: ...
    def read(self) -> torch.Tensor: ...
    def ensure_finite(self) -> None: ...


def prepare(job: Job, table: Table, shapes: Shapes, floats: int) -> Setup:
    """What a crew must know; the journal and the table are told of its failures."""

    def failed(failure: Failure) -> None:
        journal.failed(failure, table.lost(failure.actor) if failure.replaced else 0)

    journal = job.journal
    journal.paced_by_env = table.paced_by_env
    return Setup(job.algorithm, shapes, floats, table.ahead, job.sequences, job.states, failed, journal.say)


def table_of(job: Job, shapes: Shapes, alone: bool) -> Table:
    """The table that the algorithm's plan asks for, as the checkpoint left it if the run is resumed."""
    config = job.config
    table = make_table(job.algorithm.plan(), shapes, job.spec, config.actors, config.seed, alone, config.device)
    restore_table(job, table)
    return table


def run(job: Job, crew: Crew, table: Table, trainer: Trainer, preemption: Preemption | None = None) -> Job:
    loop = Loop(job, crew, table, trainer) if job.alone else RankLoop(job, crew, table, trainer, preemption)
    job.journal.begin()
    with job.reserve, job.running(table, crew):
        loop.decide()
        while loop.goes_on:
            loop.supply()
            loop.collect()
            loop.learn()
            loop.decide()
            loop.report()
        table.close()
        job.journal.end_round()
        loop.count_losses()
        job.close(table, crew)
        job.journal.end()
    return job


class Loop:
    def __init__(self, job: Job, crew: Crew, table: Table, trainer: Trainer):
        self.job, self.crew, self.table, self.trainer = job, crew, table, trainer
        self._unroll = job.algorithm.plan().unroll * job.config.envs_per_actor
        self._published = -float("inf")
        self.now = Decision(stopping=False, going=True, checkpoint=False)

    @property
    def goes_on(self) -> bool:
        """What is due when the steps are taken is learnt before the end."""
        return self.now.going or self.crew.busy or self.table.due

    def decide(self) -> None:
        """Whether to go on, and whether to write a checkpoint. Not within a round."""
        if self.table.open and self.crew.busy:
            return
        self.now = self.job.decide()
        self.act()

    def act(self) -> None:
        """Do what was decided."""
        job, crew, table = self.job, self.crew, self.table
        if self.now.stopping:
            table.stop()
        elif not self.now.going and not table.rounds:
            crew.finish()  # a round is completed, with replacements if need be
        if self.now.checkpoint and self.settled():
            job.save(crew, crew.snapshots if table.rounds else None)

    def settled(self) -> bool:
        return self.table.settled

    def supply(self) -> None:
        """Order from every actor that the table wants more of, as long as its steps are within the run's length."""
        job, crew, table = self.job, self.crew, self.table
        if self.now.stopping:
            return
        for _ in range(len(crew.openings)):
            coming = 0 if table.rounds else crew.ordered * self._unroll * job.config.ranks
            going = self.now.going and job.journal.env_steps + coming < job.config.env_steps
            if table.wants(crew.openings[0], going):
                self.publish()
                actor = crew.openings.popleft()
                crew.order(actor, job.journal.progress)
                table.ordered(actor, crew.version or 0)
            elif going:
                return
            else:
                crew.openings.rotate(-1)

    def publish(self) -> None:
        """Before an order, if there is something new, and the table does not ask for less."""
        version, now = self.trainer.version, perf_counter()
        if version == self.crew.version or now - self._published < self.table.publish_every:
            return
        self._published = now
        with self.job.journal.split.stage("transfer"):
            if self.table.publish_every:  # otherwise the learner's own checks are often enough
                self.trainer.ensure_finite()
            self.crew.publish(self.trainer.read, version)

    def collect(self) -> None:
        """Take what has arrived; wait for it only if there is nothing to train on."""
        journal, crew, overlaps = self.job.journal, self.crew, not self.table.rounds
        patience = self.table.patience
        arrivals = crew.arrived(patience)
        while True:
            with journal.collecting(overlaps, waits=patience > 0):
                delivery = next(arrivals, None)
            if delivery is None:
                break
            journal.told(delivery.actor, delivery.report, crew.parallel, overlaps)
            with journal.split.stage("transfer"):
                self.table.insert(delivery)
                self.count_losses()
        if not self.table.open:
            journal.end_round()

    def learn(self) -> None:
        job, journal, table, trainer = self.job, self.job.journal, self.table, self.trainer
        waiting = len(table)
        sample = self.take()
        if sample is None:
            return
        due = journal.due
        lags = trainer.version - sample.versions
        report = self._step(sample, tell=due or not table.small_updates)
        with journal.split.stage("transfer"):
            priorities = None if report.priorities is None else report.priorities.numpy()
            table.update(sample, priorities, trainer.version)
        journal.trained(sample.fresh, lags, report, trainer.updates)
        self.count_losses()
        if due:
            journal.queue_depth = waiting
            for text in job.algorithm.remarks(report.metrics):
                journal.say(text)

    def take(self) -> Sample | None:
        """What to train on now, if anything."""
        with self.job.journal.split.stage("transfer"):
            return self.table.next(self.trainer.version, self.job.journal.progress)

    def _step(self, sample: Sample, tell: bool) -> StepReport:
        job, journal = self.job, self.job.journal
        with journal.split.stage("learn"):
            job.threads.learning()
            try:
                # The progress before this batch: never quite 1.
                return self.trainer.step(sample.batch, journal.progress, tell=tell)
            except NumericError:
                journal.ledger.drop(sample.fresh, "numeric")
                raise

    def count_losses(self) -> None:
        """Write what the table has lost into the ledger."""
        ledger, losses = self.job.journal.ledger, self.table.losses()
        ledger.evicted += losses.evicted
        for reason, steps in losses.dropped.items():
            ledger.drop(steps, reason)

    def report(self) -> None:
        journal = self.job.journal
        if journal.due and not self.table.open:  # within a round the books are not complete
            self.job.tell_of(self.table)
            journal.report()


class RankLoop(Loop):
    """The loop of one rank among several: it trains when all of them do, and decides when all of them have voted."""

    def __init__(self, job: Job, crew: Crew, table: Table, trainer: Trainer, preemption: Preemption | None):
        super().__init__(job, crew, table, trainer)
        self._preemption = preemption
        self._held: Sample | None = None  # what this rank will train on
        self._voted = self._over = self._started = False
        self._began = perf_counter()
        self._round = Round()  # the times of the one before this

    @property
    def goes_on(self) -> bool:
        return not self._over

    def take(self) -> Sample | None:
        """The sample, once every rank has one. They have to vote even if one has none and the run ends."""
        if self._held is None:
            self._held = super().take()
        spent = self._held is None and not (self.now.going or self.crew.busy or self.table.due)
        asked = self.job.signals.requested is not None and not self.table.open
        if self._held is None and not spent and not asked:
            return None
        self.now = self._vote(spent)
        sample, self._held = self._held, None
        if self.now.ready:
            return sample
        self._over = True
        if sample is not None:
            self.job.journal.ledger.drop(sample.fresh, "end")
            self.table.update(sample, None, self.trainer.version)
        return None

    def _vote(self, spent: bool) -> Decision:
        journal, started = self.job.journal, perf_counter()
        assert journal.ranks is not None
        if self._preemption is not None:
            self._preemption.finished()
        if self._held is not None:
            self._round.rollout = started - self._began
            journal.ranks.round = self._round
        with journal.split.stage("wait"):
            now = self.job.decide(None if self._held is None else self._held.fresh, spent)
        self._round, self._voted = Round(wait=perf_counter() - started), True
        return now

    def _step(self, sample: Sample, tell: bool) -> StepReport:
        started = perf_counter()
        try:
            return super()._step(sample, tell)
        finally:
            self._round.learn = perf_counter() - started

    def decide(self) -> None:
        """Act on the vote, if there was one in this turn. The first is before the first round, without training."""
        if not self._started:
            self.now, self._started, self._voted = self.job.decide(), True, True
        if not self._voted:
            return
        self._voted, self._over = False, self._over or self.now.stopping
        self.act()
        self._began = perf_counter()
        if self._preemption is not None:
            self._preemption.begin(self.trainer.version)

    def settled(self) -> bool:
        """All write their part of a checkpoint, or none."""
        return self.job.learner.reduce.all(self.table.settled)
