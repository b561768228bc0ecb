"""VER (Wijmans et al. 2022, arXiv:2210.05064): PPO on rollouts in which each environment steps in its own time.

A rollout has a fixed number of steps in total, of which fast environments give more. `--ranks N` as for `ddppo`; the
fields of a row are those of one rank.
"""

from __future__ import annotations

from rookery.algorithms.ppo import PPOConfig
from rookery.recipes import ddppo
from rookery.recipes.recipe import Preset, Recipe

GROUP = ddppo.GROUP | {"group.crew": "ready", "algo.stretch": 4}
PRESETS = (
    Preset("gridnav", ("rookery/GridNav-*",), GROUP | ddppo.GRIDNAV, "DD-PPO's row"),
    Preset("memory", ddppo.MEMORY_TASKS, GROUP | ddppo.MEMORY, "DD-PPO's row"),
    Preset("vector", (), GROUP | ddppo.VECTOR, "DD-PPO's row"),
    Preset("continuous", (), GROUP | ddppo.CONTINUOUS, "DD-PPO's row"),
    Preset("pixels", (), GROUP | ddppo.PIXELS | {"algo.chunk": 32}, "DD-PPO's row, chunks of 32 rows"),
)  # fmt: skip

RECIPE = Recipe(
    name="ver",
    about="variable experience rollouts: environments step on their own, a rollout is so many steps in all",
    algorithm="rookery.algorithms.ppo:PPO",
    config=PPOConfig,
    presets=PRESETS,
    generic={"vector": "vector", "continuous": "continuous", "pixels": "pixels"},
)
