"""DQN (Mnih et al. 2015), and the rows that the other members of its family start from.

The Atari row has the paper's numbers as DQN Zoo has them, where the loss is a mean over the batch and RMSProp's epsilon
scaled to that. Four environments take one step each between two updates, where the paper's single one takes four.
"""

from __future__ import annotations

from typing import Any

from rookery.algorithms.dqn import DQNConfig
from rookery.recipes.recipe import Preset, Recipe

ATARI_GAMES = ("ALE/*", "*NoFrameskip-v4")
MEMORY_TASKS = ("rookery/CartPoleMasked-*", "rookery/TMaze-*", "rookery/RepeatPrevious-*")
WITHOUT_LIMIT = 1e9  # a gradient norm that is never reached

ATARI: dict[str, Any] = {
    "envs_per_actor": 4, "env_steps": 50_000_000, "atari.episodic_life": True, "atari.fire_reset": False,
    "algo.unroll": 1, "algo.replay.capacity": 1_000_000, "algo.replay.min_size": 50_000, "algo.replay.batch": 32,
    "algo.replay.samples_per_insert": 8.0, "algo.double": False, "algo.optimizer": "rmsprop", "algo.lr": 2.5e-4,
    "algo.decay": 0.95, "algo.optimizer_eps": 0.01 / 32**2, "algo.max_grad_norm": WITHOUT_LIMIT,
    "algo.target_period": 2_500, "algo.epsilon_end": 0.1, "algo.epsilon_share": 0.02, "checkpoint.every": 1_000_000,
}  # fmt: skip
SMALL: dict[str, Any] = {
    "envs_per_actor": 8, "net.hidden": (256, 256), "net.activation": "relu", "algo.unroll": 32,
    "algo.replay.capacity": 100_000, "algo.replay.min_size": 1_000, "algo.replay.batch": 64,
    "algo.replay.samples_per_insert": 32.0, "algo.lr": 2.3e-3, "algo.lr_end": 0.0, "algo.optimizer_eps": 1e-8,
    "algo.target_period": 128, "algo.epsilon_end": 0.04, "algo.epsilon_share": 0.1,
}  # fmt: skip
PIXELS: dict[str, Any] = {
    "env_steps": 1_000_000, "algo.replay.capacity": 100_000, "algo.replay.min_size": 10_000,
    "algo.epsilon_share": 0.1, "checkpoint.every": 100_000,
}  # fmt: skip
DEFAULT_KINDS = {"vector": "vector", "continuous": "vector", "pixels": "pixels"}


def presets(atari: dict[str, Any], small: dict[str, Any], paper: str, **rows: dict[str, Any]) -> tuple[Preset, ...]:
    """The rows of one member of the family: what it changes in the Atari row, in the row for small tasks, in others."""
    small = SMALL | small
    pixels = ATARI | atari | PIXELS | rows.get("pixels", {})
    return (
        Preset("cartpole", ("CartPole-v0", "CartPole-v1"), small | rows.get("cartpole", {}), "our own"),
        Preset("acrobot", ("Acrobot-v1",), {"topology": "serial"} | small | rows.get("acrobot", {}), "our own"),
        Preset("atari", ATARI_GAMES, ATARI | atari, paper),
        Preset("vector", (), small, "our own"),
        Preset("pixels", (), pixels, "the Atari row, shorter"),
    )


# With the large steps and fresh targets of SMALL, DQN and double DQN end at 200 on CartPole with one seed in three.
PLAIN = {"algo.double": False, "algo.lr": 5e-4, "algo.target_period": 250}

RECIPE = Recipe(
    name="dqn",
    about="deep Q-learning with a replay memory; discrete actions",
    algorithm="rookery.algorithms.dqn:DQN",
    config=DQNConfig,
    presets=presets({}, PLAIN, "Mnih et al. 2015, as in DQN Zoo"),
    generic=DEFAULT_KINDS,
)
