"""DD-PPO and VER learn on two ranks; where memory matters, a policy without it does worse."""

from __future__ import annotations

import pytest
from support_learning import learnt

import rookery

SEEDS = (1, 2, 3)


@pytest.mark.learning
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("recipe", ["ddppo", "ver"])
def test_cartpole_on_two_ranks(tmp_path, recipe, seed):
    assert learnt(tmp_path, recipe, "CartPole-v1", 150_000, seed, ranks=2) >= 475


def success(tmp_path, recipe: str, env_steps: int, **fields) -> float:
    """Of the last 100 training episodes."""
    run = rookery.train(
        recipe, env="rookery/GridNav-v0", env_steps=env_steps, ranks=2, out=str(tmp_path / "run"), quiet=True, **fields
    )
    print(f"{recipe} GridNav {fields}: {run.summary['info']}")
    return run.summary["info"]["success"]


@pytest.mark.learning
@pytest.mark.parametrize("recipe", ["ddppo", "ver"])
def test_gridnav_with_an_lstm(tmp_path, recipe):
    assert success(tmp_path, recipe, 2_000_000, group={"workers": 2 if recipe == "ver" else 0}) >= 0.9


@pytest.mark.learning
def test_gridnav_without_memory(tmp_path):
    assert success(tmp_path, "ddppo", 1_000_000, net={"core": "none", "feed_last": False}) <= 0.75
