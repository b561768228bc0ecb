"""The config of a run from what a Python caller says: a recipe's name, an environment, and the fields to change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack

from rookery.core.config import RunConfig
from rookery.core.errors import UsageError
from rookery.core.fields import Fields
from rookery.recipes import recipe as recipe_named
from rookery.recipes.recipe import with_fields
from rookery.run.auto import spec_for
from rookery.run.env import resolve

Env = str | Callable[..., Any]  # an id or import path; or what makes an environment: a function, a lambda, a class


def configure(recipe: str, env: Env, preset: str = "", **fields: Unpack[Fields]) -> RunConfig:
    """The whole config of a run, from a recipe's name, an environment and the fields to change.

    `preset`: a row of the recipe's table by its name, instead of the one for this environment.

    >>> config = rookery.configure("ppo", "CartPole-v1", algo={"clip": 0.1}, net={"core": "gru"})
    >>> config.algo.clip, config.net.core, config.preset
    (0.1, 'gru', 'cartpole')
    """
    name = resolve(env)

    return recipe_named(recipe).build(name, lambda: spec_for(name, dict(fields)), preset, **fields)


def asked(recipe: str | RunConfig, env: Env, preset: str, fields: Fields) -> RunConfig:
    """The config that `train` was asked for."""
    if not isinstance(recipe, RunConfig):
        if not env:
            raise UsageError('which environment? train("ppo", env="CartPole-v1")')
        return configure(recipe, env, preset, **fields)
    if env or preset:
        raise UsageError(
            f"the config is for {recipe.env} with the preset {recipe.preset!r}: name others where it is made, "
            f"configure({recipe.recipe!r}, env=..., preset=...)"
        )
    return with_fields(recipe, dict(fields))
