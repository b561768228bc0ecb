"""Every recipe by its name; those of other packages by their import path, "package.module:RECIPE"."""

from __future__ import annotations

import importlib

from rookery.core.errors import UsageError
from rookery.core.hints import nearest
from rookery.recipes import (
    a2c,
    a3c,
    apex_dpg,
    apex_dqn,
    appo,
    c51,
    d4pg,
    ddpg,
    ddppo,
    double_dqn,
    dqn,
    gorila,
    impact,
    impala,
    ppo,
    prioritized_dueling_dqn,
    r2d2,
    rainbow,
    unreal,
    ver,
)
from rookery.recipes.recipe import Recipe

POLICIES = (ppo, ddppo, ver, a2c, a3c, unreal, impala, appo, impact)
VALUES = (dqn, double_dqn, prioritized_dueling_dqn, c51, rainbow, apex_dqn, r2d2, gorila)
RECIPES: dict[str, Recipe] = {each.RECIPE.name: each.RECIPE for each in (*POLICIES, *VALUES, ddpg, apex_dpg, d4pg)}


CONTINUOUS = "for continuous actions there are ppo, ddpg, d4pg and apex_dpg"
ELSEWHERE = {  # algorithms of other libraries, and what to take here
    "sac": CONTINUOUS,
    "td3": CONTINUOUS,
    "tqc": CONTINUOUS,
    "crossq": CONTINUOUS,
    "trpo": "the nearest is ppo",
    "qrdqn": "the nearest are c51 and rainbow",
    "maskableppo": "it is ppo, which applies the action masks that an environment has",
    "rppo": "it is ppo with net.core lstm",
    "recurrentppo": "it is ppo with net.core lstm",
}


def recipe(name: str) -> Recipe:
    if not isinstance(name, str):
        raise UsageError(f"the recipe is {name!r}; it must be a name, such as 'ppo', or what configure(...) returned")
    if ":" in name:
        return _imported(name)
    if name not in RECIPES:
        known = ELSEWHERE.get(name.lower().replace("_", "").replace("-", ""))
        raise UsageError(f"there is no recipe {name!r}; {known or nearest(name, RECIPES)}")
    return RECIPES[name]


def _imported(path: str) -> Recipe:
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"there is no recipe {path!r}: {error}") from error
    if not isinstance(found, Recipe):
        raise UsageError(f"{path!r} is not a Recipe; see rookery/recipes/recipe.py")
    return found
