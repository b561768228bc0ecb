"""Asynchronous PPO (Luo et al. 2019, "Accelerating Distributed Deep Reinforcement Learning"): IMPALA's data flow and
PPO's objective, with replay and an auto-encoder to choose.
"""

from __future__ import annotations

from rookery.algorithms.appo import APPOConfig
from rookery.recipes.recipe import Preset, Recipe

ASYNC = {"topology": "local", "actors": 2}
SMALL = {
    "envs_per_actor": 8, "algo.chunk": 16, "algo.epochs": 4, "algo.minibatches": 4, "algo.lr": 1e-3, "algo.lam": 0.95,
    "algo.clip": 0.2, "net.normalize_obs": True, "algo.scale_reward": True,
}  # fmt: skip
# Many passes move a Gaussian far: V-trace would cut most of what its predecessor did.
GAUSSIAN = {
    "algo.unroll": 256, "algo.epochs": 10, "algo.minibatches": 32, "algo.entropy": 0.0, "algo.correction": "gae",
}  # fmt: skip
# Frames of 42x42 pixels, standardised, and a network to match: 18 points with as little arithmetic as we could.
PONG = {
    "envs_per_actor": 16, "atari.size": 42, "net.torso": "compact", "net.features": 256, "net.standardize": True,
    "env_steps": 1_500_000, "algo.unroll": 64, "algo.queue.batch": 1, "algo.lr": 7e-4, "algo.lr_end": 3e-4,
    "algo.lam": 0.95, "algo.entropy": 0.01, "algo.entropy_end": 0.001,
}  # fmt: skip
PRESETS = (
    Preset("pong", ("ALE/Pong-*", "PongNoFrameskip-v4"), ASYNC | PONG | {
        "algo.epochs": 4, "algo.minibatches": 8, "algo.chunk": 16, "algo.clip": 0.2,
    }, "our own: small frames and a small network, many passes"),
    Preset("atari", ("ALE/*", "*NoFrameskip-v4"), ASYNC | {
        "envs_per_actor": 8, "net.torso": "nips", "net.features": 256, "env_steps": 10_000_000,
    }, "RLlib's APPO numbers"),
    Preset("pendulum", ("Pendulum-v1",), ASYNC | SMALL | GAUSSIAN | {
        "algo.gamma": 0.95,
    }, "PPO's row, one batch behind"),
    Preset("memory", ("rookery/CartPoleMasked-*", "rookery/TMaze-*", "rookery/RepeatPrevious-*"), ASYNC | SMALL | {
        "algo.unroll": 64, "algo.chunk": 32, "algo.entropy": 0.005, "net.hidden": (64,), "net.core_size": 64,
    }, "our own: longer sequences"),
    Preset("vector", (), ASYNC | SMALL | {"algo.unroll": 32, "algo.entropy": 0.005}, "our own"),
    Preset("continuous", (), ASYNC | SMALL | GAUSSIAN | {"algo.lr": 3e-4}, "PPO's row, one batch behind"),
    Preset("pixels", (), ASYNC | {
        "envs_per_actor": 8, "algo.unroll": 32, "algo.chunk": 16, "algo.epochs": 2, "algo.minibatches": 4,
        "algo.lr": 5e-4, "algo.lam": 0.95, "algo.clip": 0.2, "net.features": 256,
    }, "our own"),
)  # fmt: skip

RECIPE = Recipe(
    name="appo",
    about="asynchronous PPO: actors run ahead, V-trace corrects, PPO's objective around a target policy",
    algorithm="rookery.algorithms.appo:APPO",
    config=APPOConfig,
    presets=PRESETS,
    generic={"vector": "vector", "continuous": "continuous", "pixels": "pixels"},
)
