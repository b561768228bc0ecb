"""A run from outside: what a mistake may cost, and what may not be asked for."""

from __future__ import annotations

import pytest
import support_flaky

import rookery
from rookery import checkpoint
from rookery.errors import EnvError, UsageError
from rookery.topologies.job import Job

PPO = {"quiet": True, "topology": "serial", "actors": 2, "envs_per_actor": 1}
PPO |= {"algo": {"unroll": 8, "epochs": 1, "minibatches": 1}}
REPLAY = {"min_size": 50, "batch": 8, "capacity": 500, "samples_per_insert": 1.0}
DQN = {"quiet": True, "topology": "serial", "actors": 1, "envs_per_actor": 2, "env_steps": 200}
DQN |= {"algo": {"unroll": 4, "replay": REPLAY}}
FLAKY = {"preset": "vector", "env_steps": 400, "checkpoint": {"every": 50}, "supervisor": {"restarts": 2}}


@pytest.fixture(autouse=True)
def nothing_fails_yet():
    support_flaky.plan.clear()
    support_flaky.closed.clear()


def flaky(out, **fields) -> rookery.Run:
    return rookery.train("ppo", env="support_flaky:make", out=str(out), **(PPO | FLAKY | fields))


def test_a_refused_run_leaves_no_folder(tmp_path):
    with pytest.raises(UsageError, match="discrete actions"):
        rookery.train("dqn", env="Pendulum-v1", preset="vector", out=str(tmp_path / "run"), **DQN)
    assert list(tmp_path.iterdir()) == []


def test_a_refused_run_takes_nothing_away_that_was_there_before(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.tex").write_text("years of work")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="discrete actions"):
        rookery.train("dqn", env="Pendulum-v1", preset="vector", out=str(tmp_path), **DQN)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["empty", "notes", "thesis.tex"]


def test_environments_that_cannot_be_made_again_cost_no_checkpoint(tmp_path):
    support_flaky.plan |= {"step": 150, "make": 3}  # two are made at the start
    with pytest.raises(EnvError, match=r"could be made before cannot any more.*a library has gone"):
        flaky(tmp_path / "run")
    saved, _ = checkpoint.newest(tmp_path / "run" / "checkpoints")
    assert saved.env_steps >= 100
    assert len(support_flaky.closed) >= 2


@pytest.mark.parametrize("when", [1, 20])
def test_a_reset_that_fails_once_is_tried_on_new_environments(tmp_path, when):
    support_flaky.plan["reset"] = when
    run = flaky(tmp_path / "run")
    assert run.summary["restarts"] == 1 and run.summary["env_steps"] >= 400


def test_a_replacement_that_fails_too_is_replaced(tmp_path):
    support_flaky.plan |= {"step": 30, "reset": 8}
    run = flaky(tmp_path / "run")
    assert run.summary["restarts"] >= 1 and run.summary["exit_reason"] == "env_steps"


def test_what_was_made_is_closed_if_the_rest_cannot_be(tmp_path):
    support_flaky.plan["make"] = 2
    with pytest.raises(UsageError, match="a library has gone"):
        flaky(tmp_path / "run")
    assert len(support_flaky.closed) == 1


@pytest.mark.parametrize(
    "fields, why",
    [
        ({"algo": {"replay": REPLAY | {"capacity": 10**12}}}, "needs .* GiB"),
        ({"actors": 2}, r"the run has actors 1.*cannot be resumed with 2"),
        ({"envs_per_actor": 3}, r"the run has envs_per_actor 2.*cannot be resumed with 3"),
        ({"net": {"hidden": (7,)}}, "other networks .* than these settings ask for"),
    ],
)
def test_a_resume_that_is_refused_spoils_nothing(tmp_path, fields, why):
    run = rookery.train("dqn", env="CartPole-v1", out=str(tmp_path / "run"), **DQN)
    before = (run.path / "config.json").read_bytes()
    with pytest.raises(rookery.errors.RookeryError, match=why):
        rookery.resume(run.path, env_steps=300, **fields)
    assert (run.path / "config.json").read_bytes() == before
    assert rookery.resume(run.path, env_steps=300).summary["env_steps"] >= 300


@pytest.mark.parametrize("group, name", [("checkpoint", "every"), ("checkpoint", "keep")])
def test_numbers_of_nothing_are_refused(tmp_path, group, name):
    with pytest.raises(UsageError, match=f"{group}.{name} is 0; at least 1"):
        rookery.train("ppo", env="CartPole-v1", out=str(tmp_path / "run"), **(PPO | {group: {name: 0}}))


@pytest.mark.parametrize("name", ["batch", "prefetch", "loaders", "remove_every"])
def test_numbers_of_nothing_are_refused_for_a_memory(tmp_path, name):
    with pytest.raises(UsageError, match=f"algo.replay.{name} is 0; at least 1"):
        rookery.train("dqn", env="CartPole-v1", out=str(tmp_path / "run"), **(DQN | {"algo": {"replay": {name: 0}}}))


@pytest.mark.parametrize("topology", ["serial", "local"])
def test_a_run_goes_on_whose_last_unrolls_were_not_delivered_by_all(tmp_path, monkeypatch, topology):
    """A signal may come while one actor hangs: the others have delivered, and that one has not."""
    write = Job._write

    def without_one(job, snapshots):
        job.sequences[1] -= 1
        write(job, [None, None])

    with monkeypatch.context() as patch:
        patch.setattr(Job, "_write", without_one)
        run = rookery.train("ppo", env="CartPole-v1", out=str(tmp_path / "run"), **PPO, env_steps=100)
    resumed = rookery.resume(run.path, env_steps=200, topology=topology)
    assert resumed.summary["updates"] > run.summary["updates"] and resumed.summary["env_steps"] >= 200


def test_a_signal_ends_a_burst_of_updates(tmp_path):
    replay = REPLAY | {"samples_per_insert": 10_000.0}
    fields = DQN | {"algo": {"unroll": 4, "replay": replay}, "fault_plan": "learner@update=5:sigterm"}
    run = rookery.train("dqn", env="CartPole-v1", out=str(tmp_path / "run"), **fields)
    assert run.exit_code == 75 and run.summary["updates"] <= 6, "hundreds of thousands are due"
