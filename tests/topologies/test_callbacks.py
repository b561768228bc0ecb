"""Callbacks: when they are called, what they may do, and that a run without them is the same run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import gymnasium
import numpy as np
import pytest
import support_callbacks
import torch

import rookery
from rookery.core.errors import LearnerError, UsageError
from rookery.metrics.sink import read_records
from rookery.storage import checkpoint
from rookery.topologies import callbacks

ALGO = {"unroll": 16, "epochs": 2, "minibatches": 2}
PPO = {"envs_per_actor": 2, "env_steps": 400, "quiet": True, "algo": ALGO, "net": {"hidden": (8,)}}
REPLAY = {"min_size": 40, "batch": 8, "capacity": 500, "samples_per_insert": 1.0}
DQN = {"envs_per_actor": 2, "env_steps": 200, "quiet": True, "algo": {"unroll": 4, "replay": REPLAY}}
TIMEOUT = 180


def short(limit=10):
    return gymnasium.make("CartPole-v1", max_episode_steps=limit)


def train(out, recipe="ppo", env=short, **fields):
    return rookery.train(recipe, env=env, out=str(out), **({"ppo": PPO, "dqn": DQN}.get(recipe, PPO) | fields))


class Told(rookery.Callback):
    """Writes down what it is told, in order."""

    def __init__(self, book=None, name="on"):
        self.book, self.name = [] if book is None else book, name

    def say(self, what, run):
        self.book.append((f"{self.name}_{what}", run.env_steps, run.updates, run.episodes))

    def on_start(self, run):
        self.say("start", run)

    def on_episode(self, run, episode):
        assert episode.total == episode.length <= 10
        self.say("episode", run)

    def on_update(self, run):
        self.say("update", run)

    def on_checkpoint(self, run, path):
        assert checkpoint.load(path).env_steps == run.env_steps
        self.say("checkpoint", run)

    def on_end(self, run):
        self.say("end", run)


def kinds(book):
    return [each[0] for each in book]


@pytest.mark.parametrize("topology", ["serial", "local"])
def test_each_is_called_at_its_time(tmp_path, topology):
    told = Told()
    run = train(tmp_path / "run", callbacks=[told], topology=topology, actors=1)
    found, summary = kinds(told.book), run.summary
    assert found[0] == "on_start" and found[-2:] == ["on_checkpoint", "on_end"]
    assert found.count("on_episode") == summary["episodes"]
    assert found.count("on_update") == summary["updates"] / 4  # epochs x minibatches
    assert told.book[0][1:] == (0, 0, 0)
    assert told.book[-1][1:] == (summary["env_steps"], summary["updates"], summary["episodes"])


@pytest.mark.parametrize("recipe", ["dqn", "appo", "ddpg", "a3c"])
def test_every_kind_of_loop_calls_them(tmp_path, recipe):
    told = Told()
    env = (lambda: gymnasium.make("Pendulum-v1", max_episode_steps=10)) if recipe == "ddpg" else short
    if recipe == "ddpg":
        told.on_episode = lambda run, episode: told.say("episode", run)
    fields = {
        "dqn": {},
        "appo": {"algo": {"unroll": 16}, "topology": "serial"},
        "ddpg": DQN | {"topology": "serial"},
        "a3c": {"algo": {"unroll": 5}, "actors": 1, "envs_per_actor": 1, "env_steps": 100},
    }[recipe]
    run = train(tmp_path / "run", recipe, env, callbacks=[told], **fields)
    found = kinds(told.book)
    assert found[0] == "on_start" and found[-1] == "on_end"
    assert found.count("on_update") > 1 and found.count("on_episode") == run.summary["episodes"] > 0


def test_they_are_called_in_the_order_given_and_a_function_is_on_update(tmp_path):
    book = []
    train(tmp_path / "run", callbacks=[Told(book, "a"), lambda run: book.append(("function",)), Told(book, "b")])
    found = kinds(book)
    assert found[:2] == ["a_start", "b_start"] and found[-2:] == ["a_end", "b_end"]
    at = found.index("function")
    assert found[at - 1 : at + 2] == ["a_update", "function", "b_update"]


def weights(run):
    saved, _ = checkpoint.newest(run.path / "checkpoints")
    return saved.tensors


@pytest.mark.parametrize("recipe", ["ppo", "dqn"])
def test_a_run_with_callbacks_computes_what_one_without_does(tmp_path, recipe):
    """Also one that asks for the policy, which makes networks."""
    watched = [Told(), lambda run: run.policy.predict(np.zeros(4, np.float32))]
    one, other = weights(train(tmp_path / "a", recipe)), weights(train(tmp_path / "b", recipe, callbacks=watched))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_without_callbacks_nothing_is_made_or_kept(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(callbacks.Callbacks, "__init__", lambda *_: made.append(1))
    monkeypatch.setattr(callbacks.Training, "__init__", lambda *_: made.append(1))
    train(tmp_path / "run")
    assert made == []


def test_calls_do_not_grow_with_steps(tmp_path):
    """A longer rollout has more steps and as many calls for each update."""

    def calls(unroll):
        told = Told()
        told.on_episode = lambda run, episode: None
        train(tmp_path / str(unroll), callbacks=[told], env_steps=unroll * 10, algo=ALGO | {"unroll": unroll})
        return len(told.book) / kinds(told.book).count("on_update")

    assert calls(64) <= calls(16)


def test_what_they_log_is_in_the_records(tmp_path):
    def log(run):
        run.log({"mine/half": run.version / 2}, tensor=torch.tensor(3.0), array=np.int64(4))

    run = train(tmp_path / "run", callbacks=[log])
    logged = [each for each in read_records(run.path / "metrics.jsonl") if each["kind"] == "log"]
    assert [each["mine/half"] for each in logged] == [n / 2 for n in range(1, len(logged) + 1)]
    assert logged[-1]["tensor"] == 3.0 and logged[-1]["array"] == 4
    assert logged[-1]["env_steps"] <= run.summary["env_steps"] and logged[-1]["updates"] == run.summary["updates"]


def test_what_they_log_is_in_tensorboard(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = train(tmp_path / "run", callbacks=[lambda run: run.log(mine=7.0)])
    events = accumulator.EventAccumulator(str(run.path / "tensorboard")).Reload()
    assert {event.value for event in events.Scalars("log/mine")} == {7.0}


@pytest.mark.parametrize(
    ("act", "kind", "why"),
    [
        (lambda run: run.log(name="text"), TypeError, "name is 'text'"),
        (lambda run: run.log(env_steps=3), ValueError, "a field of every record"),
        (lambda run: run.stop(""), ValueError, "say why"),
        (lambda run: run.change("algo.clip", 0.1), ValueError, "'algo.clip' cannot be changed.*what can be: algo.lr"),
        (lambda run: run.change("algo.lr", -1), ValueError, "finite number, 0 or larger"),
        (lambda run: setattr(run, "env_steps", 0), AttributeError, "env_steps"),
        (lambda run: setattr(run.config, "seed", 0), AttributeError, "seed"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(tmp_path, act, kind, why):
    with pytest.raises(kind, match=why):
        train(tmp_path / "run", callbacks=[act])


def test_stopping_has_a_reason_and_is_no_failure(tmp_path):
    run = train(tmp_path / "run", callbacks=[lambda run: run.version == 3 and run.stop("three are enough")])
    assert run.exit_code == 0 and run.summary["exit_reason"] == "callback"
    assert run.summary["stop_reason"] == "three are enough" and run.summary["env_steps"] < 400
    assert json.loads((run.path / "summary.json").read_text())["stop_reason"] == "three are enough"
    told = Told()
    again = rookery.resume(run.path, env=short, callbacks=[told])
    assert again.summary["exit_reason"] == "env_steps" and "stop_reason" not in again.summary
    assert told.book[0] == ("on_start", run.summary["env_steps"], run.summary["updates"], run.summary["episodes"])


def test_a_checkpoint_is_written_when_asked_for(tmp_path):
    told = Told()
    run = train(tmp_path / "run", callbacks=[lambda run: run.version == 2 and run.checkpoint(), told])
    steps = [each[1] for each in told.book if each[0] == "on_checkpoint"]
    assert len(steps) == 2 and steps[0] < steps[1] == run.summary["env_steps"]
    assert checkpoint.all_steps(run.path / "checkpoints") == steps


@pytest.mark.parametrize(
    ("recipe", "name", "env"),
    [("ppo", "algo.lr", short), ("ddpg", "algo.actor_lr", lambda: gymnasium.make("Pendulum-v1", max_episode_steps=10))],
)
def test_a_step_size_of_zero_leaves_the_weights_alone(tmp_path, recipe, name, env):
    seen = []

    def freeze(run):
        if run.version == 2:
            run.change(name, 0.0)
        if run.version >= 2:
            seen.append(run.policy.nets.state_dict())

    fields = DQN | {"topology": "serial"} if recipe == "ddpg" else {}
    train(tmp_path / "run", recipe, env, callbacks=[freeze], **fields)
    names = [each for each in seen[0] if each.startswith("policy.")]  # a critic of its own, and statistics, go on
    assert names and len(seen) > 3 and all(torch.equal(seen[0][n], seen[-1][n]) for n in names)


def test_an_exception_ends_the_run_after_a_checkpoint(tmp_path):
    def fail(run):
        if run.version == 3:
            raise ZeroDivisionError("of mine")

    with pytest.raises(ZeroDivisionError, match="of mine") as caught:
        train(tmp_path / "run", callbacks=[fail])
    assert caught.traceback[-1].name == "fail"
    assert any("rookery.resume(" in note for note in caught.value.__notes__)
    saved, _ = checkpoint.newest(tmp_path / "run" / "checkpoints")
    assert saved.meta["journal"]["updates"] == 12
    assert rookery.resume(tmp_path / "run", env=short).summary["env_steps"] >= 400


@pytest.mark.parametrize("where", ["on_start", "on_episode", "on_checkpoint", "on_end"])
def test_an_exception_anywhere_reaches_the_caller(tmp_path, where):
    def fail(*_):
        raise ZeroDivisionError(where)

    with pytest.raises(ZeroDivisionError, match=where):
        train(tmp_path / "run", callbacks=[type("Fails", (), {where: staticmethod(fail)})()])
    assert (tmp_path / "run" / "config.json").exists()


def test_an_error_of_rookerys_own_in_a_callback_is_not_that_of_the_run(tmp_path):
    def load(run):
        rookery.load(tmp_path / "nothing")

    with pytest.raises(RuntimeError, match="a callback raised in on_update: CheckpointError") as caught:
        train(tmp_path / "run", callbacks=[load])
    assert caught.value.__cause__ is not None
    assert checkpoint.all_steps(tmp_path / "run" / "checkpoints")


def test_an_interrupt_reaches_the_caller_after_the_checkpoint(tmp_path):
    def interrupt(run):
        if run.version == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt, match=r"the checkpoint is written: rookery.resume\(.*, env=...\)"):
        train(tmp_path / "run", callbacks=[interrupt], env_steps=100_000)
    saved, _ = checkpoint.newest(tmp_path / "run" / "checkpoints")
    assert 0 < saved.env_steps < 100_000
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["exit_reason"] == "interrupted"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (Told(), r"callbacks is a list"),
        ([3], "callback int is not a function"),
        ([type("Mine", (), {"on_udpate": print})()], "callback Mine has on_udpate.*did you mean on_update"),
        ([type("Mine", (), {"on_step": print})()], "callback Mine has on_step, which is not called"),
    ],
)
def test_what_is_no_callback_is_refused_before_anything_is_written(tmp_path, given, why):
    with pytest.raises(UsageError, match=why):
        train(tmp_path / "run", callbacks=given)
    assert list(tmp_path.iterdir()) == []


RANKS = {"topology": "allreduce", "ranks": 2, "actors": 1, "env": "CartPole-v1"}


def test_ranks_stop_together_and_change_their_step_size_together(tmp_path, monkeypatch):
    """Their weights are compared at each checkpoint: a step size of one rank alone would be noticed."""
    monkeypatch.setenv("SUPPORT_CALLBACKS", str(tmp_path / "told"))
    run = train(tmp_path / "run", callbacks=[support_callbacks.Stops], **RANKS, env_steps=5000)
    assert run.exit_code == 0 and run.summary["stop_reason"] == "rank 0 says so" and run.summary["env_steps"] < 5000
    told = (tmp_path / "told").read_text().split()
    assert told[0] == "start" and told[-1] == "end" and told.count("update") >= 3
    assert any("step size of all to 0.001" in each.get("text", "") for each in read_records(run.path / "metrics.jsonl"))


def test_ranks_end_with_the_error_of_a_callback(tmp_path):
    with pytest.raises(LearnerError, match="of mine") as caught:
        train(tmp_path / "run", callbacks=[support_callbacks.fails], **RANKS)
    assert "support_callbacks.py" in "".join(caught.value.__notes__)
    assert checkpoint.all_steps(tmp_path / "run" / "checkpoints")


def test_ranks_need_callbacks_that_can_be_imported(tmp_path):
    with pytest.raises(
        UsageError, match=r"callback Told is a Told.*With several ranks, rank 0 is a process of its own"
    ):
        train(tmp_path / "run", callbacks=[Told()], **RANKS)
    assert list(tmp_path.iterdir()) == []


SCRIPT = """
import rookery

def fail(run):
    if run.version == 2:
        raise ZeroDivisionError("of mine")

if __name__ == "__main__":
    rookery.train("ppo", env="CartPole-v1", topology="local", actors=1, quiet=True, callbacks=[fail], out="run")
"""


def test_a_script_shows_the_traceback_of_its_callback(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, cwd=tmp_path)
    assert done.returncode == 1 and 'raise ZeroDivisionError("of mine")' in done.stderr
    assert checkpoint.all_steps(tmp_path / "run" / "checkpoints")
