"""PPO, feed-forward and recurrent (Schulman et al. 2017): with actor processes it is distributed recurrent PPO.

The table says what is taken for which environment; `rookery train ppo --preset NAME` takes a row by name.
"""

from __future__ import annotations

from rookery.algorithms.ppo import PPOConfig
from rookery.recipes.recipe import Preset, Recipe

PRESETS = (
    Preset("cartpole", ("CartPole-v0", "CartPole-v1"), {
        "envs_per_actor": 8, "algo.unroll": 32, "algo.epochs": 20, "algo.minibatches": 1, "algo.lr": 1e-3,
        "algo.entropy": 0.0, "algo.clip_end": 0.0, "algo.scale_reward": True,
    }, "RL Zoo's CartPole row with the usual discount and scaled rewards"),
    Preset("acrobot", ("Acrobot-v1",), {
        "topology": "serial",
        "envs_per_actor": 16, "algo.unroll": 256, "algo.minibatches": 16, "algo.lr": 1e-3, "algo.lam": 0.94,
        "algo.entropy": 0.0, "net.normalize_obs": True,
    }, "RL Zoo's Acrobot row, larger step"),
    Preset("pendulum", ("Pendulum-v1",), {
        "topology": "serial",
        "envs_per_actor": 16, "algo.unroll": 256, "algo.epochs": 10, "algo.minibatches": 32, "algo.lr": 1e-3,
        "algo.gamma": 0.95, "algo.entropy": 0.0, "algo.scale_reward": True, "net.normalize_obs": True,
    }, "RL Zoo's Pendulum row without gSDE, more environments, larger discount: at 0.9 some seeds get worse again"),
    Preset("memory", ("rookery/CartPoleMasked-*", "rookery/TMaze-*", "rookery/RepeatPrevious-*"), {
        "envs_per_actor": 16, "algo.unroll": 128, "algo.chunk": 32, "algo.epochs": 4, "algo.minibatches": 4,
        "algo.lr": 1e-3, "algo.gamma": 0.99, "algo.lam": 0.95, "algo.entropy": 0.005, "net.hidden": (64,),
        "net.core_size": 64, "net.normalize_obs": True, "algo.scale_reward": True,
    }, "our own"),
    Preset("atari", ("ALE/*", "*NoFrameskip-v4"), {
        "envs_per_actor": 8, "algo.clip": 0.1, "net.shared": True, "env_steps": 10_000_000,
    }, "Baselines' and CleanRL's Atari numbers"),
    Preset("vector", (), {
        "envs_per_actor": 16, "algo.unroll": 128, "algo.epochs": 10, "algo.minibatches": 8, "algo.lr": 5e-4,
        "algo.entropy": 0.005, "net.normalize_obs": True, "algo.scale_reward": True,
    }, "our own"),
    Preset("continuous", (), {
        "envs_per_actor": 8, "algo.unroll": 256, "algo.epochs": 10, "algo.minibatches": 32, "algo.lr": 3e-4,
        "algo.entropy": 0.0, "net.normalize_obs": True, "algo.scale_reward": True,
    }, "Baselines' MuJoCo numbers spread over 8 environments"),
    Preset("pixels", (), {
        "envs_per_actor": 8, "algo.clip": 0.1, "net.shared": True,
    }, "the Atari row"),
)  # fmt: skip

RECIPE = Recipe(
    name="ppo",
    about="proximal policy optimisation, feed-forward or recurrent; synchronous",
    algorithm="rookery.algorithms.ppo:PPO",
    config=PPOConfig,
    presets=PRESETS,
    generic={"vector": "vector", "continuous": "continuous", "pixels": "pixels"},
)
