"""Double DQN with prioritised replay (Schaul et al. 2016) and dueling streams (Wang et al. 2016)."""

from __future__ import annotations

import dataclasses

from rookery.recipes import double_dqn, dqn

PRIORITIZED = {
    "algo.replay.sampler": "proportional", "algo.replay.alpha": 0.6, "algo.replay.beta": 0.4,
    "algo.replay.beta_end": 1.0, "algo.double": True, "algo.dueling": True,
}  # fmt: skip
ATARI = double_dqn.ATARI | PRIORITIZED | {
    "net.features": 0, "algo.stream": 512, "algo.shared_bias": False, "algo.trunk_scale": True, "algo.lr": 6.25e-5,
    "algo.max_grad_norm": 10.0,
}  # fmt: skip
SMALL = {"algo.stream": 64, "algo.lr": 1e-3, "algo.replay.samples_per_insert": 16.0}

RECIPE = dataclasses.replace(
    dqn.RECIPE,
    name="prioritized_dueling_dqn",
    about="double DQN with prioritised replay and dueling streams",
    presets=dqn.presets(ATARI, PRIORITIZED | SMALL, "Schaul et al. 2016 and Wang et al. 2016, as in DQN Zoo"),
)
