"""The loop: every rank decides from what all of them see, and what it takes from a table is booked once."""

from __future__ import annotations

import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support_ranks import agreed, ranks, together

import rookery
from rookery.algorithms.registry import algorithm_class
from rookery.core.errors import LearnerError
from rookery.core.types import StepReport
from rookery.crews.inline import InlineCrew
from rookery.metrics.journal import Journal
from rookery.processes.signals import Signals
from rookery.processes.threads import Threads
from rookery.roles.learner import Learner
from rookery.storage import checkpoint
from rookery.tables.queue import LagQueue
from rookery.topologies import loop
from rookery.topologies.job import Job
from rookery.topologies.vote import vote


class Quiet:
    def write(self, record: dict[str, Any]) -> None:
        pass

    update = write

    def news(self) -> list[str]:
        return []


class Rank:
    """One rank of a run: its own environments, table and loop, and a learner that reduces with those of the others."""

    def __init__(self, folder: Path, reduce: Any = None, size: int = 1, **fields: Any):
        algo = {"unroll": 8, "epochs": 2, "minibatches": 2}
        self.config = rookery.configure(
            "ppo", "CartPole-v1", preset="vector", actors=1, envs_per_actor=2, algo=algo, net={"hidden": (8,)},
            **({"env_steps": 400, "ranks": size} | fields),
        )  # fmt: skip
        self.folder, self.reduce, self.size, self.steps = folder, reduce, size, []
        with Signals() as signals, InlineCrew(self.config, signals) as crew:
            spec = crew.spec
        algorithm = algorithm_class(self.config.algorithm)(self.config.algo, self.config.net, spec, self.config.lanes)
        options = {} if reduce is None else {"reduce": reduce}
        self.learner = Learner(algorithm, self.config.seed, **options)

    def run(self, stop_after: int = 0) -> Job:
        rank = 0 if self.reduce is None else self.reduce.rank
        with Signals() as signals, InlineCrew(self.config, signals, first=rank) as crew:
            journal = Journal(self.config, Quiet(), Quiet(), rank=rank)
            threads = Threads(self.config)
            self.job = job = Job(
                self.config, self.learner.algorithm, self.learner, journal, self.folder, signals, threads, crew.spec
            )
            step = self.learner.step

            def counted(batch: Any, progress: float, tell: bool = True) -> StepReport:
                self.steps.append(journal.env_steps)
                if len(self.steps) == stop_after:
                    signals._first = (signal.SIGTERM, time.monotonic())
                return step(batch, progress, tell)

            self.learner.step = counted
            shapes = job.shapes()
            table = loop.table_of(job, shapes, alone=True)
            crew.open(loop.prepare(job, table, shapes, self.learner.published.size), self.learner, threads, True)
            return loop.run(job, crew, table, self.learner)


@pytest.mark.parametrize("size", [2, 3])
def test_a_request_to_shut_down_on_one_rank_ends_all_of_them_after_the_same_update(tmp_path, size):
    group = ranks(size)
    members = [Rank(tmp_path, group[r], size, env_steps=10**6) for r in range(size)]
    agreed(together(group, lambda r: members[r].run(stop_after=5 if r == size - 1 else 0)))
    assert [len(member.steps) for member in members] == [6] * size, "it comes within update 5: the next vote tells it"
    assert {member.learner.version for member in members} == {6}


def test_ranks_know_the_same_of_the_run_and_the_first_writes_the_checkpoints(tmp_path):
    """Episodes end on one rank and not on the other, so that their own counts of steps differ."""
    group = ranks(2)
    members = [Rank(tmp_path, group[r], 2, seed=3, checkpoint={"every": 50, "keep": 99}) for r in range(2)]
    agreed(together(group, lambda r: members[r].run()))
    journals = [member.job.journal for member in members]
    assert journals[0].ledger.collected != journals[1].ledger.collected, "the case is not the one that is meant"
    assert journals[0].whole == journals[1].whole == journals[0].ledger + journals[1].ledger
    assert journals[0].env_steps >= 400 and not journals[0].whole.imbalance
    assert journals[0].window.to_dict() == journals[1].window.to_dict() and journals[0].episodes > 10
    assert members[0].steps == members[1].steps, "all train after the same steps of the run"
    saved = checkpoint.load(tmp_path / "checkpoints" / f"step-{journals[0].env_steps:012d}")
    assert set(saved.meta["states"]) == {"0", "1"} and saved.meta["exact"]
    nets = [member.learner.nets.state_dict() for member in members]
    assert all(torch.equal(nets[0][name], nets[1][name]) for name in nets[0])


