"""Every recipe on a Ray cluster of three nodes, and the same bits as in one process where nobody runs ahead."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from support_ray import SMALL, cluster_of, ledger_balances

import rookery
from rookery.pipes.ray_store import RayChannel
from rookery.recipes import RECIPES
from rookery.storage import checkpoint

REPLAY = {"min_size": 100, "batch": 16, "capacity": 600, "samples_per_insert": 2.0, "save": False}
PPO = {"algo": {"unroll": 16, "epochs": 1, "minibatches": 2}}
UNROLLS = {"algo": {"unroll": 8}}
DQN = {"algo": {"replay": REPLAY, "target_period": 20}}
AHEAD = REPLAY | {"slack": 64.0}
APEX = {"algo": {"unroll": 5, "replay": AHEAD}}
SEQUENCES = {"sequence": 8, "burn_in": 4, "overlap": 4, "unroll": 6, "target_period": 10}
R2D2 = {"algo": SEQUENCES | {"replay": AHEAD | {"min_size": 10, "batch": 4, "capacity": 50}}}
RANKS = {"algo": {"unroll": 32, "chunk": 16, "epochs": 1, "minibatches": 2}, "ranks": 2, "actors": 1}
SETTINGS: dict[str, dict[str, Any]] = {
    "ppo": PPO, "a2c": UNROLLS, "impala": UNROLLS, "appo": PPO, "impact": UNROLLS,
    "dqn": DQN, "double_dqn": DQN, "prioritized_dueling_dqn": DQN, "c51": DQN, "rainbow": DQN,
    "apex_dqn": APEX, "r2d2": R2D2, "ddpg": DQN, "apex_dpg": APEX, "d4pg": APEX,
    "a3c": UNROLLS, "unreal": UNROLLS, "gorila": DQN, "ddppo": RANKS, "ver": RANKS,
}  # fmt: skip
SPREAD = ("ppo", "appo", "dqn", "gorila")  # that have actors on two nodes here
KINDS = ("appo", "a3c", "gorila", "r2d2", "apex_dpg", "ddppo", "ver")  # of loops, memories, actions and ranks
CONTINUOUS = ("ddpg", "apex_dpg", "d4pg")


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[Any]:
    with cluster_of(3) as cluster:
        yield cluster


@pytest.fixture
def nodes(monkeypatch) -> list[str]:
    """The node of every Ray actor that this process has started."""
    seen: list[str] = []
    placed = RayChannel._placed

    def watched(channel: RayChannel, about: Future) -> None:
        placed(channel, about)
        seen.append(channel.where["id"])

    monkeypatch.setattr(RayChannel, "_placed", watched)
    return seen


def train(folder: Path, recipe: str, **fields: Any) -> rookery.Run:
    env = "Pendulum-v1" if recipe in CONTINUOUS else "CartPole-v1"
    settings = SMALL | {"env": env, "env_steps": 600, "net": {"hidden": (8,)}} | SETTINGS[recipe] | fields
    run = rookery.train(recipe, out=str(folder), **settings)
    assert run.exit_code == 0 and run.summary["exit_reason"] == "env_steps"
    assert run.summary["env_steps"] >= settings["env_steps"] and run.summary["updates"] > 0
    assert ledger_balances(run.summary), run.summary["ledger"]
    return run


def test_there_are_settings_for_every_recipe():
    assert SETTINGS.keys() == RECIPES.keys()


def cases() -> list[Any]:
    """The others are of the same kinds, under `make test-attack`; PPO and DQN have tests of their own below."""
    return [name if name in KINDS else pytest.param(name, marks=pytest.mark.attack) for name in SETTINGS]


@pytest.mark.parametrize("recipe", cases())
def test_every_recipe_trains_with_actors_on_several_nodes(tmp_path, nodes, recipe):
    more = {} if recipe in SPREAD or SETTINGS[recipe] is RANKS else {"actors": 1}  # each loads its libraries: 3 s
    run = train(tmp_path / "run", recipe, **more)
    if SETTINGS[recipe] is RANKS:
        assert len(nodes) == 1, "rank 0 is a process beside this one"
        assert run.summary["ranks"]["size"] == 2
    else:
        assert len(nodes) == len(set(nodes)) == (2 if recipe in SPREAD else 1), nodes
    assert run.summary["restarts"] == 0 and run.summary["ledger"]["trained"] > 0


# The same bits


def weights(run: rookery.Run) -> dict[str, torch.Tensor]:
    return checkpoint.newest(run.path / "checkpoints")[0].tensors


def assert_same(serial: rookery.Run, ray: rookery.Run) -> None:
    one, other = weights(serial), weights(ray)
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), f"{name} differs"
    for name in ("env_steps", "updates", "return_mean", "ledger", "policy_lag"):
        assert serial.summary[name] == ray.summary[name], name
    assert serial.summary["updates"] > 20 and serial.summary["ledger"]["dropped"] == {}


SAME: dict[str, tuple[str, dict[str, Any]]] = {
    "ppo-wide": ("ppo", {"net": {"hidden": (200, 200)}}),  # weights that travel by the object store
    "ppo-lstm": ("ppo", {"net": {"core": "lstm", "core_size": 16, "normalize_obs": True}}),
    "dqn": ("dqn", {}),
}


@pytest.mark.parametrize("case", SAME)
def test_serial_and_ray_end_with_the_same_bits(tmp_path, nodes, case):
    recipe, fields = SAME[case]
    if recipe == "ppo":
        fields = fields | {"algo": {"unroll": 16, "epochs": 2, "minibatches": 2, "chunk": 8}}
    runs = [
        train(tmp_path / topology, recipe, topology=topology, env_steps=1500, **fields)
        for topology in ("serial", "ray_cluster")
    ]
    assert_same(*runs)
    assert len(set(nodes)) == 2


def test_a_run_that_goes_on_from_a_checkpoint_equals_one_that_was_never_interrupted(tmp_path):
    """States of environments travel to the actors and back; those of this task can be restored."""
    constant = {"unroll": 16, "epochs": 1, "minibatches": 2, "lr": 1e-3, "lr_end": 1e-3}
    fields = {"env": "rookery/TMaze-v0", "algo": constant | {"chunk": 8}, "net": {"core": "gru", "core_size": 8}}
    whole = train(tmp_path / "whole", "ppo", env_steps=1200, **fields)
    half = train(tmp_path / "half", "ppo", env_steps=600, **fields)
    assert half.summary["env_steps"] < whole.summary["env_steps"]
    assert_same(whole, rookery.resume(half.path, env_steps=1200))
