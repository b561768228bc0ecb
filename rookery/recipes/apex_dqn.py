"""Ape-X DQN (Horgan et al. 2018): many actors, each with its own epsilons, one prioritised memory, one learner.

Actors never wait for the learner, nor it for them. The paper has 360 actors with one environment each; the Atari row
has the learner's numbers and two actors, with a ladder over all their environments. Weights are pulled every 100
steps of an environment, as there: every 800 of an actor with 8 of them.
"""

from __future__ import annotations

import dataclasses

from rookery.recipes import dqn

APEX = {
    "topology": "local", "actors": 2, "algo.double": True, "algo.dueling": True, "algo.n_step": 3, "algo.ladder": True,
    "algo.loss": "square", "algo.max_grad_norm": 40.0, "algo.replay.sampler": "proportional",
    "algo.replay.alpha": 0.6, "algo.replay.beta": 0.4, "algo.replay.beta_end": None, "algo.replay.start": "actor",
    "algo.replay.remover": "soft", "algo.replay.samples_per_insert": 0.0,
}  # fmt: skip
ATARI = APEX | {
    "envs_per_actor": 8, "atari.max_frames": 50_000, "algo.unroll": 50, "algo.refresh": 800, "net.features": 0,
    "algo.stream": 512,
    "algo.optimizer": "rmsprop", "algo.lr": 2.5e-4 / 4, "algo.decay": 0.95, "algo.optimizer_eps": 1.5e-7,
    "algo.target_period": 2_500, "algo.replay.capacity": 2_000_000, "algo.replay.batch": 512,
    "algo.replay.prefetch": 16,
}  # fmt: skip
SMALL = APEX | {
    "envs_per_actor": 4, "algo.unroll": 16, "algo.stream": 64, "algo.replay.batch": 128,
    "algo.replay.samples_per_insert": 16.0, "algo.replay.slack": 4_000.0,
}  # fmt: skip

RECIPE = dataclasses.replace(
    dqn.RECIPE,
    name="apex_dqn",
    about="distributed prioritised replay: asynchronous actors, each with its own epsilons, and one learner",
    presets=dqn.presets(ATARI, SMALL, "Horgan et al. 2018; actors for a small machine"),
)
