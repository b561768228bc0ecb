"""The DPG line learns: fixed seeds, measured by greedy evaluation after a fixed number of environment steps.

The short one runs in `make test`, the long ones under `make test-learning`.
"""

from __future__ import annotations

import pytest
from support_learning import learnt

SEEDS = (1, 2, 3)


def test_pendulum(tmp_path):
    assert learnt(tmp_path, "ddpg", "Pendulum-v1", 12_000, seed=1) >= -200


@pytest.mark.learning
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("recipe", "env_steps"), [("ddpg", 20_000), ("apex_dpg", 20_000), ("d4pg", 30_000)])
def test_pendulum_every_seed(tmp_path, recipe, env_steps, seed):
    assert learnt(tmp_path, recipe, "Pendulum-v1", env_steps, seed) >= -200


@pytest.mark.learning
@pytest.mark.parametrize("seed", SEEDS)
def test_pendulum_with_a_mixture_of_gaussians(tmp_path, seed):
    assert learnt(tmp_path, "d4pg", "Pendulum-v1", 30_000, seed, algo={"critic": "mixture"}) >= -200


@pytest.mark.learning
@pytest.mark.parametrize("seed", SEEDS[:2])
def test_cartpole_swingup(tmp_path, seed):
    assert learnt(tmp_path, "d4pg", "dmc/cartpole-swingup", 300_000, seed) >= 700