def test_ranks_whose_weights_differ_end_before_a_checkpoint_is_written(tmp_path):
    group = ranks(2)
    members = [Rank(tmp_path, group[r], 2) for r in range(2)]
    with torch.no_grad():  # one rank computes differently
        next(iter(members[1].learner.flat.values())).parameter[0] += 1e-3
    results = together(group, lambda r: members[r].run())
    assert all(isinstance(error, LearnerError) and "rank 1" in str(error) for error in results), results
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize("held", [(5, 7), (5, None), (None, None)])
def test_ranks_train_together_or_not_at_all_and_decide_the_same(held):
    config = rookery.configure("ppo", "CartPole-v1", preset="vector", ranks=2)
    group, journals = ranks(2), [Journal(config, Quiet(), Quiet(), rank=rank) for rank in range(2)]
    first, second = agreed(
        together(group, lambda r: vote(group[r], journals[r], (0, 75)[r], r == 0, held[r], spent=held[r] is None))
    )
    assert first == second
    assert first.ready == (None not in held) and first.spent == (None in held)
    assert (first.stopping, first.going, first.checkpoint) == (75, False, True), "what one rank asks for, all do"
    assert journals[0].whole.in_flight == journals[1].whole.in_flight == sum(steps or 0 for steps in held)


def test_ranks_vote_once_a_round(tmp_path):
    group, said = ranks(2), []
    gather = group[0].gather
    group[0].gather = lambda message: said.append(message) or gather(message)
    members = [Rank(tmp_path, group[r], 2) for r in range(2)]
    agreed(together(group, lambda r: members[r].run()))
    assert len(said) == len(members[0].steps) + 3, "at the start, before each update, at the end; the save"


# With lag: what is dropped is in the ledger


class Trainer:
    """Counts; a version for every batch."""

    def __init__(self, learner: Learner):
        self.learner, self.version, self.updates = learner, 0, 0
        self.lags: list[int] = []

    def step(self, batch: Any, progress: float, tell: bool = True) -> StepReport:
        self.lags += (self.version - batch.version).tolist()
        self.version += 1
        self.updates += 1
        return StepReport({})

    def read(self) -> Any:
        return self.learner.read()

    def ensure_finite(self) -> None:
        pass


def run_with_lag(folder: Path, seed: int, max_lag: int = 2) -> tuple[list[int], Job, list[float]]:
    rank = Rank(folder, seed=seed, env_steps=1200)
    config = replace(rank.config, actors=4, envs_per_actor=1)
    with Signals() as signals, InlineCrew(config, signals) as crew:
        journal = Journal(config, Quiet(), Quiet())
        threads = Threads(config)
        job = Job(config, rank.learner.algorithm, rank.learner, journal, folder, signals, threads, crew.spec)
        table, trainer = LagQueue(4, batch=2, max_lag=max_lag), Trainer(rank.learner)
        shapes = job.shapes()
        crew.open(loop.prepare(job, table, shapes, rank.learner.published.size), rank.learner, threads, False)
        seen, insert = [], table.insert
        table.insert = lambda delivery: (seen.append((delivery.actor, delivery.sequence)), insert(delivery))
        loop.run(job, crew, table, trainer)
    return trainer.lags, job, seen


def test_with_lag_a_run_in_one_process_repeats_keeps_its_bound_and_balances(tmp_path):
    lags, job, order = run_with_lag(tmp_path / "a", seed=1)
    ledger = job.journal.ledger
    assert 0 < max(lags) <= 2 and np.mean(lags) > 0
    assert ledger.imbalance == 0 and ledger.trained > 800
    again, _, same = run_with_lag(tmp_path / "b", seed=1)
    assert (lags, order) == (again, same)
    other = run_with_lag(tmp_path / "c", seed=2)[2]
    assert other != order, "the order of arrival depends on the seed"
