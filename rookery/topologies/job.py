"""What every topology shares: the learner, the journal, checkpoints and the question whether to go on.

A topology chooses a crew and a table; `loop.py` is what all of them do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Protocol

from rookery.algorithms.base import Algorithm
from rookery.core.config import RunConfig
from rookery.core.errors import CheckpointError, LearnerError, NumericError, RookeryError, StorageError
from rookery.core.types import EnvSpec, Shapes
from rookery.crews.crew import Crew, States
from rookery.metrics.journal import Journal
from rookery.pipes.collective import RankLost
from rookery.processes.faults import FaultPlan
from rookery.processes.reserve import Reserve
from rookery.processes.signals import SIGNAL, Signals
from rookery.processes.threads import Threads
from rookery.roles.actor_state import check_state
from rookery.roles.learner import Learner
from rookery.roles.producer import handover_shapes
from rookery.storage import checkpoint, stored
from rookery.storage.files import step_name
from rookery.storage.trust import resume_command
from rookery.tables.table import Table
from rookery.topologies import numeric
from rookery.topologies.callbacks import Callbacks
from rookery.topologies.replay_saver import Saver
from rookery.topologies.vote import Decision, gather_states, vote


class Evaluator(Protocol):
    """Plays whole episodes with copies of the weights; on the first rank, called by the learner's thread."""

    def ask(self) -> None:
        """An evaluation is due now, whatever the number of steps."""

    def turn(self) -> None:
        """After a turn of the loop: take the results that have come, and begin an evaluation if one is due."""

    def finish(self) -> None:
        """After the last checkpoint: evaluate the final weights, unless shutdown was requested."""


def _quietly(text: str) -> None:
    pass


