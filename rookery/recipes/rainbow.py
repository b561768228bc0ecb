"""Rainbow (Hessel et al. 2018): double, dueling, prioritised, 3-step, categorical and noisy, all at once."""

from __future__ import annotations

import dataclasses

from rookery.recipes import c51, dqn

SIX = {
    "algo.double": True, "algo.dueling": True, "algo.n_step": 3, "algo.atoms": 51, "algo.noisy": True,
    "algo.epsilon_start": 0.0, "algo.epsilon_end": 0.0, "algo.replay.sampler": "proportional",
    "algo.replay.alpha": 0.5, "algo.replay.beta": 0.4, "algo.replay.beta_end": 1.0,
}  # fmt: skip
ATARI = SIX | {
    "net.features": 0, "algo.stream": 512, "algo.v_min": -10.0, "algo.v_max": 10.0, "algo.noisy_sigma": 0.5,
    "algo.optimizer": "adam", "algo.lr": 6.25e-5, "algo.optimizer_eps": 1.5e-4, "algo.replay.min_size": 20_000,
    "algo.target_period": 2_000, "algo.max_grad_norm": 10.0,
}  # fmt: skip
SMALL = SIX | {
    "algo.stream": 128, "algo.v_min": -100.0, "algo.v_max": 100.0, "algo.lr": 1e-3,
    "algo.replay.samples_per_insert": 16.0,
}  # fmt: skip

RECIPE = dataclasses.replace(
    dqn.RECIPE,
    name="rainbow",
    about="the six improvements of DQN together",
    presets=dqn.presets(
        ATARI, SMALL, "Hessel et al. 2018; target period and warm-up as in Dopamine and DQN Zoo", **c51.RANGES
    ),
)
