"""The config of a run from what a Python caller says: a recipe's name, an environment, and the fields to change."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Unpack

from rookery.core.config import RunConfig
from rookery.core.errors import UsageError
from rookery.core.fields import Fields
from rookery.recipes import recipe as recipe_named
from rookery.recipes.recipe import topology_for, with_fields
from rookery.run.auto import spec_for
from rookery.run.env import resolve
from rookery.run.init_from import begun_from, source_of, with_network

Env = str | Callable[..., Any]  # an id or import path; or what makes an environment: a function, a lambda, a class


def configure(
    recipe: str, env: Env, preset: str = "", *, init_from: Any = None, init_best: bool = False,
    trust: tuple[str, ...] = (), **fields: Unpack[Fields],
) -> RunConfig:  # fmt: skip
    """The whole config of a run, from a recipe's name, an environment and the fields to change.

    `preset`: a row of the recipe's table by its name, instead of the one for this environment.
    `init_from`, `init_best`, `trust`: as of `train`.

    >>> config = rookery.configure("ppo", "CartPole-v1", algo={"clip": 0.1}, net={"core": "gru"})
    >>> config.algo.clip, config.net.core, config.preset
    (0.1, 'gru', 'cartpole')
    """
    name = resolve(env)

    config = recipe_named(recipe).build(name, lambda: spec_for(name, dict(fields)), preset, **fields)
    if init_from is None:
        _check_best(init_best)
        return config
    source = source_of(init_from, init_best, trust, _warn)
    return begun_from(with_network(config, source, fields), source)


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=4)


def asked(
    recipe: str | RunConfig, env: Env, preset: str, fields: Fields, init_from: Any = None, init_best: bool = False,
    trust: tuple[str, ...] = (),
) -> RunConfig:  # fmt: skip
    """The config that `train` was asked for."""
    if not isinstance(recipe, RunConfig):
        if not env:
            raise UsageError('which environment? train("ppo", env="CartPole-v1")')
        return configure(recipe, env, preset, init_from=init_from, init_best=init_best, trust=trust, **fields)
    if env or preset:
        raise UsageError(
            f"the config is for {recipe.env} with the preset {recipe.preset!r}: name others where it is made, "
            f"configure({recipe.recipe!r}, env=..., preset=...)"
        )
    config = with_fields(replace(recipe, history=[]), dict(fields))  # a config of a stored run has that run's
    if config.topology == "auto":
        config = replace(config, topology=topology_for(config, dict(fields)))
    if init_from is None:
        _check_best(init_best)
        return config
    return begun_from(config, source_of(init_from, init_best, trust, _warn))


def _check_best(init_best: bool) -> None:
    if init_best:
        raise UsageError("init_best=True is for init_from=...: which run?")
