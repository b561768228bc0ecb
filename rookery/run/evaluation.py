"""Evaluation while a run trains: when one is due, and what becomes of its result.

The learner's thread copies the networks and goes on; who plays with the copy is chosen here (`evaluators.py`): a
process where the run has others, else this thread, between two updates. The result is a record of kind "eval", it
decides which weights are the best (`eval/best/`), and with `eval.stop` it ends the run. An evaluation that fails is a
message and counted: it never ends a run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import torch

from rookery.core.errors import UsageError
from rookery.play.policy import Policy
from rookery.run.env import in_this_process
from rookery.run.evaluators import Beside, BestWeights, Inline, Outcome, Weights
from rookery.storage import checkpoint
from rookery.storage.trust import needed
from rookery.topologies.job import Job

LOOK = 0.2  # seconds between two looks for a request to shut down
PATIENCE = 2.0  # seconds at the end before the user is told what the run waits for
RECORDED = (
    "env_steps", "return_mean", "return_std", "return_min", "return_max", "length_mean", "episodes", "info", "returns"
)  # fmt: skip


def copied(nets: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The networks as a checkpoint has them."""
    return {f"nets/{name}": each.detach().to("cpu", copy=True) for name, each in nets.state_dict().items()}


def policy_of(job: Job) -> Policy:
    """A copy of the policy as it is now. Making its networks draws no random numbers of the run."""
    now = checkpoint.Checkpoint(job.folder, job.journal.env_steps, copied(job.learner.nets), {})
    with torch.random.fork_rng(devices=[]):
        policy = Policy(job.config, job.spec, now)
    policy.trust = needed(job.config)
    return policy


class Evaluations:
    """On the learner's thread. Context manager: nothing that it has started outlives it."""

    def __init__(self, job: Job, records: Iterable[Mapping[str, Any]]):
        """`records`: of the evaluations of this run before it was resumed."""
        config, spec = job.config, job.spec
        if config.eval.epsilon and spec.action.kind == "box":
            raise UsageError(f"eval.epsilon is for discrete actions and {config.env} has a Box; leave it out")
        self._job, self._every = job, config.eval.every
        self._begun: int | None = None  # version of the weights of the newest one
        self._asked = False
        best = BestWeights(job.folder)
        self._player: Inline | Beside = (
            Inline(config, spec, job.folder, job.signals, best)
            if in_this_process(config)
            else Beside(config, job.folder, best)
        )
        job.journal.evaluations.restore(records)
        last = job.journal.evaluations.last
        self._plan(0 if last is None else last["env_steps"])

    def __enter__(self) -> Evaluations:
        return self

    def __exit__(self, *error: object) -> None:
        self._player.close()

    def ask(self) -> None:
        self._asked = True

    def turn(self) -> None:
        self._take()
        if self._asked or self._due():
            with self._job.journal.split.stage(self._player.stage):
                self._begin()
            self._take()

    def finish(self) -> None:
        job, journal, player = self._job, self._job.journal, self._player
        if job.signals.requested is not None:
            return
        if self._asked or (self._every and self._begun != job.learner.version):
            self._begin()
        began, told = time.monotonic(), False
        while player.busy and job.signals.requested is None and time.monotonic() - began < self._limit():
            player.wait(LOOK)
            if not told and player.busy and time.monotonic() - began > PATIENCE:
                told = True
                journal.say("training has ended; the final weights are being evaluated")
                journal.report(force=True)
        self._take()
        journal.reach(journal.reached)
        if player.busy and job.signals.requested is None:
            journal.evaluations.failed += 1
            journal.say("the evaluation of the final weights took too long and was given up; see eval.minutes")

    def _limit(self) -> float:
        """Seconds for the last evaluation. Other ranks have ended by then, and wait for this one."""
        config, limit = self._job.config, 60 * self._job.config.eval.minutes
        return limit if config.ranks == 1 else min(limit, config.group.timeout / 2)

    def _plan(self, env_steps: int) -> None:
        self._next = (env_steps // self._every + 1) * self._every if self._every else math.inf

    def _due(self) -> bool:
        """The last one is left to `finish`: the last steps may not have been trained on yet."""
        steps = self._job.journal.env_steps
        return steps >= self._next and steps < self._job.config.env_steps and self._job.signals.requested is None

    def _begin(self) -> None:
        """Copy the networks, and have them evaluated."""
        learner, journal = self._job.learner, self._job.journal
        weights = Weights(journal.env_steps, learner.updates, journal.wall_s, copied(learner.nets))
        self._asked, self._begun = False, learner.version
        self._plan(weights.env_steps)
        journal.evaluations.skipped += self._player.begin(weights)

    def _take(self) -> None:
        while self._player.outcomes:
            self._settle(self._player.outcomes.popleft())

    def _settle(self, outcome: Outcome) -> None:
        journal, weights, found = self._job.journal, outcome.weights, outcome.evaluation
        if found is None:
            journal.evaluations.failed += 1
            journal.say(
                f"the evaluation at {weights.env_steps:,} steps failed, training is not affected and the next one is "
                f"tried as planned: {outcome.why}"
            )
            return
        values = asdict(found) | {"env_steps": weights.env_steps}
        record = {name: values[name] for name in RECORDED} | {"seconds": outcome.seconds}
        journal.evaluated(record, weights.updates, weights.wall_s)
        if outcome.why:
            journal.say(outcome.why)
        if self._job.callbacks is not None:
            self._job.callbacks.evaluated(found)
