"""UNREAL in every topology that it has, and the auxiliary tasks and auto-encoder of other recipes in whole runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rookery
from rookery.algorithms.registry import build_algorithm
from rookery.core.errors import UsageError
from rookery.envs.make import make
from rookery.metrics.sink import read_records
from rookery.recipes import recipe as recipe_named
from rookery.roles.gradients import GradientMaker
from rookery.storage import checkpoint

SMALL: dict[str, Any] = {
    "quiet": True, "threads": 1, "preset": "pixels", "actors": 2, "envs_per_actor": 2, "supervisor": {"spare": False},
    "net": {"features": 8, "core_size": 8},
}  # fmt: skip
TASKS = {"pixel_control": 1.0, "reward_prediction": 1.0, "value_replay": 1.0}
LOSSES = {f"{name}_loss" for name in TASKS}


def train(tmp_path: Path, name: str, recipe: str, **fields: Any) -> rookery.Run:
    fields = SMALL | {"env": "rookery/Catch-v0"} | fields
    run = rookery.train(recipe, out=str(tmp_path / name), **fields)
    ledger = run.summary["ledger"]
    lost = sum(ledger["dropped"].values()) + ledger["evicted"] + ledger["in_flight"]
    assert run.exit_code == 0 and ledger["collected"] == run.summary["env_steps"] == ledger["trained"] + lost
    return run


def losses(run: rookery.Run) -> dict[str, float]:
    """The last that were told."""
    return [record["losses"] for record in read_records(run.path / "metrics.jsonl") if record.get("losses")][-1]


def assert_same(one: rookery.Run, other: rookery.Run) -> None:
    a, b = (checkpoint.newest(run.path / "checkpoints")[0].tensors for run in (one, other))
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert torch.equal(tensor, b[name]), f"{name} differs"


# UNREAL


def test_unreal_has_an_lstm_and_three_tasks_and_without_images_two():
    expected = {
        "rookery/Catch-v0": "pixels",
        "ALE/Pong-v5": "atari",
        "CartPole-v1": "vector",
        "Pendulum-v1": "continuous",
    }
    for env, preset in expected.items():
        config = recipe_named("unreal").build(env, _never, preset)
        aux = config.algo.aux
        assert config.net.core == "lstm" and config.topology == "async_grads" and config.algo.unroll == 20
        assert (aux.pixel_control > 0) is (preset in ("atari", "pixels"))
        assert aux.reward_prediction == aux.value_replay == 1.0 and aux.replayed > 0
        assert not config.algo.scale_reward and not config.net.normalize_obs, "an applier sees no data"


def _never() -> Any:
    raise AssertionError("the preset is named")


def test_one_worker_that_sends_gradients_has_the_bits_of_serial(tmp_path):
    fields = {"actors": 1, "env_steps": 500, "seed": 3}
    serial = train(tmp_path, "serial", "unreal", topology="serial", **fields)
    worker = train(tmp_path, "worker", "unreal", topology="async_grads", **fields)
    assert serial.summary["updates"] == worker.summary["updates"] > 5
    assert_same(serial, worker)
    assert losses(serial).keys() >= LOSSES


@pytest.mark.parametrize("topology", ["local", "async_grads"])
def test_unreal_trains_with_two_workers(tmp_path, topology):
    run = train(tmp_path, topology, "unreal", topology=topology, env_steps=600)
    assert run.summary["updates"] >= 5 and run.summary["ledger"]["trained"] > 400
    told = losses(run)
    assert told.keys() >= LOSSES and all(math.isfinite(x) for x in told.values())


def test_unreal_trains_without_images(tmp_path):
    run = train(tmp_path, "vector", "unreal", env="CartPole-v1", preset="vector", topology="serial", env_steps=400)
    told = losses(run)
    assert told.keys() & LOSSES == LOSSES - {"pixel_control_loss"}
    assert all(math.isfinite(x) for x in told.values())


def test_pixel_control_without_images_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(UsageError, match=r"no image.*algo\.aux\.pixel_control 0"):
        train(
            tmp_path, "bad", "unreal", env="CartPole-v1", preset="vector", topology="serial", env_steps=400,
            algo={"aux": {"pixel_control": 1.0}},
        )  # fmt: skip
    assert not (tmp_path / "bad").exists()
    with pytest.raises(UsageError, match=r"algo\.autoencoder\.latent.*1 or more"):
        train(tmp_path, "bad", "appo", topology="serial", algo={"autoencoder": {"on": True, "latent": 0}})


def test_the_ring_of_a_worker_is_its_own():
    """Each keeps so many unrolls of its own environments, and replays nothing else."""
    fields = SMALL | {"algo": {"aux": {"ring": 3}}}
    config = recipe_named("unreal").build("rookery/Catch-v0", _never, **fields)
    made = []
    for index in range(2):
        lanes = make(config, config.envs_per_actor)
        maker = GradientMaker(config, build_algorithm(config, lanes.spec), lanes, index, print)
        maker.producer.begin(0, "0.0")
        made.append(maker)
    drawn: list[list[torch.Tensor]] = [[], []]
    for index, maker in enumerate(made):
        learner = maker.learner
        gradients, arrays = learner.first_gradients, {"gradient": np.zeros(maker.weights.gradients, np.float32)}

        def watched(batch, progress, drawn=drawn[index], gradients=gradients):
            drawn.append(batch.lane[torch.zeros(2, dtype=torch.bool) if batch.replayed is None else batch.replayed])
            return gradients(batch, progress)

        learner.first_gradients = watched
        for _ in range(6):
            report = maker.fill(arrays, 0.0)
            assert report.gradient and np.isfinite(arrays["gradient"]).all() and arrays["gradient"].any()
        assert len(maker.table._ring) == 3
    assert [len(lanes) for lanes in drawn[0]] == [0, 2, 2, 2, 2, 2]
    assert {int(x) for lanes in drawn[0] for x in lanes} == {0, 1}
    assert {int(x) for lanes in drawn[1] for x in lanes} == {2, 3}


# Other recipes


@pytest.mark.parametrize("recipe", ["ppo", "impala", "appo"])
def test_other_recipes_learn_the_tasks_beside_a_policy_with_an_auto_encoder(tmp_path, recipe):
    algo = {"unroll": 8, "aux": TASKS, "autoencoder": {"on": True, "latent": 8}}
    algo |= {} if recipe == "impala" else {"epochs": 2, "minibatches": 2}
    run = train(tmp_path, recipe, recipe, topology="serial", env_steps=250, algo=algo)
    told = losses(run)
    assert told.keys() >= LOSSES | {"reconstruction_loss"} and all(math.isfinite(x) for x in told.values())


def test_with_an_auto_encoder_serial_and_local_have_the_same_bits(tmp_path):
    """Actors get no decoder: what they get must be enough."""
    algo = {"unroll": 8, "epochs": 2, "minibatches": 2, "autoencoder": {"on": True, "latent": 8, "freeze": 0.5}}
    runs = [
        train(tmp_path, topology, "ppo", topology=topology, env_steps=300, algo=algo)
        for topology in ("serial", "local")
    ]
    assert_same(*runs)


def test_an_encoder_that_is_frozen_stays_so_in_a_resumed_run(tmp_path):
    algo = {"unroll": 8, "epochs": 2, "minibatches": 2, "autoencoder": {"on": True, "latent": 8, "freeze": 0.5}}
    run = train(tmp_path, "run", "ppo", topology="serial", env_steps=300, algo=algo)
    before, _ = checkpoint.newest(run.path / "checkpoints")
    rookery.resume(run.path, env_steps=450)
    after, _ = checkpoint.newest(run.path / "checkpoints")
    same = {
        name for name, x in before.tensors.items() if name.startswith("nets/") and torch.equal(x, after.tensors[name])
    }
    assert {name for name in before.tensors if name.startswith(("nets/body.torso", "nets/body.latent"))} <= same
    assert not any(name.startswith(("nets/policy", "nets/value")) for name in same)


def test_a_ring_without_room_names_the_field_of_the_tasks(tmp_path):
    with pytest.raises(UsageError, match=r"need a ring of 2 unrolls.*algo\.aux\.ring 2"):
        rookery.train(
            "unreal", env="rookery/Catch-v0", env_steps=200, topology="serial", actors=1, envs_per_actor=1, quiet=True,
            out=str(tmp_path / "run"), algo={"aux": {"replayed": 2.0, "ring": 1}},
        )  # fmt: skip
