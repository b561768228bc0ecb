"""Environments that break their contract, and processes that die: noticed, located, replaced or ended; no leftovers."""

from __future__ import annotations

import contextlib
import gc
import json
import os
from pathlib import Path

import pytest
from support_descriptors import descriptors

import rookery
from rookery.core.errors import EnvError, NumericError

SMALL = {"env_steps": 600, "quiet": True, "algo": {"unroll": 16, "epochs": 1, "minibatches": 2}, "envs_per_actor": 2}
# A deadline short enough to wait for where a worker hangs, and beyond any delay of a busy machine elsewhere.
HANGS, LIVES = 2.0, 60.0
QUICK = {"supervisor": {"step_deadline": LIVES, "restarts": 1}}


def children() -> list[str]:
    """Command lines of our own child processes."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(status.read_text().rsplit(")", 1)[1].split()[1]) == os.getpid():
                found.append((status.parent / "cmdline").read_text().replace("\0", " "))
        except (OSError, ValueError):
            continue
    return [command for command in found if "local_actor" in command]


@pytest.fixture(autouse=True)
def nothing_left_behind():
    before = set(os.listdir("/dev/shm"))
    yield
    assert children() == []
    assert set(os.listdir("/dev/shm")) - before == set()


def faulty(tmp_path, fault: str, topology: str, env: str = "rookery/Faulty-v0", **fields):
    kwargs = {"fault": fault, "at_episode": 1, "at_step": 3} if fault else {}
    kwargs |= fields.pop("env_kwargs", {})
    settings = SMALL | QUICK | {"topology": topology, "preset": "vector"} | fields
    return rookery.train("ppo", env=env, env_kwargs=kwargs, out=str(tmp_path / "run"), **settings)


@pytest.mark.parametrize("topology", ["serial", "local"])
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("raise_step", "raised in step"),
        ("sys_exit", "raised in step"),
        ("nan_obs", "nan"),
        ("nan_reward", "nan"),
        ("bad_shape", "shape"),
    ],
)
def test_a_broken_environment_is_named_with_episode_and_step(tmp_path, topology, fault, words):
    with pytest.raises(EnvError) as caught:
        faulty(tmp_path, fault, topology, actors=2 if fault == "raise_step" else 1)  # one is enough to break
    text = str(caught.value)
    assert words in text.lower()
    assert "Faulty" in text and "episode 1" in text and "step 3" in text


@pytest.mark.parametrize("topology", ["serial", "local"])
def test_an_environment_that_raises_in_reset(tmp_path, topology):
    with pytest.raises(EnvError, match=r"Faulty.*reset"):
        faulty(tmp_path, "raise_reset", topology, actors=1, env_kwargs={"at_episode": 0})


def test_an_environment_that_kills_its_process(tmp_path):
    with pytest.raises(EnvError, match=r"SIGKILL"):
        faulty(tmp_path, "kill", "local", actors=1)


def test_an_environment_that_hangs_is_noticed_and_its_stack_told(tmp_path):
    with pytest.raises(EnvError, match=r"hung") as caught:
        faulty(tmp_path, "hang", "local", actors=1, supervisor={"step_deadline": HANGS, "restarts": 0})
    assert "scripted.py" in str(caught.value) or "scripted.py" in (tmp_path / "run/logs/actor-0.log").read_text()


@pytest.mark.parametrize("fault", [
    "sigkill", "hang", "raise", *(pytest.param(name, marks=pytest.mark.attack) for name in ("sigstop", "exit")),
])  # fmt: skip
def test_a_worker_is_replaced_and_its_steps_are_counted_as_dropped(tmp_path, fault):
    deadline = HANGS if fault in ("hang", "sigstop") else LIVES
    run = rookery.train(
        "ppo", env="CartPole-v1", out=str(tmp_path / "run"), **SMALL, topology="local", actors=2,
        fault_plan=f"actor[1]@env_step=100:{fault}", supervisor={"step_deadline": deadline, "restarts": 3},
    )  # fmt: skip
    summary = json.loads((run.path / "summary.json").read_text())
    ledger = summary["ledger"]
    assert summary["restarts"] >= 1 and summary["exit_reason"] == "env_steps"
    assert sum(ledger["dropped"].values()) > 0
    assert ledger["collected"] == ledger["trained"] + sum(ledger["dropped"].values()) + ledger["in_flight"]


@pytest.mark.parametrize("fault", [pytest.param("sigkill", marks=pytest.mark.attack), "exit"])
def test_a_worker_that_dies_while_it_starts_is_replaced(tmp_path, fault):
    run = rookery.train(
        "ppo", env="CartPole-v1", out=str(tmp_path / "run"), **SMALL, **QUICK, topology="local", actors=2,
        fault_plan=f"actor[1]@start=0:{fault}",
    )  # fmt: skip
    assert run.summary["restarts"] == 1 and run.summary["exit_reason"] == "env_steps"
    assert run.summary["ledger"]["dropped"] == {}


def test_a_replacement_is_given_up_after_the_allowed_number(tmp_path):
    with pytest.raises(EnvError, match="SIGKILL"):
        rookery.train(
            "ppo", env="CartPole-v1", out=str(tmp_path / "run"), **SMALL, **QUICK, topology="local", actors=1,
            fault_plan="actor[0]@unroll=2:sigkill:always",
        )  # fmt: skip


def test_gradients_that_stay_non_finite_end_the_run_and_the_weights_stay_good(tmp_path):
    with pytest.raises(NumericError):
        rookery.train(
            "ppo",
            env="CartPole-v1",
            out=str(tmp_path / "run"),
            **SMALL,
            fault_plan=";".join(["learner@update=1:nan"] * 3),
        )


def test_a_single_non_finite_gradient_is_skipped_and_counted(tmp_path):
    run = rookery.train("ppo", env="CartPole-v1", out=str(tmp_path / "run"), **SMALL, fault_plan="learner@update=1:nan")
    assert run.summary["updates_skipped"] == 1 and run.summary["exit_reason"] == "env_steps"


@pytest.mark.parametrize("fault", ["none", "raise_step"])
def test_shared_memory_goes_with_the_run_and_does_not_wait_for_the_collector(tmp_path, fault):
    before = descriptors()
    gc.disable()
    try:
        with pytest.raises(EnvError) if fault != "none" else contextlib.nullcontext():
            faulty(tmp_path, fault, "local", actors=1)
        assert descriptors(collect=False) == before
    finally:
        gc.enable()


@pytest.mark.parametrize("topology", ["serial", "local"])
def test_failures_far_apart_do_not_add_up(tmp_path, topology):
    """One replacement is allowed in a moment: the next is another moment, and work was done in between."""
    run = faulty(
        tmp_path, "raise_step", topology, actors=1, env_steps=100, env_kwargs={"at_episode": 4},
        supervisor={"restarts": 1, "window": 1e-3},
    )  # fmt: skip
    assert run.summary["restarts"] >= 2 and run.summary["exit_reason"] == "env_steps"
