"""Between the actors and the learner: where data waits, and what one update takes from there.

Two feeds, one for each kind of table. `QueueFeed` trains on every unroll once. `ReplayFeed` keeps items in a memory,
draws batches, writes priorities back, trims, and has the memory saved beside the checkpoints. A topology asks
`can_sample`, then calls `learn`; it inserts what the actors deliver.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from shlex import quote
from time import monotonic

from rookery.core.errors import CheckpointError, NumericError, UsageError
from rookery.core.machine import Machine, amount
from rookery.core.types import EnvSpec, Queue, Replay
from rookery.core.unroll import as_unroll
from rookery.processes.signals import Patience
from rookery.roles.producer import Arrays, Shapes
from rookery.storage import replay_file, replay_writer
from rookery.tables.queue import QueueTable
from rookery.tables.replay import ReplayTable, Sample
from rookery.tables.snapshot import Snapshot
from rookery.topologies.job import Job

Release = Callable[[], None]
SPARE = 0.9  # share of the free memory that a replay memory may take
LAST_SAVE = 3600.0  # seconds the memory of a finished run may take to reach the disk
LOOK = 0.1  # seconds between two looks at the signals meanwhile
PIECE = 10_000  # items removed at once: 10 ms, where ranks are kept
CLIPPED = 0.05  # share of a value distribution's mass at its ends that is worth a warning


class QueueFeed:
    synchronous = True

    def __init__(self, job: Job):
        self.job, self.table = job, QueueTable(job.config.actors)

    @property
    def in_flight(self) -> int:
        return self.table.steps

    def can_sample(self) -> bool:
        return self.table.can_sample()

    def insert(self, arrays: Arrays, actor: int, pending: int = 0, release: Release = lambda: None) -> None:
        self.table.insert(as_unroll(arrays), actor, self.job.sequences[actor], release)
        self.job.sequences[actor] += 1

    def learn(self) -> None:
        """Train on the next batch and tell the journal."""
        job, journal, split = self.job, self.job.journal, self.job.journal.split
        journal.queue_depth = len(self.table)
        with split.stage("transfer"):
            batch = self.table.sample()
            steps = int(batch.live.sum())
            lags = (job.learner.version - batch.version).numpy()
        with split.stage("learn"):
            job.threads.learning()
            try:
                report = job.learner.step(batch, journal.progress)  # as it was before this batch: never quite 1
            except NumericError:
                journal.ledger.drop(steps, "numeric")
                raise
        journal.trained(steps, lags, report, job.learner.updates)
        journal.report()

    def lost(self, actor: int, reason: str) -> None:
        """An actor was replaced: nothing of it waits here that a new one could not continue."""

    def cut(self, actor: int, reason: str) -> None:
        """An actor gave up an unroll and goes on: nothing of it waits here."""

    def restore(self) -> None:
        if not self.job.snapshots:  # an actor may have been lost in the end, and lag behind: all begin anew, together
            self.job.sequences = [max(self.job.sequences)] * len(self.job.sequences)
        elif len(set(self.job.sequences)) > 1:
            raise CheckpointError(
                f"the checkpoint's actors are at unrolls {self.job.sequences[:8]}: not at the same one"
            )
        self.job.journal.settle(0)

    def save(self, last: bool = False) -> None:
        pass


class ReplayFeed:
    def __init__(self, job: Job, shapes: Shapes):
        plan = job.algorithm.plan().table
        assert isinstance(plan, Replay), plan
        self.job, self.plan, self.memory = job, plan, plan.memory
        check_room(plan, shapes, job.spec, job.config.actors)
        self.table = ReplayTable(plan, shapes, job.spec, job.config.actors, job.config.seed)
        self.lock = threading.Lock()  # loader threads draw while new items come in
        self.pending = [0] * job.config.actors  # steps the actors hold back until an item is whole
        self.ahead = 0  # steps in batches that were drawn and not trained on yet
        self.idle_s = 0.0  # time the learner had nothing to train on
        self._turn = False  # without a ratio, one update follows each insertion
        self._trimming = False  # a soft capacity is exceeded by more than is removed at once
        self._warned = False
        self._writer = replay_writer.Writer()
        job.journal.paced_by_env = True

    @property
    def synchronous(self) -> bool:
        return self.plan.in_turns

    @property
    def in_flight(self) -> int:
        with self.lock:  # a loader may be in the middle of a draw
            return self.table.steps_waiting + sum(self.pending) + self.ahead

    def can_sample(self) -> bool:
        if self.job.signals.requested is not None:  # the limiter keeps count of what is still due
            return False
        return self.table.can_sample() and (self.memory.samples_per_insert > 0 or self._turn)

    def can_insert(self) -> bool:
        return self.table.can_insert()

    def insert(self, arrays: Arrays, actor: int, pending: int = 0, release: Release = lambda: None) -> None:
        with self.lock:
            self.table.insert(arrays, actor)
        release()
        self.pending[actor], self._turn = pending, True
        self.job.sequences[actor] += 1
        self.job.journal.ledger.evicted = self._evicted_before + self.table.steps_evicted

    def learn(self) -> None:
        """Draw a batch, train on it and write its priorities back."""
        with self.job.journal.split.stage("transfer"):
            sample = self.table.sample(self.job.journal.progress)
        self.train(sample)

    def train(self, sample: Sample) -> None:
        job, learner, journal, split = self.job, self.job.learner, self.job.journal, self.job.journal.split
        due = journal.due
        with split.stage("learn"):
            job.threads.learning()
            try:
                report = learner.step(sample.batch, journal.progress, tell=due)
            except NumericError:
                journal.ledger.drop(sample.fresh, "numeric")
                raise
        with split.stage("transfer"):
            with self.lock:
                if report.priorities is not None:
                    self.table.update(sample.keys, report.priorities.numpy())
                self._trim()
            lags = learner.version - 1 - sample.batch.version.numpy()
        self._turn = False
        journal.trained(sample.fresh, lags, report, learner.updates)
        journal.ledger.evicted = self._evicted_before + self.table.steps_evicted
        if due:
            self._tell()
            journal.queue_depth = len(self.table)
            self._look(report.metrics)
        journal.report()

    def _trim(self) -> None:
        """Keep to a soft capacity; piece by piece where loaders wait for the lock meanwhile."""
        if self.memory.remover == "soft" and self.job.learner.version % self.memory.remove_every == 0:
            self._trimming = True
        if self._trimming:
            self._trimming = self.table.remove_to_fit(None if self.synchronous else PIECE)

    def _tell(self) -> None:
        idle = self.idle_s / max(1e-9, self.job.journal.life_s)
        self.job.journal.replay = self.table.stats() | {"learner_idle": idle}

    def _look(self, metrics: dict[str, float]) -> None:
        """Say what is wrong with the numbers, once."""
        share = metrics.get("mass_at_ends", 0.0)
        if share > CLIPPED and not self._warned:
            self._warned = True
            config = self.job.config.algo
            self.job.journal.say(
                f"v_min {config.v_min:g} and v_max {config.v_max:g} clip the returns: {share:.0%} of the target's mass "
                "lies at the ends; widen them (--algo.v-min, --algo.v-max) or scale the rewards"
            )
        self._complain()

    def lost(self, actor: int, reason: str) -> None:
        """An actor was replaced: what it held back is gone, and its successor counts frames from 0."""
        self.cut(actor, reason)
        with self.lock:
            self.table.forget(actor)

    def cut(self, actor: int, reason: str) -> None:
        """An actor gave up an unroll and goes on: what it held back is gone."""
        self.job.journal.ledger.drop(self.pending[actor], reason)
        self.pending[actor] = 0

    # Checkpoints

    @cached_property
    def _evicted_before(self) -> int:
        """Evicted in earlier lives of the run, as the ledger has it and the table does not."""
        return self.job.journal.ledger.evicted - self.table.steps_evicted

    def restore(self) -> None:
        """Take back the memory saved with the checkpoint, or the nearest one; if there is none, it is filled anew."""
        job = self.job
        self.pending = [int(snapshot["pending"]) for snapshot in job.snapshots if snapshot] or self.pending
        if job.resumed_at is not None:
            same = self._restore_memory(job.resumed_at)
            if not same or not job.snapshots:  # actors go on where they were, or begin anew: not where this memory ends
                for actor in range(job.config.actors):
                    self.table.forget(actor)
        kept, known = self.in_flight, job.journal.ledger.in_flight
        if kept > known:
            raise CheckpointError(
                f"{kept} environment steps wait in the replay memory and with the actors, and the checkpoint knows of "
                f"{known}: the two are not of one run. Go on with an empty memory: "
                f"rm -r {quote(str(job.folder / 'replay'))}"
            )
        job.journal.settle(kept)
        _ = self._evicted_before

    def _restore_memory(self, resumed_at: int) -> bool:
        """Load a memory; whether it is that of the checkpoint, and not an older or newer one."""
        job = self.job
        found = replay_file.find(job.folder / "replay", resumed_at)
        if found is None:
            say = job.warn if self.memory.save else job.journal.say
            say("no replay memory was saved with this checkpoint: it is filled anew")
            return False
        steps = replay_file.load(found, self.table)
        self.table.cap_versions(job.learner.version)
        if steps != resumed_at:  # its items count as they did for the books of another checkpoint
            self.table.settle()
            age = "older" if steps < resumed_at else "newer"
            job.warn(f"the replay memory is that of {found.name}, {age} than the checkpoint (step {resumed_at})")
        return steps == resumed_at

    def save(self, last: bool = False) -> None:
        """Have the memory written in the background; wait for it only if the run is over."""
        job = self.job
        self._tell()
        if not self.memory.save:
            return
        patience = Patience(job.signals, LAST_SAVE, job.config.supervisor.grace, since=monotonic())
        if last:
            self._written(patience)
            self._complain()
        started = not self._writer.busy
        if started:
            with self.lock:
                snapshot = Snapshot(self.table)
            started = self._writer.start(job.folder / "replay", job.journal.env_steps, snapshot)
        if not started:
            job.journal.say("the replay memory of the last checkpoint is still being written: this one goes without")
        if last and not self._written(patience):
            job.journal.say("the replay memory could not be saved in time; an older one, if any, stays")
        if last and (error := self._writer.poll()):
            raise error

    def _written(self, patience: Patience) -> bool:
        """Wait for the writer; it cannot be woken by a signal, so we look up now and then."""
        while not self._writer.join(min(LOOK, patience.left())):
            if patience.left() == 0.0:
                return False
        return True

    def _complain(self) -> None:
        if error := self._writer.poll():
            self.job.journal.say(f"the replay memory was not saved, training goes on: {error}")


Feed = QueueFeed | ReplayFeed


def make_feed(job: Job, shapes: Shapes) -> Feed:
    feed = QueueFeed(job) if isinstance(job.algorithm.plan().table, Queue) else ReplayFeed(job, shapes)
    feed.restore()
    return feed


def check_room(
    plan: Replay, shapes: Shapes, spec: EnvSpec, actors: int = 1, memories: int = 1, saved: bool = True
) -> None:
    """Refuse a memory (or several like it) that would not fit, before it is filled and the machine dies of it.

    A memory that is `saved` with checkpoints needs more than itself: what a snapshot copies, and what it holds aside.
    """

    def needs(capacity: int) -> tuple[int, int]:
        """Bytes of the memories, and on top of that bytes to save them."""
        smaller = replace(plan, memory=replace(plan.memory, capacity=capacity))
        extra = ReplayTable.bytes_to_save(smaller, shapes, spec, actors) + replay_file.BUFFERS if saved else 0
        return memories * ReplayTable.bytes_needed(smaller, shapes, spec, actors), memories * extra

    saved = saved and plan.memory.save
    capacity, (have, source) = plan.memory.capacity, Machine().memory(processes=memories)
    need, extra = needs(capacity)
    if need + extra <= SPARE * have:
        return
    fits, too_many = 0, capacity
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        fits, too_many = (middle, too_many) if sum(needs(middle)) <= SPARE * have else (fits, middle)
    share = f" ({amount(extra)} of it to save it with checkpoints)" if extra else ""
    advice = f"use --algo.replay.capacity {memories * fits} or less" if fits else "free some"
    if extra and need <= SPARE * have:
        advice += ", or leave it out of checkpoints (--no-algo.replay.save)"
    raise UsageError(
        f"a replay memory of {memories * capacity:,} items needs {amount(need + extra)}{share}, and there are "
        f"{amount(have)} ({source}); {advice}"
    )
