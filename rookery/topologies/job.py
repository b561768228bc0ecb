"""What every topology shares: the learner, the journal, checkpoints and the question whether to go on.

A topology decides who runs where and who hands what to whom; `feed.py` is what it does with a batch once it has one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from time import monotonic
from typing import Any

from torch import nn

from rookery import checkpoint
from rookery.algorithms.base import Algorithm
from rookery.config import RunConfig
from rookery.errors import CheckpointError, LearnerError, NumericError, RookeryError, StorageError
from rookery.journal import Journal
from rookery.learner import Learner
from rookery.topologies.faults import FaultPlan
from rookery.topologies.reserve import Reserve
from rookery.topologies.signals import Signals
from rookery.topologies.threads import Threads
from rookery.types import EnvSpec
from rookery.weights import Published

Snapshots = Callable[[], list[dict[str, Any] | None]]


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
    snapshots: list[dict[str, Any] | None] = field(default_factory=list)  # of the actors, when resumed
    sequences: list[int] = field(default_factory=list)  # unrolls that each actor has delivered
    resumed_at: int | None = None  # environment steps of the checkpoint we come from
    reserve: Reserve = field(default_factory=Reserve)  # of descriptors, for checkpoints
    clock: Callable[[], float] = monotonic
    _saved_at: int = 0  # environment steps when a checkpoint was last tried, and the time
    _saved_when: float = 0.0
    _kept_at: int = 0  # environment steps of the last one that was written
    _mirror: Published | None = None

    def __post_init__(self) -> None:
        self.sequences = self.sequences or [0] * self.config.actors
        self._saved_when = self.clock()
        plan = FaultPlan.parse(self.config.fault_plan).only("learner")
        if plan:
            self.learner.spoil = lambda updates: plan.fire("learner", update=updates) == "nan"

    def goes_on(self) -> bool:
        return self.signals.requested is None and self.journal.finished() is None

    def acting_nets(self) -> nn.ModuleDict:
        """The nets that act in the learner's own process: its own, unless those live on another device."""
        if self.learner.device.type == "cpu":
            return self.learner.nets
        nets = self.algorithm.nets()
        self._mirror = Published(self.algorithm, nets)
        self.refresh()
        return nets

    def refresh(self) -> None:
        """Bring acting nets that are not the learner's own up to date."""
        if self._mirror is not None:
            self._mirror.load(self.learner.published.read())

    def checkpoint_due(self) -> bool:
        """After so many steps, or so much time: an hour of a slow environment is not worth less than one of a fast."""
        steps, limits = self.journal.env_steps - self._saved_at, self.config.checkpoint
        return steps >= limits.every or (steps > 0 and self.clock() - self._saved_when >= 60 * limits.minutes)

    def save(self, feed: Any, snapshots: Snapshots, last: bool = False) -> None:
        """Write a checkpoint; a full disk is reported and training goes on, unless there is no next time."""
        journal = self.journal
        self._saved_at, self._saved_when = journal.env_steps, self.clock()
        try:
            with journal.split.stage("transfer"), self.reserve.lent():
                states = snapshots()  # first: an actor that fails here takes what it holds back with it
                journal.ledger.in_flight = feed.in_flight
                self._write(states)
                feed.save(last)
        except StorageError as error:
            if last:
                raise
            journal.say(f"checkpoint failed, training goes on: {error}")

    def _write(self, snapshots: list[dict[str, Any] | None]) -> None:
        journal = self.journal
        tensors, numbers = self.learner.state()
        if not self.learner.finite():
            raise NumericError("weights or optimiser state are not finite; the last good checkpoint was kept")
        exact = all(s is not None for s in snapshots)
        actors, actor_tensors = checkpoint.encode_tree(
            {str(i): s for i, s in enumerate(snapshots)} if exact else {}, "actors"
        )
        score = journal.window.return_mean if journal.window.full else None
        if score is not None:
            journal.best = max(score, -math.inf if journal.best is None else journal.best)
        meta = {
            "learner": numbers,
            "journal": journal.state(),
            "sequences": self.sequences,
            "actors": actors,
            "exact": exact,
        }
        checkpoint.save(
            self.folder / "checkpoints", journal.env_steps, tensors | actor_tensors, meta,
            keep=self.config.checkpoint.keep, best=score,
        )  # fmt: skip
        self._kept_at = journal.env_steps

    @contextmanager
    def rescuing(self, feed: Any) -> Iterator[None]:
        """Around the loop: if environments end the run, what was learnt since the last checkpoint is saved first."""
        try:
            yield
        except (NumericError, LearnerError, StorageError, CheckpointError):
            raise  # what there is to save is not sound, or there is nowhere to put it
        except RookeryError as error:
            if self.journal.env_steps > self._kept_at:
                try:
                    self.save(feed, lambda: [None] * self.config.actors, last=True)
                    error.add_note(f"what was learnt is saved; go on with: rookery resume {quote(str(self.folder))}")
                except RookeryError as trouble:
                    error.add_note(f"what was learnt since the last checkpoint could not be saved: {trouble}")
            raise

    def close(self, feed: Any, snapshots: Snapshots) -> None:
        """The last checkpoint, and the books."""
        self.save(feed, snapshots, last=True)
        ledger = self.journal.ledger
        if ledger.imbalance:
            raise LearnerError(f"the ledger does not balance by {ledger.imbalance} steps: {ledger.as_dict()}")


def restore(job: Job, saved: checkpoint.Checkpoint) -> None:
    """Put a fresh job into the state of a checkpoint."""
    try:
        job.learner.load(saved.tensors, saved.meta["learner"])
    except (RuntimeError, KeyError, ValueError) as error:
        raise CheckpointError(
            "the checkpoint holds other networks or optimisers than these settings ask for; resume without changing "
            "them, or start a new run"
        ) from error
    job.journal.load(saved.meta["journal"])
    job.sequences = list(saved.meta["sequences"])
    job._saved_at = job._kept_at = job.resumed_at = saved.env_steps
    actors = checkpoint.decode_tree(saved.meta["actors"], saved.tensors)
    if saved.meta["exact"]:
        job.snapshots = [actors[str(i)] for i in range(job.config.actors)]
    else:
        job.journal.say("the environments cannot be restored exactly: new episodes begin")
