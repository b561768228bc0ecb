"""A2C: the synchronous form of A3C (Mnih et al. 2016), one gradient of each short unroll of all environments."""

from __future__ import annotations

from typing import Any

from rookery.algorithms.a2c import A2CConfig
from rookery.recipes.recipe import Preset, Recipe

ATARI = {
    "envs_per_actor": 16, "algo.unroll": 5, "net.torso": "nips", "net.features": 256, "env_steps": 10_000_000,
}  # fmt: skip
SMALL = {
    "envs_per_actor": 16, "algo.unroll": 16, "algo.optimizer": "adam", "algo.lr": 2e-3, "algo.lam": 0.95,
    "algo.entropy": 0.005, "net.normalize_obs": True, "algo.scale_reward": True,
}  # fmt: skip
MEMORY = {
    "algo.unroll": 32, "algo.lam": 1.0, "algo.lr": 3e-3, "algo.entropy": 0.0, "net.hidden": (64,), "net.core_size": 64,
}  # fmt: skip


def presets(atari: dict[str, Any], small: dict[str, Any], pixels: dict[str, Any], source: str) -> tuple[Preset, ...]:
    """The rows of A2C with the changes of a recipe that is made from it."""
    return (
        Preset("atari", ("ALE/*", "*NoFrameskip-v4"), ATARI | atari, source),
        Preset("memory", ("rookery/CartPoleMasked-*", "rookery/TMaze-*", "rookery/RepeatPrevious-*"),
               SMALL | MEMORY | small | {"envs_per_actor": 4}, "our own: longer unrolls, smaller batches"),
        Preset("vector", (), SMALL | small, "our own"),
        Preset("continuous", (), SMALL | {"algo.entropy": 0.0} | small, "our own"),
        Preset("pixels", (), {
            "envs_per_actor": 16, "algo.unroll": 16, "algo.optimizer": "adam", "algo.lr": 1e-3, "algo.lam": 0.95,
            "net.features": 256,
        } | pixels, "our own"),
    )  # fmt: skip


RECIPE = Recipe(
    name="a2c",
    about="advantage actor-critic, synchronous: one gradient of each short unroll",
    algorithm="rookery.algorithms.a2c:A2C",
    config=A2CConfig,
    presets=presets({}, {}, {}, "Baselines' Atari numbers"),
    generic={"vector": "vector", "continuous": "continuous", "pixels": "pixels"},
)
