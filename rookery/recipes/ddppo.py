"""DD-PPO (Wijmans et al. 2020, arXiv:1911.00357): PPO on several ranks that average their gradients, with stragglers
preempted.

`--ranks N` starts the ranks here; torchrun starts them anywhere. The fields of a row are those of one rank.
"""

from __future__ import annotations

from rookery.algorithms.ppo import PPOConfig
from rookery.recipes.recipe import Preset, Recipe

GROUP = {"topology": "allreduce", "group.preempt": 0.6, "group.preempt_after": 0.25}
# The paper's numbers. A minibatch is made of whole environments: a chunk is the whole unroll.
PIXELS = {
    "envs_per_actor": 4, "algo.unroll": 128, "algo.chunk": 128, "algo.epochs": 2, "algo.minibatches": 2,
    "algo.lr": 2.5e-4, "algo.lr_end": 2.5e-4, "algo.value_clip": 0.2, "algo.max_grad_norm": 0.2,
    "algo.normalize_advantage": False, "net.core": "lstm", "net.core_size": 512, "net.core_layers": 2,
    "net.torso": "resnet", "env_steps": 10_000_000,
}  # fmt: skip
SMALL = {
    "algo.unroll": 128, "algo.epochs": 10, "algo.minibatches": 8, "algo.lr": 5e-4, "algo.entropy": 0.005,
    "net.normalize_obs": True, "algo.scale_reward": True,
}  # fmt: skip
# Rows of one rank, without the group around it: VER takes the same.
GRIDNAV = {
    "envs_per_actor": 8, "algo.unroll": 128, "algo.chunk": 32, "algo.epochs": 4, "algo.minibatches": 4,
    "algo.lr": 7e-4, "net.core": "lstm", "net.core_size": 128, "net.feed_last": True, "net.features": 128,
    "env_steps": 2_000_000,
}  # fmt: skip
MEMORY = SMALL | {
    "envs_per_actor": 8, "algo.chunk": 32, "algo.epochs": 4, "algo.minibatches": 4, "algo.lr": 1e-3,
    "net.hidden": (64,), "net.core": "lstm", "net.core_size": 64,
}  # fmt: skip
MEMORY_TASKS = ("rookery/CartPoleMasked-*", "rookery/TMaze-*", "rookery/RepeatPrevious-*")
VECTOR = SMALL | {"envs_per_actor": 8}
CONTINUOUS = SMALL | {
    "envs_per_actor": 4, "algo.unroll": 256, "algo.minibatches": 32, "algo.lr": 3e-4, "algo.entropy": 0.0,
}  # fmt: skip
HALF = "PPO's row, half of the environments on each rank"
PRESETS = (
    Preset(
        "gridnav", ("rookery/GridNav-*",), GROUP | GRIDNAV, "our own: the paper's LSTM, smaller and with more passes"
    ),
    Preset("memory", MEMORY_TASKS, GROUP | MEMORY, "PPO's row with an LSTM, half of the environments on each rank"),
    Preset("vector", (), GROUP | VECTOR, HALF),
    Preset("continuous", (), GROUP | CONTINUOUS, HALF),
    Preset("pixels", (), GROUP | PIXELS, "the paper's"),
)

RECIPE = Recipe(
    name="ddppo",
    about="decentralised distributed PPO: ranks average their gradients, stragglers are preempted",
    algorithm="rookery.algorithms.ppo:PPO",
    config=PPOConfig,
    presets=PRESETS,
    generic={"vector": "vector", "continuous": "continuous", "pixels": "pixels"},
)
