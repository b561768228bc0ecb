"""The crew at its seams: deaths between two messages, unrolls announced and not read yet, shutdown, snapshots."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from support_crew import APEX, GORILA, LONG, MODE, PPO, idle, kill, messages, train_ppo, until

import rookery
from rookery.core.errors import EnvError
from rookery.core.types import Delivery
from rookery.crews.process import ProcessCrew
from rookery.processes.signals import Patience, Signals, Stopped
from rookery.storage import checkpoint
from rookery.topologies import local
from rookery.topologies.loop import Loop


@pytest.mark.parametrize(("recipe", "fields"), [
    ("ppo", PPO | {"topology": "local"}), pytest.param("gorila", GORILA, marks=pytest.mark.attack),  # the same pool
])  # fmt: skip
def test_a_worker_that_dies_before_it_is_told_of_the_memory_is_replaced(tmp_path, monkeypatch, recipe, fields):
    opened = ProcessCrew.open

    def open_late(crew: ProcessCrew, *args: Any) -> None:
        kill(crew, 1)
        opened(crew, *args)

    monkeypatch.setattr(ProcessCrew, "open", open_late)
    run = rookery.train(recipe, env="CartPole-v1", out=str(tmp_path / "run"), env_steps=300, **fields)
    assert run.summary["restarts"] == 1 and run.summary["exit_reason"] == "env_steps"
    assert run.summary["ledger"]["dropped"] == {}


@pytest.mark.parametrize(("topology", "how"), [("serial", "raises"), ("serial", "object"), ("local", "raises")])
def test_an_environment_that_cannot_tell_its_state_costs_new_episodes_and_nothing_else(tmp_path, topology, how):
    actors = 1 if topology == "serial" else 2
    fields = {"topology": topology, "actors": actors, "checkpoint": {"every": 64}}
    run = train_ppo(tmp_path, "secretive", {"how": how}, env_steps=500, **fields)
    assert run.summary["restarts"] == 0 and run.summary["exit_reason"] == "env_steps"
    said = [text for text in messages(run.path) if "get_state" in text]
    assert len(said) == 1 and ("middle of an episode" if how == "raises" else "object") in said[0], said
    if topology == "serial":
        again = rookery.resume(run.path, trust=("support_crew",), env_steps=600)
        assert again.summary["exit_reason"] == "env_steps"
        assert any("new episodes begin" in text for text in messages(run.path))


def test_what_was_announced_before_a_death_is_used(tmp_path, monkeypatch, loops):
    arrived, waiting = ProcessCrew.arrived, []

    def arrived_late(crew: ProcessCrew, patience: float) -> Iterator[Delivery]:
        if len(crew._slots[1]) >= 2 and not waiting and loops[0].job.journal.env_steps > 100:
            until(lambda: idle(crew, 1), "all unrolls of actor 1")
            waiting.extend(crew._slots[1])
            kill(crew, 1)
        return arrived(crew, patience)

    monkeypatch.setattr(ProcessCrew, "arrived", arrived_late)
    run = rookery.train("apex_dqn", env="CartPole-v1", out=str(tmp_path / "run"), env_steps=600, **APEX)
    assert len(waiting) >= 2 and run.summary["restarts"] == 1
    # Of each environment at most the step that its next one would have completed; an unroll would be ten.
    assert run.summary["ledger"]["dropped"].get("actor_died", 0) <= APEX["envs_per_actor"]


def test_a_whole_unroll_that_could_not_be_announced_is_counted_to_its_last_row(tmp_path, monkeypatch):
    monkeypatch.setenv(MODE, "dies")
    monkeypatch.setattr(local, "ProcessCrew", partial(ProcessCrew, module="support_crew"))
    fields = PPO | {"topology": "local", "preset": "vector", "actors": 1, "env_kwargs": {"lengths": [1000]}}
    run = rookery.train("ppo", env="rookery/Counter-v0", out=str(tmp_path / "run"), env_steps=200, **fields)
    assert run.summary["ledger"]["dropped"] == {"actor_died": PPO["algo"]["unroll"] * PPO["envs_per_actor"]}


def test_an_actor_whose_unrolls_we_were_too_busy_to_read_does_not_count_as_hung(tmp_path, monkeypatch):
    """A long update, and shutdown is requested in it."""
    updates, step, grace = [], Loop._step, 6.0

    def step_long(loop: Loop, *args: Any, **kwargs: Any) -> Any:
        updates.append(1)
        crew = loop.crew
        if len(updates) >= 10 and crew.signals.requested is None and all(crew._slots):
            for index in (0, 1):
                until(lambda: idle(crew, index) and crew._buffers.pulse.age(index) > grace / 2, f"actor {index}")  # noqa: B023
            os.kill(os.getpid(), signal.SIGTERM)
        return step(loop, *args, **kwargs)

    monkeypatch.setattr(Loop, "_step", step_long)
    run = rookery.train(
        "apex_dqn", env="CartPole-v1", out=str(tmp_path / "run"), env_steps=10**6, supervisor={"grace": grace}, **APEX
    )
    assert run.exit_code == 75 and run.summary["restarts"] == 0
    assert run.summary["ledger"]["dropped"] == {}


# Shutdown. Where the request is not heard, the deadlines are too long for these tests to end in time.

LEAVING = {"grace": 3.0, "step_deadline": LONG, "start_deadline": LONG}
ALONE = {"actors": 1, "envs_per_actor": 1, "supervisor": LEAVING}


def test_a_start_that_takes_too_long_after_a_request_to_shut_down_ends_and_nobody_is_replaced(tmp_path):
    calls = tmp_path / "calls"
    with pytest.raises(Stopped) as caught:
        train_ppo(tmp_path, "slow", {"calls": str(calls), "at": 1}, env_steps=600, **ALONE)
    assert caught.value.exit_code == 75
    assert (tmp_path / "run" / "config.json").exists(), "it can be resumed"
    assert len(calls.read_text().splitlines()) == 1


def test_before_the_first_worker_is_up_a_request_to_shut_down_kills_at_once(tmp_path, crews):
    """Those that reset their environments would not hear a polite request: nobody waits for an answer."""
    with pytest.raises(Stopped):
        train_ppo(tmp_path, "stuck", {}, env_steps=600, **ALONE)
    assert [place.worker.exitcode for place in crews[0].pool.places] == [-signal.SIGKILL]


def test_a_replacement_that_takes_too_long_after_a_request_to_shut_down_is_given_up_and_the_run_is_saved(tmp_path):
    calls = tmp_path / "calls"
    run = train_ppo(
        tmp_path, "slow", {"calls": str(calls), "at": 2}, env_steps=600, fault_plan="actor[0]@unroll=3:sigkill", **ALONE
    )
    assert run.exit_code == 75 and len(calls.read_text().splitlines()) == 2
    assert checkpoint.newest(run.path / "checkpoints")[0].env_steps == run.summary["env_steps"] > 0


def test_all_snapshots_share_the_time_that_is_left_after_a_request_to_shut_down(tmp_path, monkeypatch):
    snapshots, spent = ProcessCrew.snapshots, []

    def timed(crew: ProcessCrew) -> list[Any]:
        began = time.monotonic()
        states = snapshots(crew)
        spent.append(time.monotonic() - began)
        return states

    monkeypatch.setattr(ProcessCrew, "snapshots", timed)
    fields = {"supervisor": LEAVING, "fault_plan": "learner@update=2:sigterm"}
    run = train_ppo(tmp_path, "secretive", {"how": "hangs"}, env_steps=10**6, **fields)
    assert run.exit_code == 75 and len(spent) == 1 and spent[0] < LONG / 2
    assert checkpoint.newest(run.path / "checkpoints")[0].env_steps == run.summary["env_steps"] > 0


def test_patience_is_shorter_from_the_request_to_shut_down_on():
    now = [100.0]

    def clock() -> float:
        return now[0]

    with Signals(clock=clock) as signals:
        patience = Patience(signals, 60.0, 10.0, clock=clock)
        now[0] = 130.0
        assert patience.left() == 30.0
        os.kill(os.getpid(), signal.SIGTERM)
        assert patience.left() == 10.0
        now[0] = 150.0
        assert patience.left() == 0.0
        assert Patience(signals, 60.0, 10.0, clock=clock).left() == 0.0
        assert Patience(signals, 60.0, 10.0, since=150.0, clock=clock).left() == 10.0
        assert Patience(signals, 5.0, 10.0, since=150.0, clock=clock).left() == 5.0


def test_what_was_learnt_is_saved_though_no_actor_can_tell_its_state(tmp_path):
    """The end comes while a checkpoint is being made: that one does not count as written."""
    with pytest.raises(EnvError) as caught:
        train_ppo(tmp_path, "secretive", {"how": "exits"}, env_steps=64, actors=1, supervisor={"restarts": 0})
    assert any("what was learnt is saved" in note for note in caught.value.__notes__)
    assert checkpoint.newest(tmp_path / "run" / "checkpoints")[0].env_steps >= 64
