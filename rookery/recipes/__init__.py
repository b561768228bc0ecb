"""Every recipe by its name."""

from __future__ import annotations

from rookery.errors import UsageError
from rookery.recipes import ppo
from rookery.recipes.recipe import Recipe, nearest

RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in (ppo.RECIPE,)}


def recipe(name: str) -> Recipe:
    if name not in RECIPES:
        raise UsageError(f"there is no recipe {name!r}; {nearest(name, RECIPES)}")
    return RECIPES[name]
