"""DDPG (Lillicrap et al. 2015), and the rows that the other members of its family start from.

The generic row has the paper's numbers with changes that its successors agree on: targets follow at 0.005 where the
paper has 0.001, the noise is independent from step to step (`--algo.noise ou` has the paper's), the critic's weights
are not penalised, and the memory begins with random actions. docs/recipes-ddpg.md lists all deviations.
"""

from __future__ import annotations

from typing import Any

from rookery.algorithms.dpg import DPGConfig
from rookery.recipes.recipe import Preset, Recipe

GENERIC: dict[str, Any] = {
    "envs_per_actor": 1, "algo.unroll": 8, "algo.replay.capacity": 1_000_000, "algo.replay.min_size": 1_000,
    "algo.random_start": True,
}  # fmt: skip
DDPG = {
    "algo.critic": "scalar", "algo.n_step": 1, "algo.actor_lr": 1e-4, "algo.critic_lr": 1e-3,
    "algo.clip_action_gradient": "none", "algo.actor_hidden": (400, 300), "algo.critic_hidden": (400, 300),
    "algo.layer_norm": False, "algo.target_period": 0, "algo.tau": 0.005, "algo.noise_scale": 0.2,
    "algo.replay.batch": 64, "algo.replay.samples_per_insert": 64.0,
}  # fmt: skip
PENDULUM: dict[str, Any] = {
    "topology": "serial",
    "envs_per_actor": 4, "algo.unroll": 4, "algo.replay.capacity": 60_000, "algo.replay.min_size": 1_000,
    "algo.replay.batch": 128, "algo.replay.samples_per_insert": 32.0, "algo.actor_hidden": (128, 128),
    "algo.critic_hidden": (128, 128), "algo.actor_lr": 1e-3, "algo.critic_lr": 1e-3, "algo.target_period": 0,
    "algo.tau": 0.02, "algo.v_min": -1_000.0, "algo.v_max": 100.0,
    "algo.action_gradient_bound": 30.0,  # returns are ten times those of the papers: 1 would clip every slope
}  # fmt: skip
KINDS = {"vector": "continuous", "continuous": "continuous", "pixels": "pixels"}


PIXELS: dict[str, Any] = {"algo.replay.capacity": 100_000, "algo.replay.remover": "fifo"}
SMALL_BATCH = {"algo.replay.batch": 16, "algo.replay.samples_per_insert": 16.0}  # one update a step, as with vectors


def presets(fields: dict[str, Any], pendulum: dict[str, Any], paper: str, **pixels: Any) -> tuple[Preset, ...]:
    """The rows of one member of the family: what it changes in the generic row, on Pendulum, and with images."""
    return (
        Preset("pendulum", ("Pendulum-v1",), GENERIC | fields | PENDULUM | pendulum, "our own"),
        Preset("continuous", (), GENERIC | fields, paper),
        Preset("pixels", (), GENERIC | fields | PIXELS | pixels, "the row for vectors, with a memory for frames"),
    )


RECIPE = Recipe(
    name="ddpg",
    about="deep deterministic policy gradient; continuous actions",
    algorithm="rookery.algorithms.dpg:DPG",
    config=DPGConfig,
    presets=presets(DDPG, {}, "Lillicrap et al. 2015; tau and noise as usual today", **SMALL_BATCH),
    generic=KINDS,
)
