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
from rookery.core.seeding import seed_of
from rookery.core.types import Failure, Sample, Shapes, StepReport
from rookery.crews.crew import Crew, Setup
from rookery.metrics.ledger import Round
from rookery.tables.batch import Batches
from rookery.tables.factory import make_table
from rookery.tables.table import Table
from rookery.topologies.job import Job
from rookery.topologies.preempt import Preemption
from rookery.topologies.resume import restore_table
from rookery.topologies.vote import Decision

IDLE_VOTE = 1.0  # seconds between two votes of a rank that has nothing to train on yet


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


def table_of(job: Job, shapes: Shapes, alone: bool, batches: Batches | None = None) -> Table:
    """The table that the algorithm's plan asks for, as the checkpoint left it if the run is resumed.

    `batches`: who puts batches of unrolls together, if not this process.
    """
    config = job.config
    seed = config.seed if job.rank == 0 else seed_of(config.seed, "rank", job.rank)  # of what it draws from its memory
    ranks = job.learner.reduce.here
    plan, device = job.algorithm.plan(), config.device
    table = make_table(plan, shapes, job.spec, config.actors, seed, alone, device, ranks, batches)
    restore_table(job, table)
    return table


def run(job: Job, crew: Crew, table: Table, trainer: Trainer, preemption: Preemption | None = None) -> Job:
    loop = Loop(job, crew, table, trainer) if job.alone else RankLoop(job, crew, table, trainer, preemption)
    job.journal.begin()
    callbacks, evaluator = job.callbacks, job.evaluator
    with job.reserve, job.running(table, crew):
        if callbacks is not None:
            callbacks.start()
        loop.decide()
        while loop.goes_on:
            loop.supply()
            loop.collect()
            loop.learn()
            if callbacks is not None:
                callbacks.turn()
            if evaluator is not None:
                evaluator.turn()
            loop.decide()
            loop.report()
        table.close()
        job.journal.end_round()
        loop.count_losses()
        if callbacks is not None:
            callbacks.turn()
        job.close(table, crew)
        job.journal.end()
        if evaluator is not None:
            evaluator.finish()
        if callbacks is not None:
            callbacks.end()
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
        if self.now.stopping:
            self.table.stop()
        elif not self.now.going and not self.table.rounds:
            self.crew.finish()  # a round is completed, with replacements if need be
        if self.now.checkpoint:
            self.checkpoint()

    def checkpoint(self) -> None:
        if self.table.settled:
            self.job.save(self.crew, self.crew.snapshots if self.table.rounds else None)

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
        report = self._step(sample, tell=due or not table.small_updates or job.callbacks is not None)
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
        self._held: Sample | None = None  # what this rank will train on, once all have something
        self._started = self._voted = self._over = self._trained = False
        self._began = self._last_vote = perf_counter()
        self._round = Round()  # times of this one; learning and waiting are those of the one before

    @property
    def goes_on(self) -> bool:
        return not self._over

    def take(self) -> Sample | None:
        """The sample, once every rank has one.

        A rank that has none votes too, now and then, so that all know of each other's steps and requests; not within
        a round, which is completed first.
        """
        spent = self._held is None and not (self.now.going or self.crew.busy or self.table.due)
        if self._held is None and not spent:
            self._held = super().take()
            if self._held is not None:
                self._finish_rollout()
        idle = self.job.signals.requested is not None or perf_counter() - self._last_vote >= IDLE_VOTE
        if self._held is None and not spent and (self.table.open or not idle):
            return None
        self.now = self._vote(spent)
        if self.now.ready:
            sample, self._held, self._trained = self._held, None, True
            return sample
        if self.now.spent or self.now.stopping:
            self._leave()
        return None

    def _finish_rollout(self) -> None:
        if self._preemption is not None:
            self._preemption.finished()
        self._round.rollout = perf_counter() - self._began
        assert self.job.journal.ranks is not None
        self.job.journal.ranks.round = self._round

    def _vote(self, spent: bool) -> Decision:
        started = perf_counter()
        with self.job.journal.split.stage("wait"):
            now = self.job.decide(None if self._held is None else self._held.fresh, spent)
        self._last_vote, self._voted = perf_counter(), True
        if now.ready:
            self._round = Round()
        self._round.wait += self._last_vote - started
        return now

    def _leave(self) -> None:
        """The run ends, and what this rank would have trained on is dropped."""
        self._over = True
        if self._held is not None:
            self.job.journal.ledger.drop(self._held.fresh, "end")
            self.table.update(self._held, None, self.trainer.version)
            self._held = None

    def _step(self, sample: Sample, tell: bool) -> StepReport:
        started = perf_counter()
        try:
            return super()._step(sample, tell)
        finally:
            self._round.learn = perf_counter() - started

    def decide(self) -> None:
        """Act on the vote, if there was one in this turn. The first is before the first round, without training."""
        if not self._started:
            self.now, self._started = self.job.decide(), True
            self._voted = self._trained = True
        if not self._voted:
            return
        self._voted = False
        if self.now.stopping:
            self._leave()
        self.act()
        if self._trained:
            self._trained, self._began = False, perf_counter()
            if self._preemption is not None:
                self._preemption.begin(self.trainer.version)

    def checkpoint(self) -> None:
        """All write their part, or none: not within a round. Replay memories are saved between two updates of one too,
        and new episodes begin from there: rounds of different ranks have different numbers of updates."""
        job, table = self.job, self.table
        within, unsettled = job.learner.reduce.anywhere(table.open, not table.settled)
        if within or (unsettled and table.memory is None):
            return
        job.save(self.crew, self.crew.snapshots if table.rounds and not unsettled else None)
