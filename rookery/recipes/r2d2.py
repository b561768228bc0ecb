"""R2D2 (Kapturowski et al. 2019): Ape-X with a recurrent net, on sequences with stored states and burn-in.

Values are rescaled to about their square roots, so rewards are not clipped; a lost life does not end an episode.
"""

from __future__ import annotations

import dataclasses

from rookery.recipes import apex_dqn, dqn
from rookery.recipes.recipe import Preset

SEQUENCES = {
    "net.core": "lstm", "algo.rescale": True, "algo.eta": 0.9, "algo.n_step": 5, "algo.gamma": 0.997,
    "algo.replay.alpha": 0.9, "algo.replay.beta": 0.6, "algo.replay.remover": "fifo",
}  # fmt: skip
ATARI = apex_dqn.ATARI | SEQUENCES | {
    "net.features": 512, "net.core_size": 512, "net.feed_last": True, "atari.episodic_life": False,
    "atari.max_frames": 108_000, "atari.reward_clip": False, "algo.unroll": 40, "algo.sequence": 80,
    "algo.burn_in": 40, "algo.overlap": 40, "algo.optimizer": "adam", "algo.lr": 1e-4,
    "algo.optimizer_eps": 1e-3, "algo.replay.capacity": 100_000, "algo.replay.min_size": 5_000,
    "algo.replay.batch": 64, "algo.refresh": 3_200,
}  # fmt: skip
SMALL = apex_dqn.APEX | SEQUENCES | {
    "topology": "serial", "actors": 1, "envs_per_actor": 16, "net.hidden": (64,), "net.activation": "tanh",
    "net.core_size": 64, "algo.unroll": 16, "algo.gamma": 0.99, "algo.n_step": 3, "algo.sequence": 16,
    "algo.burn_in": 8, "algo.overlap": 8, "algo.lr": 5e-4, "algo.optimizer_eps": 1e-5, "algo.stream": 64,
    "algo.target_period": 400, "algo.replay.capacity": 20_000, "algo.replay.min_size": 100, "algo.replay.batch": 64,
    "algo.replay.samples_per_insert": 64.0,
}  # fmt: skip

PIXELS = {"algo.replay.capacity": 2_000, "algo.replay.min_size": 200}

RECIPE = dataclasses.replace(
    dqn.RECIPE,
    name="r2d2",
    about="recurrent replay: sequences, stored states, burn-in; discrete actions, partly seen environments",
    presets=(
        Preset("memory", dqn.MEMORY_TASKS, dqn.SMALL | SMALL, "our own"),
        *dqn.presets(ATARI, SMALL, "Kapturowski et al. 2019; actors for a small machine", pixels=PIXELS),
    ),
)
