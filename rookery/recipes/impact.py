"""IMPACT (Luo et al. 2020): asynchronous PPO with a slow target network and a circular buffer of batches.

The paper has 4 batches with 2 uses for discrete actions, 16 with 20 for continuous ones; the target is copied every
N·K updates.
"""

from __future__ import annotations

import dataclasses

from rookery.recipes import appo
from rookery.recipes.recipe import Preset

DISCRETE = {"algo.circular.batches": 4, "algo.circular.uses": 2, "algo.target_period": 8}
CONTINUOUS = {
    "algo.circular.batches": 16, "algo.circular.uses": 20, "algo.target_period": 64, "algo.correction": "vtrace",
    "algo.unroll": 64, "algo.minibatches": 8, "algo.lr": 1e-3,
}  # fmt: skip


def _changed(preset: Preset) -> Preset:
    circular = CONTINUOUS if preset.name in ("continuous", "pendulum") else DISCRETE
    return dataclasses.replace(preset, fields=preset.fields | {"algo.epochs": 1} | circular)


RECIPE = dataclasses.replace(
    appo.RECIPE,
    name="impact",
    about="asynchronous PPO with a slow target network; the last batches are trained on several times",
    presets=tuple(_changed(preset) for preset in appo.PRESETS),
)
