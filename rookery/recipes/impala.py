"""IMPALA (Espeholt et al. 2018): actors run ahead of the learner, V-trace corrects what they did with older weights.

The paper's Atari numbers are for sums over 32 unrolls of 20 steps: clip 40 and epsilon 0.1 of a sum over 640 rows are
0.0625 and 2.5e-7 of a mean.
"""

from __future__ import annotations

from rookery.algorithms.impala import IMPALAConfig
from rookery.recipes import appo
from rookery.recipes.recipe import Preset, Recipe

ASYNC = {"topology": "local", "actors": 2}
SMALL = ASYNC | {
    "envs_per_actor": 8, "algo.unroll": 16, "algo.optimizer": "adam", "algo.optimizer_eps": 1e-5, "algo.lr": 1e-3,
    "algo.queue.batch": 1, "algo.lam": 0.95, "algo.entropy": 0.005, "algo.entropy_end": 0.0, "algo.max_grad_norm": 0.5,
    "net.normalize_obs": True, "algo.scale_reward": True,
}  # fmt: skip
PRESETS = (
    Preset("pong", ("ALE/Pong-*", "PongNoFrameskip-v4"), ASYNC | appo.PONG | {
        "algo.optimizer": "adam", "algo.optimizer_eps": 1e-5, "algo.max_grad_norm": 0.5,
    }, "asynchronous PPO's frames, network and step size"),
    Preset("atari", ("ALE/*", "*NoFrameskip-v4"), ASYNC | {
        "envs_per_actor": 16, "net.torso": "nips", "net.features": 256, "env_steps": 10_000_000,
    }, "Espeholt et al. 2018, the shallow network, for means instead of sums"),
    Preset("memory", ("rookery/CartPoleMasked-*", "rookery/TMaze-*", "rookery/RepeatPrevious-*"), SMALL | {
        "algo.unroll": 32, "algo.entropy": 0.01, "net.hidden": (64,), "net.core_size": 64,
    }, "our own: longer unrolls, smaller batches"),
    Preset("vector", (), SMALL, "our own"),
    Preset("continuous", (), SMALL | {"algo.entropy": 0.0}, "our own"),
    Preset("pixels", (), ASYNC | {
        "envs_per_actor": 8, "algo.optimizer": "adam", "algo.optimizer_eps": 1e-5, "algo.lr": 1e-3, "algo.lam": 0.95,
        "algo.max_grad_norm": 0.5, "net.features": 256,
    }, "our own"),
)  # fmt: skip

RECIPE = Recipe(
    name="impala",
    about="asynchronous actor-critic with V-trace: actors run ahead of the learner",
    algorithm="rookery.algorithms.impala:IMPALA",
    config=IMPALAConfig,
    presets=PRESETS,
    generic={"vector": "vector", "continuous": "continuous", "pixels": "pixels"},
)
