"""Workers come and go while the run goes on: nobody waits for one that is ended, starts, or will not be needed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support_crew import APEX, GORILA, PPO, balances, kill

import rookery
from rookery.core.types import Delivery
from rookery.crews.pool import Place, WorkerPool
from rookery.crews.process import ProcessCrew
from rookery.processes.failure import Lost
from rookery.topologies.loop import Loop

FINISHED = "rookery.metrics.journal.Journal.finished"
FREE = [("apex_dqn", APEX), pytest.param("gorila", GORILA, marks=pytest.mark.attack)]  # of one pool


@pytest.mark.parametrize(("recipe", "fields"), FREE)
def test_nobody_waits_while_a_replacement_comes_up(tmp_path, monkeypatch, loops, recipe, fields):
    """Its process loads libraries for seconds: the learner learns meanwhile, and the other actor delivers."""
    start, came_up, seen = WorkerPool._start, ProcessCrew._came_up, {}

    def now() -> tuple[int, int]:
        return loops[0].trainer.updates, loops[0].crew.sequences[0]

    def seen_start(pool: WorkerPool, place: Place) -> None:
        start(pool, place)
        if place.incarnation:
            seen["started"] = now()

    def seen_up(crew: ProcessCrew, index: int) -> None:
        came_up(crew, index)
        if crew.pool.places[index].incarnation:
            seen["up"] = now()

    def finished(journal: Any) -> str | None:  # as many steps as it takes, and then until the newcomer has delivered
        if "up" not in seen:
            return None
        delivered = loops[0].crew.sequences[1]
        return "env_steps" if delivered > seen.setdefault("first", delivered) else None

    monkeypatch.setattr(WorkerPool, "_start", seen_start)
    monkeypatch.setattr(ProcessCrew, "_came_up", seen_up)
    monkeypatch.setattr(FINISHED, finished)
    run = rookery.train(
        recipe, env="CartPole-v1", out=str(tmp_path / "run"), env_steps=10**9,
        fault_plan="actor[1]@env_step=137:sigkill", **fields,
    )  # fmt: skip
    assert run.summary["restarts"] == 1
    updates, unrolls = (after - before for before, after in zip(seen["started"], seen["up"]))
    assert updates > 10 and unrolls > 10, (updates, unrolls)


def test_the_learner_learns_while_a_worker_that_does_not_listen_is_being_ended(tmp_path, monkeypatch, loops):
    """It ignores SIGABRT: only SIGKILL ends it, when the time for its stack is over."""
    monkeypatch.setattr("rookery.processes.worker.ABORT_WAIT", 2.0)
    lose, give_back, before, after = WorkerPool.lose, ProcessCrew._give_back, [], []

    def seen_lose(pool: WorkerPool, index: int, lost: Lost) -> None:
        before.append(loops[0].trainer.updates)
        lose(pool, index, lost)

    def seen_end(crew: ProcessCrew, index: int) -> int:
        after.append(loops[0].trainer.updates)
        return give_back(crew, index)

    monkeypatch.setattr(WorkerPool, "lose", seen_lose)
    monkeypatch.setattr(ProcessCrew, "_give_back", seen_end)
    monkeypatch.setattr(FINISHED, lambda journal: "env_steps" if after else None)
    run = rookery.train(
        "apex_dqn", env="support_crew:deaf", env_kwargs={"marker": str(tmp_path / "marker")},
        out=str(tmp_path / "run"), env_steps=10**9, supervisor={"step_deadline": 2.0}, **APEX,
    )  # fmt: skip
    assert len(before) == len(after) == 1 and after[0] - before[0] > 10
    assert balances(run.summary["ledger"])


@pytest.mark.parametrize(("recipe", "fields"), FREE)
def test_a_replacement_that_comes_too_late_for_the_run_is_given_up(tmp_path, monkeypatch, recipe, fields):
    """The other actor has taken all the steps: nobody waits for one that would have nothing to do."""
    given_up, finish, come_up = [], WorkerPool.finish, WorkerPool._come_up

    def never(pool: WorkerPool, place: Place) -> None:
        if not place.incarnation:
            come_up(pool, place)

    def seen(pool: WorkerPool) -> None:
        given_up.extend(pool._moving)
        finish(pool)

    monkeypatch.setattr(WorkerPool, "_come_up", never)
    monkeypatch.setattr(WorkerPool, "finish", seen)
    run = rookery.train(
        recipe, env="CartPole-v1", out=str(tmp_path / "run"), env_steps=2000,
        fault_plan="actor[1]@env_step=137:sigkill", **fields,
    )  # fmt: skip
    assert given_up == [1] and run.summary["exit_reason"] == "env_steps" and run.summary["restarts"] == 1


def test_an_actor_that_dies_when_all_is_done_is_nobodys_trouble(tmp_path, monkeypatch, crews):
    """No replacement, no failure: what was wanted is there, and what it was filling is counted."""
    arrived = ProcessCrew.arrived

    def dead() -> bool:
        return not crews[0].pool.places[1].worker.alive()

    def unnoticed(crew: ProcessCrew, patience: float) -> Iterator[Delivery]:
        return iter(()) if dead() and not crew.pool._finishing else arrived(crew, patience)

    monkeypatch.setattr(ProcessCrew, "arrived", unnoticed)
    monkeypatch.setattr(FINISHED, lambda journal: "target_return" if dead() else None)
    run = rookery.train(
        "apex_dqn", env="CartPole-v1", out=str(tmp_path / "run"), env_steps=10**6, supervisor={"restarts": 0},
        fault_plan="actor[1]@env_step=137:sigkill", **APEX,
    )  # fmt: skip
    assert run.exit_code == 0 and run.summary["exit_reason"] == "target_return"
    assert run.summary["ledger"]["dropped"]["actor_died"] > 0


def test_a_worker_that_dies_between_two_rounds_is_replaced_and_no_step_is_lost(tmp_path, monkeypatch):
    """While the learner learns, nobody has an order."""
    step, killed = Loop._step, []

    def step_and_kill(loop: Loop, *args: Any, **kwargs: Any) -> Any:
        assert not loop.crew.ordered
        if loop.trainer.updates == 3 and not killed:
            killed.append(1)
            kill(loop.crew, 1)
        return step(loop, *args, **kwargs)

    monkeypatch.setattr(Loop, "_step", step_and_kill)
    run = rookery.train(
        "ppo", env="CartPole-v1", out=str(tmp_path / "run"), env_steps=600, **PPO | {"topology": "local"}
    )
    ledger = run.summary["ledger"]
    assert killed and run.summary["restarts"] == 1 and run.summary["exit_reason"] == "env_steps"
    assert ledger["dropped"] == {} and ledger["trained"] == ledger["collected"] >= 600