@dataclass
class Job:
    config: RunConfig
    algorithm: Algorithm
    learner: Learner
    journal: Journal
    folder: Path
    signals: Signals
    threads: Threads
    spec: EnvSpec
    states: States = field(default_factory=list)  # of the actors, when resumed
    sequences: list[int] = field(default_factory=list)  # unrolls that each actor has delivered
    resumed_at: int | None = None  # environment steps of the checkpoint we come from
    tell: Callable[[str], None] = _quietly  # what the user should see at once, besides the journal
    reserve: Reserve = field(default_factory=Reserve)  # of descriptors, for checkpoints
    callbacks: Callbacks | None = None  # of the user, on the first rank
    evaluator: Evaluator | None = None  # if the run is to be evaluated while it trains, on the first rank
    clock: Callable[[], float] = monotonic
    _saved_at: int = 0  # environment steps when a checkpoint was last tried, and the time
    _saved_when: float = 0.0
    _kept_at: int = 0  # environment steps of the last one that was written
    _inexact: bool = False  # whether it was said that checkpoints go without the environments
    saver: Saver | None = None  # of the replay memory, if there is one

    def __post_init__(self) -> None:
        self.sequences = self.sequences or [0] * self.config.actors
        self._saved_when = self.clock()
        plan = FaultPlan.parse(self.config.fault_plan).only("learner")
        if plan:
            self.learner.spoil = lambda updates: plan.fire("learner", update=updates) == "nan"

    def warn(self, text: str) -> None:
        """Something about the run as it was found that its user should know: to the journal, and at once."""
        self.journal.say(text)
        self.tell(text)

    def decide(self, held: int | None = None, spent: bool = False) -> Decision:
        """What to do next. Where there are several ranks, all of them decide the same, from one exchange.

        `held`: steps that this rank will train on next. `spent`: there will be none any more.
        """
        asked, due = self.signals.requested or 0, self.checkpoint_due()
        stop, changes = ("", {}) if self.callbacks is None else self.callbacks.take()
        if self.alone:
            self.journal.stop_reason = self.journal.stop_reason or stop
            self.journal.reach(self.journal.reached)
            self._change(changes)
            return Decision(asked, not (asked or self.journal.finished() is not None), due)
        decision = vote(self.learner.reduce, self.journal, asked, due, held, spent, stop, changes)
        self._change(decision.changes)
        if decision.stopping and not asked:
            self.signals.request(SIGNAL[decision.stopping])  # all ranks end with the same exit code
        return decision

    def _change(self, rates: Mapping[str, float]) -> None:
        """Use these step sizes from now on, by parameter group."""
        for group, lr in rates.items():
            self.learner.fixed_lr[group] = lr
            self.journal.say(f"a callback has set the step size of {group} to {lr:g}")

    @property
    def alone(self) -> bool:
        """Whether this is the only rank."""
        return self.learner.reduce.size == 1

    @property
    def rank(self) -> int:
        return self.learner.reduce.rank

    @property
    def own_folder(self) -> Path:
        """Where this rank keeps what is its own: a replay memory."""
        return self.folder if self.rank == 0 else self.folder / "ranks" / str(self.rank)

    def shapes(self) -> Shapes:
        """Of the arrays that an actor hands over."""
        state = self.algorithm.initial_state(self.learner.nets, 1)
        return handover_shapes(self.spec, self.algorithm.plan(), self.config.envs_per_actor, state)

    def checkpoint_due(self) -> bool:
        """After so many steps, or so much time: an hour of a slow environment is not worth less than one of a fast."""
        steps, limits = self.journal.env_steps - self._saved_at, self.config.checkpoint
        asked = self.callbacks is not None and self.callbacks.checkpoint_due
        return asked or steps >= limits.every or (steps > 0 and self.clock() - self._saved_when >= 60 * limits.minutes)

    def save(self, crew: Crew, states: Callable[[], States] | None, last: bool = False) -> None:
        """Write a checkpoint; a full disk is reported and training goes on, unless there is no next time.

        `states`: of the actors, if they can be restored exactly.
        """
        journal = self.journal
        self._saved_at, self._saved_when = journal.env_steps, self.clock()
        try:
            with journal.split.stage("transfer"), self.reserve.lent():
                told: States = [None] * self.config.actors
                if states is not None:
                    told = states()  # first: an actor that fails here takes what it holds back with it
                journal.count_in_flight()
                sequences = crew.sequences
                if not self.alone:
                    told, sequences = gather_states(
                        self.learner.reduce, journal, told, sequences, self.learner.digest()
                    )
                if self.rank == 0:
                    self._write(told, sequences)
                if self.saver is not None:
                    self.saver.save(journal.env_steps, self.signals, self.config.supervisor.grace, last)
        except StorageError as error:
            if last:
                raise
            journal.say(f"checkpoint failed, training goes on: {error}")
        if self.callbacks is not None and self._kept_at == journal.env_steps:
            self.callbacks.saved(self.folder / "checkpoints" / step_name(journal.env_steps))

    def _write(self, snapshots: States, sequences: list[int]) -> None:
        journal = self.journal
        tensors, numbers = self.learner.state()
        if not self.learner.finite():
            raise NumericError("weights or optimiser state are not finite; the last good checkpoint was kept")
        exact = all(s is not None for s in snapshots)
        score = journal.window.return_mean if journal.window.full else None
        if score is not None:
            journal.best = max(score, -math.inf if journal.best is None else journal.best)
        meta = {
            "learner": numbers,
            "journal": journal.state(),
            "sequences": sequences,
            "states": {str(i): s for i, s in enumerate(snapshots)} if exact else {},
            "exact": exact,
        }
        place, keep = self.folder / "checkpoints", self.config.checkpoint.keep
        try:
            checkpoint.save(place, journal.env_steps, tensors, meta, keep=keep, best=score)
        except CheckpointError as error:  # nothing was written: it could not be read again
            if not exact:
                raise
            checkpoint.save(
                place, journal.env_steps, tensors, meta | {"states": {}, "exact": False}, keep=keep, best=score
            )
            self._say_inexact(error)
        self._kept_at = journal.env_steps

    def _say_inexact(self, error: CheckpointError) -> None:
        """Once: the next checkpoint would say the same."""
        if not self._inexact:
            self._inexact = True
            self.journal.say(
                f"the states of the environments do not fit into a checkpoint ({error}); checkpoints go without, and "
                "resuming begins new episodes"
            )

    def tell_of(self, table: Table) -> None:
        """Have the next record say what the table has to tell."""
        if stats := table.stats():
            journal, wall = self.journal, max(1e-9, self.journal.life_s)
            journal.replay = stats | {"learner_idle": journal.idle_s / wall}
            if not table.rounds:
                journal.replay["actors_idle"] = max(0.0, 1 - journal.busy_s / wall)
        if self.saver is not None:
            self.saver.complain()

    @contextmanager
    def running(self, table: Table, crew: Crew) -> Iterator[None]:
        """Around the loop: if environments end the run, what was learnt since the last checkpoint is saved first.

        So it is after gradients that are not finite, since they were refused; what they were made from is kept too.
        In the loop, every record of the journal counts what waits in the table.
        """
        self.journal.waiting = lambda: table.steps
        try:
            yield
        except RankLost as error:  # the weights of this one are as good as those of the others
            self._rescue(crew, error)
            raise
        except (LearnerError, StorageError, CheckpointError):
            raise  # what there is to save is not sound, or there is nowhere to put it
        except NumericError as error:
            if error.skips and self.learner.finite():
                self._dump(error)
                self._rescue(crew, error)
            raise
        except RookeryError as error:
            self._rescue(crew, error)
            raise
        except BaseException as error:
            if self.callbacks is not None and self.callbacks.failed is error:
                self._rescue(crew, error)
            raise
        finally:
            # They hold the table, and a replay memory would wait for the garbage collector.
            self.journal.waiting = self.saver = None

    def _rescue(self, crew: Crew, error: BaseException) -> None:
        """Save what was learnt since the last checkpoint, before the error ends the run."""
        if self.journal.env_steps <= self._kept_at or self.rank > 0:
            return
        self.journal.end_round()  # what has come of a round that was not completed waits in the table
        try:
            if self.alone:
                self.save(crew, None, last=True)
            else:  # the others do not take part: the books are those of the last exchange
                config, most = self.config, max(crew.sequences, default=0)
                actors = config.ranks * config.actors
                self._write([None] * actors, [most] * actors)
            error.add_note(f"what was learnt is saved; go on with: {resume_command(self.folder, self.config)}")
        except RookeryError as trouble:
            error.add_note(f"what was learnt since the last checkpoint could not be saved: {trouble}")

    def _dump(self, error: NumericError) -> None:
        """Keep what the refused gradient was made from; the error says where."""
        try:
            where = numeric.dump(self.folder, self.journal.env_steps, error)
        except RookeryError as trouble:
            error.add_note(f"the batch that did it could not be stored: {trouble}")
        else:
            error.args = (f"{error}. The batch that did it is in {where}",)
        error.evidence = {}  # it may be a view of shared memory, which goes with the run

    def close(self, table: Table, crew: Crew) -> None:
        """The last checkpoint, and the books."""
        self.tell_of(table)
        self.save(crew, crew.snapshots if table.rounds and table.settled else None, last=True)
        ledger = self.journal.whole
        if ledger.imbalance:
            raise LearnerError(f"the ledger does not balance by {ledger.imbalance} steps: {ledger.as_dict()}")


