"""C51 (Bellemare et al. 2017): a categorical distribution of returns on 51 atoms instead of their mean."""

from __future__ import annotations

import dataclasses

from rookery.recipes import dqn

ATARI = {
    "algo.atoms": 51, "algo.v_min": -10.0, "algo.v_max": 10.0, "algo.optimizer": "adam", "algo.lr": 2.5e-4,
    "algo.optimizer_eps": 0.01 / 32, "algo.target_period": 2_500, "algo.epsilon_end": 0.01, "algo.max_grad_norm": 10.0,
}  # fmt: skip
SMALL = {"algo.double": False, "algo.atoms": 51, "algo.v_min": -100.0, "algo.v_max": 100.0}
# What a return can be, where it is known: discounted at 0.99, one a step; minus one a step.
RANGES = {
    "cartpole": {"algo.v_min": 0.0, "algo.v_max": 120.0},
    "acrobot": {"algo.v_min": -100.0, "algo.v_max": 0.0},
}

RECIPE = dataclasses.replace(
    dqn.RECIPE,
    name="c51",
    about="DQN that learns the distribution of returns on 51 atoms",
    presets=dqn.presets(ATARI, SMALL, "Bellemare et al. 2017, as in DQN Zoo", **RANGES),
)
