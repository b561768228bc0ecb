"""Every recipe by its name."""

from __future__ import annotations

from rookery.core.errors import UsageError
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
from rookery.recipes.recipe import Recipe, nearest

POLICIES = (ppo, ddppo, ver, a2c, a3c, unreal, impala, appo, impact)
VALUES = (dqn, double_dqn, prioritized_dueling_dqn, c51, rainbow, apex_dqn, r2d2, gorila)
RECIPES: dict[str, Recipe] = {each.RECIPE.name: each.RECIPE for each in (*POLICIES, *VALUES, ddpg, apex_dpg, d4pg)}


def recipe(name: str) -> Recipe:
    if name not in RECIPES:
        raise UsageError(f"there is no recipe {name!r}; {nearest(name, RECIPES)}")
    return RECIPES[name]
