"""Evaluation while a run trains: what it gives, that training does not notice it, and that it never ends a run."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch

import rookery
from rookery.core.errors import EnvError, UsageError
from rookery.metrics.sink import read_records
from rookery.play.evaluate import evaluate_as_set
from rookery.run.evaluation import copied
from rookery.run.evaluators import POLICIES, Beside, BestWeights, Weights
from rookery.storage import checkpoint

ALGO = {"unroll": 16, "epochs": 2, "minibatches": 2}
EVERY = {"every": 100, "episodes": 4, "envs": 2}
REPLAY = {"min_size": 40, "batch": 8, "capacity": 500, "samples_per_insert": 1.0}
FIELDS = {"envs_per_actor": 2, "env_steps": 400, "quiet": True, "net": {"hidden": (8,)}, "topology": "serial"}
TRUST = ("support_evaluation",)
DEADLINE = 120.0  # seconds; never reached unless something is broken


def train(out, recipe="ppo", env="CartPole-v1", **fields):
    algo = {"unroll": 4, "replay": REPLAY} if recipe == "dqn" else ALGO
    return rookery.train(recipe, env=env, out=str(out), **(FIELDS | {"algo": algo} | fields))


def records(run, kind="eval"):
    return [each for each in read_records(run.path / "metrics.jsonl") if each["kind"] == kind]


def short(limit=5):
    return gymnasium.make("CartPole-v1", max_episode_steps=limit)


class Noisy(gymnasium.ObservationWrapper):
    """Draws from the random streams of the process, as no environment should."""

    def observation(self, obs):
        return obs + np.float32(1e-3) * np.float32(np.random.random() + torch.rand(()).item())


@pytest.mark.parametrize("recipe", ["ppo", "dqn"])
def test_training_computes_the_same_bits_with_and_without(tmp_path, recipe):
    found = []
    for name, setting in (("without", {}), ("with", EVERY | {"epsilon": 0.3})):
        np.random.seed(1)
        run = train(tmp_path / name, recipe, lambda: Noisy(gymnasium.make("CartPole-v1")), eval=setting)
        saved, _ = checkpoint.newest(run.path / "checkpoints")
        found.append(saved.tensors)
        assert ("evaluation" in run.summary) == bool(setting)
    assert len(records(run)) >= 4
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_a_record_and_the_best_weights_are_those_of_the_steps_they_name(tmp_path):
    told = []

    class Told(rookery.Callback):
        def on_evaluation(self, run, evaluation):
            told.append((evaluation.env_steps, evaluation.return_mean, len(evaluation.returns)))
            assert evaluation.env_steps == run.env_steps  # in one process, the newest weights

    run = train(tmp_path / "run", eval=EVERY, callbacks=[Told()])
    found = records(run)
    steps = [each["env_steps"] for each in found]
    assert [each // 100 for each in steps[:-1]] == [1, 2, 3] and steps[-1] == run.summary["env_steps"]
    assert [(each["env_steps"], each["return_mean"], 4) for each in found] == told
    assert all(np.mean(each["returns"]) == each["return_mean"] and each["episodes"] == 4 for each in found)
    best = max(found, key=lambda each: (each["return_mean"], each["env_steps"]))
    summary = run.summary["evaluation"]
    assert (summary["done"], summary["failed"], summary["skipped"]) == (4, 0, 0)
    assert summary["best"]["env_steps"] == best["env_steps"] and summary["last"]["env_steps"] == steps[-1]
    policy = rookery.load(run.path, which="best")
    assert policy.env_steps == best["env_steps"] and policy.path.parent == run.path / "eval" / "best"
    again = evaluate_as_set(policy, run.config)
    assert again.returns == best["returns"] and rookery.load(policy.path).env_steps == policy.env_steps
    assert run.summary["time_split"]["evaluate"] > 0
    assert not (run.path / POLICIES).exists() and len(checkpoint.all_steps(run.path / "eval" / "best")) == 1


def test_a_run_without_evaluations_has_the_best_of_its_checkpoints(tmp_path):
    run = train(tmp_path / "run", env=short, env_steps=1500, checkpoint={"every": 400})
    assert not (run.path / "eval").exists() and "evaluation" not in run.summary
    assert rookery.load(run.path, which="best", trust=("test_evaluation",)).path.parent == run.path / "checkpoints"


def test_an_evaluation_that_reaches_the_target_ends_the_run(tmp_path):
    """The window of 100 episodes is not full by then; every episode has five steps."""
    run = train(tmp_path / "run", env=short, env_steps=5000, target_return=5.0, eval=EVERY | {"stop": True})
    first = records(run)[0]
    assert run.summary["exit_reason"] == "target_return" and len(records(run)) == 1
    assert run.summary["env_steps"] == run.summary["env_steps_to_target"] == first["env_steps"] < 200
    assert 0 < run.summary["wall_s_to_target"] <= first["wall_s"]


def test_with_stop_the_returns_in_training_do_not_count(tmp_path):
    """They would end the run; here the only evaluation is that of the final weights, which is told too."""
    fields = {"env": short, "env_steps": 1500, "target_return": 5.0}
    alone = train(tmp_path / "a", **fields).summary
    run = train(tmp_path / "b", **fields, eval=EVERY | {"stop": True, "every": 2000}).summary
    assert alone["exit_reason"] == run["exit_reason"] == "target_return"
    assert alone["env_steps"] < 1500 <= run["env_steps"] == run["env_steps_to_target"]


def test_a_target_that_returns_in_training_have_reached_is_not_reached_by_an_evaluation(tmp_path):
    """The run ended with it; resumed with eval.stop, it has another target."""
    run = train(tmp_path / "run", env=short, env_steps=1500, target_return=5.0)
    again = {"eval": EVERY | {"stop": True, "every": 2000}, "env": short}
    assert run.summary["env_steps"] < 1500 <= rookery.resume(run, **again).summary["env_steps"]
    assert rookery.resume(run, env=short, env_steps=3000).summary["env_steps"] < 3000, "from its last checkpoint on"


def test_ranks_stop_together_at_the_target_of_an_evaluation(tmp_path):
    """Rank 0 evaluates, in a process, and its weights are those of the other at every checkpoint."""
    fields = {"topology": "allreduce", "ranks": 2, "env": "support_evaluation:make", "env_steps": 200_000}
    run = train(tmp_path / "run", **fields, target_return=5.0, eval=EVERY | {"stop": True, "every": 1000})
    assert run.exit_code == 0 and run.summary["exit_reason"] == "target_return"
    steps = [each["env_steps"] for each in records(run)]
    assert run.summary["env_steps_to_target"] == steps[0] <= run.summary["env_steps"] < 200_000


def test_what_is_evaluated_is_a_copy():
    nets = torch.nn.Linear(2, 3)
    tensors = copied(nets)
    before = nets.weight.detach().clone()
    with torch.no_grad():
        nets.weight.add_(1.0)
    assert torch.equal(tensors["nets/weight"], before) and set(tensors) == {"nets/weight", "nets/bias"}


def test_in_processes_the_same_weights_have_the_same_score(tmp_path):
    """Training is synchronous, so it is the same in both; how many evaluations there are depends on the machine."""
    serial = train(tmp_path / "serial", eval=EVERY, actors=1)
    local = train(tmp_path / "local", eval=EVERY, actors=1, topology="local")
    expected = {each["env_steps"]: each["returns"] for each in records(serial)}
    found = {each["env_steps"]: each["returns"] for each in records(local)}
    assert found.items() <= expected.items() and max(found) == max(expected)
    assert rookery.load(local.path, which="best").path.parent == local.path / "eval" / "best"
    assert local.summary["time_split"]["evaluate"] == 0 and not (local.path / POLICIES).exists()


def test_a_process_that_dies_is_counted_and_replaced(tmp_path):
    kwargs = {"what": "die_once", "mark": str(tmp_path / "mark")}
    run = train(tmp_path / "run", env="support_evaluation:make", env_kwargs=kwargs, env_steps=200)
    weights = Weights(200, 1, 0.5, copied(rookery.load(run.path, trust=TRUST).nets))
    config = replace(run.config, eval=replace(run.config.eval, episodes=2))
    beside = Beside(config, run.path, BestWeights(run.path))
    beside.begin(weights)
    beside.wait(DEADLINE)
    (died,) = beside.outcomes
    assert died.evaluation is None and "was killed by SIGKILL" in died.why
    beside.begin(weights)
    beside.wait(DEADLINE)
    found = beside.outcomes[1]
    assert found.evaluation is not None and found.evaluation.returns == [5.0, 5.0] and found.why == ""
    assert found.evaluation.env_steps == 200
    beside.close()
    assert rookery.load(run.path, which="best", trust=TRUST).env_steps == 200 and not (run.path / POLICIES).exists()


def test_the_newest_weights_follow_those_that_are_evaluated(tmp_path):
    run = train(tmp_path / "run", env="support_evaluation:make", env_steps=200)
    beside = Beside(run.config, run.path, BestWeights(run.path))
    tensors, skipped = copied(rookery.load(run.path, trust=TRUST).nets), 0
    for steps in range(100, 160, 10):
        skipped += beside.begin(Weights(steps, 1, 0.5, tensors))
    beside.wait(DEADLINE)
    steps = [each.weights.env_steps for each in beside.outcomes]
    assert steps[-1] == 150 and len(steps) + skipped == 6 and skipped >= 3
    beside.close()


def test_environments_that_fail_in_evaluation_only_do_not_end_the_run(tmp_path):
    """In a process, and in serial, where the environments of evaluations are told by being made late."""
    made = []

    def late():
        made.append(None)
        env = short()
        if len(made) > 3:  # one to look at, two to train in
            env.step = lambda action: 1 / 0
        return env

    serial = train(tmp_path / "serial", env=late, eval=EVERY)
    kwargs = {"what": "raise"}
    fields = {"env": "support_evaluation:make", "env_kwargs": kwargs, "topology": "local", "actors": 1}
    local = train(tmp_path / "local", eval=EVERY, **fields)
    for run, error in ((serial, "ZeroDivisionError"), (local, "ArithmeticError: in evaluation only")):
        summary = run.summary["evaluation"]
        assert run.exit_code == 0 and run.summary["env_steps"] >= 400
        assert summary["failed"] + summary["skipped"] == 4 and summary["done"] == 0 and summary["last"] is None
        said = [each["text"] for each in records(run, "message") if "the evaluation at" in each["text"]]
        assert len(said) == summary["failed"] >= 1 and error in said[0] and ".py" in said[0]
        assert run.summary["restarts"] == 0 and records(run) == []


@pytest.mark.parametrize("what", ["reward", "observation"])
def test_numbers_that_are_not_finite_are_no_evaluation(tmp_path, what):
    """They would be the best return for ever, since nothing is greater than NaN."""

    class Diverges(gymnasium.Wrapper):
        def step(self, action):
            obs, reward, *rest = self.env.step(action)
            return (obs * np.float32("nan"), reward, *rest) if what == "observation" else (obs, float("nan"), *rest)

    run = train(tmp_path / "run", env=short, env_steps=32)
    with pytest.raises(EnvError, match=rf"lane 0.* returned an? {what} of nan"):
        rookery.evaluate(run, env=lambda: Diverges(short()), episodes=2)


def test_an_evaluation_without_an_end_is_given_up(tmp_path):
    class Endless(gymnasium.ObservationWrapper):
        def observation(self, obs):
            return obs

        def step(self, action):
            self.env.reset()
            return self.env.step(action)

    run = train(tmp_path / "run", env=lambda: Endless(short(1000)), env_steps=200, eval=EVERY | {"minutes": 0.001})
    assert run.exit_code == 0 and run.summary["evaluation"]["failed"] == 2
    assert any("took longer than 0.001 minutes" in each["text"] for each in records(run, "message"))


def test_a_signal_does_not_wait_for_an_evaluation_and_leaves_no_process(tmp_path):
    mark = tmp_path / "mark"
    fields = {"env": "support_evaluation:make", "env_kwargs": {"what": "hang", "mark": str(mark)}, "env_steps": 10**7}

    def interrupt(run):
        if mark.exists() and mark.read_text():
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", eval=EVERY, topology="local", actors=1, callbacks=[interrupt], **fields)
    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.read_text()), 0)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["exit_reason"] == "interrupted" and summary["evaluation"]["failed"] == 0
    assert not (tmp_path / "run" / POLICIES).exists()


def test_a_resumed_run_goes_on_with_its_evaluations(tmp_path):
    run = train(tmp_path / "run", eval=EVERY, checkpoint={"every": 150, "keep": 9})
    before = {each["env_steps"]: each["return_mean"] for each in records(run)}
    resumed = rookery.resume(run.path, env_steps=700)
    found = [(each["env_steps"], each["return_mean"]) for each in records(resumed)]
    steps = [each[0] for each in found]
    assert dict(found[:4]) == before and steps == sorted(set(steps)) and len(steps) == 7
    assert resumed.summary["evaluation"]["done"] == 7
    best = max(found, key=lambda each: (each[1], each[0]))
    assert resumed.summary["evaluation"]["best"]["env_steps"] == best[0]
    assert rookery.load(run.path, which="best").env_steps == best[0]


def test_a_callback_asks_for_an_evaluation(tmp_path):
    told = []

    class Asks(rookery.Callback):
        def on_update(self, run):
            if run.version == 2:
                run.evaluate()

        def on_evaluation(self, run, evaluation):
            told.append((run.version, evaluation.episodes))

    run = train(tmp_path / "run", callbacks=[Asks()], eval={"episodes": 3})
    assert told == [(2, 3)] and len(records(run)) == 1 == run.summary["evaluation"]["done"]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"eval": {"every": 100, "stop": True}}, "give target_return a value"),
        ({"eval": {"stop": True}, "target_return": 5.0}, "eval.every the steps between"),
        ({"eval": {"every": 100, "epsilon": 0.1}, "env": "Pendulum-v1"}, "eval.epsilon is for discrete actions"),
        ({"eval": {"every": -1}}, "eval.every"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_before_anything_is_written(tmp_path, fields, why):
    with pytest.raises(UsageError, match=why):
        train(tmp_path / "run", **fields)
    assert list(tmp_path.iterdir()) == []
