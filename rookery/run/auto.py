"""Topology auto: one process for cheap environments, actor processes for expensive ones, by a short measurement.

    config, why = settled(config)          # before anything is written: config.json names what was chosen

Actors are spread over processes only where that leaves the order of acting and learning as it is: with a synchronous
queue, or a replay memory with an exact ratio. What is measured is remembered for this process. Not here: what a step
costs (`envs/cost.py`), and what `--actors 4` alone means (`recipes/recipe.py`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from rookery.algorithms.registry import build_algorithm
from rookery.core.config import RunConfig
from rookery.core.errors import RookeryError, UsageError
from rookery.core.types import EnvSpec
from rookery.crews.probe import timed
from rookery.envs.given import given, unguarded
from rookery.envs.make import stepped_together
from rookery.processes.signals import Signals
from rookery.processes.threads import available_cores
from rookery.recipes.recipe import actors_for
from rookery.run.env import spec_of

HANDOVER = 5e-3  # seconds that processes must save in a round of unrolls: to order and hand one over takes about 1 ms
WORTH = 10.0  # seconds that they must save in the run: to start them takes about as long on a busy machine
SHORT = 10_000  # environment steps below which nothing is measured: a trial


@dataclass(frozen=True)
class Look:
    """What an environment looks like, and what it costs."""

    spec: EnvSpec
    step_s: float | None  # seconds per step; None: its environments are stepped together, or it could not be played


_looked: dict[str, Look] = {}


def look(env: str, env_kwargs: dict[str, Any], signals: Signals | None = None) -> Look:
    """In a process of its own, once."""
    key = json.dumps([env, env_kwargs], sort_keys=True, default=repr)
    if key not in _looked:
        _looked[key] = Look(*timed(env, env_kwargs, signals))
    return _looked[key]


def spec_for(env: str, fields: dict[str, Any]) -> EnvSpec:
    """What an environment looks like; its cost is measured at once, if topology auto may ask for that."""
    kwargs = fields.get("env_kwargs", {})
    if given(env) is None and worth_a_look(fields, available_cores()):
        return look(env, kwargs).spec
    return spec_of(env, kwargs)


def worth_a_look(fields: dict[str, Any], cores: int) -> bool:
    """Whether topology auto may depend on the cost of a step, as far as the fields that the user named say."""
    steps = fields.get("env_steps", SHORT)
    named = fields.get("topology", "auto") != "auto" or {"actors", "envs_per_actor", "ranks"} & set(fields)
    return not named and cores > 1 and (not isinstance(steps, int) or steps >= SHORT)


def decide(step_s: float, round_steps: int, env_steps: int, actors: int) -> bool:
    """Whether actor processes pay: in a round of unrolls, of so many steps, and in the whole run."""
    saved = step_s * (1 - 1 / actors)  # seconds per step
    return round_steps * saved >= HANDOVER and env_steps * saved >= WORTH


def settled(config: RunConfig, signals: Signals | None = None) -> tuple[RunConfig, str]:
    """The config with topology serial or local for auto, and why; empty if nothing was measured."""
    if config.topology != "auto":
        return config, ""
    serial = replace(config, topology="serial")
    lanes = config.actors * config.envs_per_actor
    actors = config.actors if config.actors > 1 else actors_for(lanes)
    if actors == 1 or available_cores() == 1 or config.env_steps < SHORT or not _movable(config.env):
        return serial, ""
    try:
        found = look(config.env, config.env_kwargs, signals)
    except RookeryError:
        if given(config.env) is None:
            raise
        return serial, ""  # no other process can make it: this one can
    plan = build_algorithm(config, found.spec).plan()
    if found.step_s is None or not plan.table.in_turns:
        return serial, ""
    cost = f"a step of the environment takes {_amount(found.step_s)}"
    if not decide(found.step_s, plan.unroll * lanes, config.env_steps, actors):
        return serial, f"serial: {cost}"
    envs = lanes // actors
    chosen = replace(config, topology="local", actors=actors, envs_per_actor=envs)
    return chosen, f"local, {actors} actors × {envs} environment{'s' if envs > 1 else ''}: {cost}"


def check_settled(config: RunConfig) -> None:
    """For a run that is resumed."""
    if config.topology == "auto":
        raise UsageError("topology auto is settled when a run starts; resume it with the one that it has, or name one")


def _movable(env: str) -> bool:
    """Whether other processes may step these environments, and this could be quicker."""
    known = given(env)
    if known is not None:
        return not known.why and not (known.script and unguarded(known.script))
    return not stepped_together(env)


def _amount(seconds: float) -> str:
    return f"{1e3 * seconds:.2g} ms" if seconds < 1 else f"{seconds:.2g} s"