def restore(job: Job, saved: checkpoint.Checkpoint) -> None:
    """Put a fresh job into the state of a checkpoint; CheckpointError if this job could not have made it."""
    numbers = stored.check_numbers(saved, job.config.ranks * job.config.actors)
    stored.check_tensors(job.learner, saved)
    try:
        job.learner.load(saved.tensors, saved.meta["learner"])
        job.journal.load(saved.meta["journal"])
    except (RuntimeError, KeyError, ValueError, TypeError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"checkpoint {saved.path}: {error}; {stored.FOREIGN}") from error
    first = job.rank * job.config.actors
    own = range(first, first + job.config.actors)
    job.sequences = [numbers.sequences[index] for index in own]
    job._saved_at = job._kept_at = job.resumed_at = saved.env_steps
    if not numbers.exact:
        job.journal.say("the environments cannot be restored exactly: new episodes begin")
        return
    states, lanes, builds = (
        stored.actor_states(saved),
        job.config.envs_per_actor,
        job.algorithm.plan().table.builds_items,
    )
    start = job.algorithm.initial_state(job.learner.nets, lanes)
    for index, sequence in zip(own, job.sequences):
        try:
            check_state(states.get(str(index)), job.spec, lanes, start, sequence, builds)
        except CheckpointError as error:
            raise CheckpointError(f"checkpoint {saved.path}: actor {index}: {error}; {stored.FOREIGN}") from error
    job.states = [states[str(index)] for index in own]
