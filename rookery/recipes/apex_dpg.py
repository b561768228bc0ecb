"""Ape-X DPG (Horgan et al. 2018, appendix D): deterministic policy gradients on distributed prioritised replay."""

from __future__ import annotations

import dataclasses

from rookery.recipes import ddpg

APEX = {
    "topology": "local", "actors": 2, "envs_per_actor": 4, "algo.critic": "scalar", "algo.n_step": 3,
    "algo.clip_action_gradient": "element", "algo.actor_lr": 1e-4, "algo.critic_lr": 1e-4, "algo.target_period": 100,
    "algo.noise_scale": 0.3, "algo.max_grad_norm": 40.0, "algo.layer_norm": False, "algo.activation": "tanh",
    "algo.replay.sampler": "proportional", "algo.replay.alpha": 0.6, "algo.replay.beta": 0.4,
    "algo.replay.beta_end": None, "algo.replay.start": "actor", "algo.replay.remover": "inverse",
    "algo.replay.remove_alpha": -0.4, "algo.replay.samples_per_insert": 0.0, "algo.unroll": 16,
}  # fmt: skip
CONTINUOUS = APEX | {"algo.replay.batch": 512, "algo.replay.min_size": 10_000}
PENDULUM = {
    "topology": "local", "actors": 2, "envs_per_actor": 2, "algo.unroll": 8, "algo.activation": "relu",
    "algo.replay.samples_per_insert": 32.0, "algo.replay.slack": 4_000.0,
}  # fmt: skip

RECIPE = dataclasses.replace(
    ddpg.RECIPE,
    name="apex_dpg",
    about="DDPG on distributed prioritised replay; continuous actions, asynchronous actors",
    presets=ddpg.presets(CONTINUOUS, PENDULUM, "Horgan et al. 2018, appendix D; actors for a small machine"),
)
