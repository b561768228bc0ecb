"""VER (Wijmans et al. 2022, arXiv:2210.05064): PPO on rollouts in which each environment steps in its own time.

A rollout has a fixed number of steps in total, of which fast environments give more. `--ranks N` as for `ddppo`; the
fields of a row are those of one rank.
"""

from __future__ import annotations

from rookery.algorithms.ppo import PPOConfig
from rookery.recipes.recipe import Preset, Recipe

GROUP = {
    "topology": "allreduce", "group.crew": "ready", "group.preempt": 0.6, "group.preempt_after": 0.25,
    "algo.stretch": 4,
}  # fmt: skip
SMALL = {
    "algo.unroll": 128, "algo.epochs": 10, "algo.minibatches": 8, "algo.lr": 5e-4, "algo.entropy": 0.005,
    "net.normalize_obs": True, "algo.scale_reward": True,
}  # fmt: skip
PRESETS = (
    Preset("gridnav", ("rookery/GridNav-*",), GROUP | {
        "envs_per_actor": 16, "algo.unroll": 128, "algo.chunk": 32, "algo.epochs": 4, "algo.minibatches": 4,
        "algo.lr": 7e-4, "net.core": "lstm", "net.core_size": 128, "net.feed_last": True, "net.features": 128,
        "env_steps": 4_000_000,
    }, "DD-PPO's row"),
    Preset("memory", ("rookery/CartPoleMasked-*", "rookery/TMaze-*", "rookery/RepeatPrevious-*"), GROUP | SMALL | {
        "envs_per_actor": 8, "algo.chunk": 32, "algo.epochs": 4, "algo.minibatches": 4, "algo.lr": 1e-3,
        "net.hidden": (64,), "net.core": "lstm", "net.core_size": 64,
    }, "DD-PPO's row"),
    Preset("vector", (), GROUP | SMALL | {"envs_per_actor": 8}, "DD-PPO's row"),
    Preset("continuous", (), GROUP | SMALL | {
        "envs_per_actor": 4, "algo.unroll": 256, "algo.minibatches": 32, "algo.lr": 3e-4, "algo.entropy": 0.0,
    }, "DD-PPO's row"),
    Preset("pixels", (), GROUP | {
        "envs_per_actor": 8, "algo.unroll": 128, "algo.chunk": 32, "algo.epochs": 2, "algo.minibatches": 2,
        "algo.max_grad_norm": 0.2, "algo.normalize_advantage": False, "net.core": "lstm", "net.core_size": 512,
        "net.torso": "resnet", "env_steps": 10_000_000,
    }, "DD-PPO's row with chunks of 32 rows"),
)  # fmt: skip

RECIPE = Recipe(
    name="ver",
    about="variable experience rollouts: environments step on their own, a rollout is so many steps in all",
    algorithm="rookery.algorithms.ppo:PPO",
    config=PPOConfig,
    presets=PRESETS,
    generic={"vector": "vector", "continuous": "continuous", "pixels": "pixels"},
)
