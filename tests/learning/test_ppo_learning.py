"""PPO learns: fixed seeds, measured by greedy evaluation after a fixed number of environment steps.

The short ones run in `make test`, the long ones under `make test-learning`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import rookery
from rookery.envs.make import make
from rookery.evaluate import evaluate

SEEDS = (1, 2, 3, 4, 5)


def learnt(tmp_path: Path, env: str, env_steps: int, seed: int, **fields) -> float:
    """Mean return of 100 greedy episodes after training."""
    run = rookery.train("ppo", env=env, env_steps=env_steps, seed=seed, out=str(tmp_path / "run"), quiet=True, **fields)
    lanes = make(run.config, 10, training=False)
    result = evaluate(rookery.load(run.path), lanes, episodes=100, seed=7)
    lanes.close()
    print(f"{env} seed {seed} {fields}: {result.return_mean:.2f} ± {result.return_std:.2f}")
    return result.return_mean


def test_cartpole(tmp_path):
    assert learnt(tmp_path, "CartPole-v1", 100_000, seed=1) >= 475


def test_tmaze_needs_memory(tmp_path):
    assert learnt(tmp_path / "gru", "rookery/TMaze-v0", 100_000, seed=1, net={"core": "gru"}) >= 0.95
    without = learnt(tmp_path / "none", "rookery/TMaze-v0", 50_000, seed=1)
    assert 0.3 <= without <= 0.7


@pytest.mark.learning
@pytest.mark.parametrize("seed", SEEDS)
def test_cartpole_every_seed(tmp_path, seed):
    assert learnt(tmp_path, "CartPole-v1", 100_000, seed) >= 475


@pytest.mark.learning
@pytest.mark.parametrize("seed", SEEDS[:3])
def test_acrobot(tmp_path, seed):
    assert learnt(tmp_path, "Acrobot-v1", 300_000, seed) >= -100


@pytest.mark.learning
@pytest.mark.parametrize("seed", SEEDS[:3])
def test_pendulum(tmp_path, seed):
    assert learnt(tmp_path, "Pendulum-v1", 300_000, seed) >= -250


@pytest.mark.learning
@pytest.mark.parametrize("core", ["lstm", "gru"])
@pytest.mark.parametrize("seed", SEEDS[:3])
def test_cartpole_without_velocities_needs_memory(tmp_path, core, seed):
    assert learnt(tmp_path / core, "rookery/CartPoleMasked-v0", 500_000, seed, net={"core": core}) >= 450


@pytest.mark.learning
@pytest.mark.parametrize("seed", SEEDS[:3])
def test_cartpole_without_velocities_is_beyond_a_policy_without_memory(tmp_path, seed):
    assert learnt(tmp_path, "rookery/CartPoleMasked-v0", 500_000, seed) <= 250


@pytest.mark.learning
@pytest.mark.parametrize("core", ["lstm", "gru"])
@pytest.mark.parametrize("seed", SEEDS[:3])
def test_tmaze_every_seed(tmp_path, core, seed):
    assert learnt(tmp_path, "rookery/TMaze-v0", 100_000, seed, net={"core": core}) >= 0.95
