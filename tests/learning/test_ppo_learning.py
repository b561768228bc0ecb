"""PPO learns: fixed seeds, measured by greedy evaluation after a fixed number of environment steps.

The short ones run in `make test`, the long ones under `make test-learning`.
"""

from __future__ import annotations

import pytest
from support_learning import learnt

SEEDS = (1, 2, 3, 4, 5)


def test_cartpole(tmp_path):
    assert learnt(tmp_path, "ppo", "CartPole-v1", 100_000, seed=1) >= 475


def test_tmaze_needs_memory(tmp_path):
    assert learnt(tmp_path / "gru", "ppo", "rookery/TMaze-v0", 100_000, seed=1, net={"core": "gru"}) >= 0.95
    without = learnt(tmp_path / "none", "ppo", "rookery/TMaze-v0", 50_000, seed=1)
    assert 0.3 <= without <= 0.7


@pytest.mark.learning
@pytest.mark.parametrize("seed", SEEDS)
def test_cartpole_every_seed(tmp_path, seed):
    assert learnt(tmp_path, "ppo", "CartPole-v1", 100_000, seed) >= 475


@pytest.mark.learning
@pytest.mark.parametrize("seed", SEEDS[:3])
def test_acrobot(tmp_path, seed):
    assert learnt(tmp_path, "ppo", "Acrobot-v1", 300_000, seed) >= -100


@pytest.mark.learning
@pytest.mark.parametrize("seed", SEEDS)
def test_pendulum(tmp_path, seed):
    assert learnt(tmp_path, "ppo", "Pendulum-v1", 300_000, seed) >= -250


@pytest.mark.learning
@pytest.mark.parametrize("core", ["lstm", "gru"])
@pytest.mark.parametrize("seed", SEEDS[:3])
def test_cartpole_without_velocities_needs_memory(tmp_path, core, seed):
    assert learnt(tmp_path / core, "ppo", "rookery/CartPoleMasked-v0", 500_000, seed, net={"core": core}) >= 450


@pytest.mark.learning
@pytest.mark.parametrize("seed", SEEDS[:3])
def test_cartpole_without_velocities_is_beyond_a_policy_without_memory(tmp_path, seed):
    assert learnt(tmp_path, "ppo", "rookery/CartPoleMasked-v0", 500_000, seed) <= 250


@pytest.mark.learning
@pytest.mark.parametrize("core", ["lstm", "gru"])
@pytest.mark.parametrize("seed", SEEDS[:3])
def test_tmaze_every_seed(tmp_path, core, seed):
    assert learnt(tmp_path, "ppo", "rookery/TMaze-v0", 100_000, seed, net={"core": core}) >= 0.95
