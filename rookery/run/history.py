"""What a resume has changed: `history` in config.json for those that did, a record in metrics.jsonl for all of them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import msgspec

from rookery import __version__
from rookery.core.config import CHANGES, Resumed, RunConfig, nameless
from rookery.core.errors import UsageError

FIRST = ("init_from", "history", "recipe", "algorithm", "preset")  # what a run is, from its first day on

Changed = dict[str, tuple[Any, Any]]


def check_changes(given: dict[str, Any]) -> None:
    """UsageError for fields that no resume can change."""
    if wrong := sorted({name.partition(".")[0] for name in given} & set(FIRST)):
        raise UsageError(f"{wrong[0]} belongs to the run and cannot change: leave it out, or train a new run")


def changed(before: RunConfig, after: RunConfig) -> Changed:
    """Dotted path -> value before and after of every field that differs, as plain data."""
    return dict(_differences(before, after, ""))


def _differences(before: Any, after: Any, prefix: str) -> Iterator[tuple[str, tuple[Any, Any]]]:
    for field in fields(before):
        old, new = getattr(before, field.name), getattr(after, field.name)
        if is_dataclass(old) and is_dataclass(new):
            yield from _differences(old, new, f"{prefix}{field.name}.")
        elif old != new and field.name != "history":
            yield prefix + field.name, (msgspec.to_builtins(old), msgspec.to_builtins(new))


def with_history(config: RunConfig, env_steps: int, changes: Changed) -> RunConfig:
    """The config with one more resume in its history, if that has changed fields."""
    if not changes:
        return config
    entry = Resumed(env_steps, changed=changes, **stamp())
    return replace(config, history=[*config.history, entry][-CHANGES:])


def stamp() -> dict[str, str]:
    """When, in UTC, and by which version of Rookery."""
    return {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "version": __version__}


def stored_env(stored: bytes, given: str) -> str:
    """The environment that a config.json names; `given` where that and `given` are objects without a name."""
    env = str(json.loads(stored)["env"])
    return given if nameless(env) and nameless(given) else env
