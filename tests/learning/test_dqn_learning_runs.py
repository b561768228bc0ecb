"""The DQN line learns: fixed seeds, measured by greedy evaluation after a fixed number of environment steps.

The short ones run in `make test`, the long ones under `make test-learning`.
"""

from __future__ import annotations

import pytest
from support_learning import learnt

SEEDS = (1, 2, 3)


def test_a_short_tmaze_needs_memory(tmp_path):
    short = {"env_kwargs": {"length": 5}}
    assert learnt(tmp_path, "r2d2", "rookery/TMaze-v0", 6_000, seed=1, **short) >= 0.95
    assert learnt(tmp_path, "dqn", "rookery/TMaze-v0", 6_000, seed=1, **short) <= 0.7


@pytest.mark.learning
@pytest.mark.parametrize("seed", SEEDS)
def test_tmaze_needs_memory(tmp_path, seed):
    assert learnt(tmp_path, "r2d2", "rookery/TMaze-v0", 40_000, seed) >= 0.95
    assert learnt(tmp_path, "dqn", "rookery/TMaze-v0", 10_000, seed) <= 0.7


@pytest.mark.learning
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("recipe", "env_steps"),
    [("dqn", 100_000), ("rainbow", 100_000), ("apex_dqn", 200_000), ("gorila", 200_000)],
)
def test_cartpole(tmp_path, recipe, env_steps, seed):
    assert learnt(tmp_path, recipe, "CartPole-v1", env_steps, seed) >= 475


@pytest.mark.learning
@pytest.mark.parametrize("seed", SEEDS)
def test_acrobot(tmp_path, seed):
    assert learnt(tmp_path, "dqn", "Acrobot-v1", 100_000, seed) >= -100


@pytest.mark.learning
@pytest.mark.parametrize("seed", SEEDS)
def test_cartpole_without_velocities_needs_memory(tmp_path, seed):
    with_memory = learnt(tmp_path, "r2d2", "rookery/CartPoleMasked-v0", 150_000, seed)
    without = learnt(tmp_path, "dqn", "rookery/CartPoleMasked-v0", 50_000, seed)
    assert with_memory >= 400
    assert without <= 150
