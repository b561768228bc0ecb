"""From names in a config to code: which algorithm a run uses, and how a config file is read back.

A config in a file may come from another user: `storage/stored.py` checks the names in it before anything is imported.
`parents_config` is for worker processes, whose parent has done so.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Iterator
from typing import Any

import msgspec

from rookery.algorithms.base import Algorithm
from rookery.core.config import RunConfig
from rookery.core.errors import UsageError
from rookery.core.ranges import converted
from rookery.core.types import EnvSpec


def algorithm_class(path: str) -> type[Algorithm]:
    """The class that an import path names. Whoever reads the path from a file has it judged first."""
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"there is no algorithm {path!r}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Algorithm) and hasattr(found, "Config")):
        raise UsageError(f"{path!r} is not an Algorithm")
    return found


def build_algorithm(config: RunConfig, spec: EnvSpec) -> Algorithm:
    return algorithm_class(config.algorithm)(config.algo, config.net, spec, config.lanes)


def encode_config(config: RunConfig) -> bytes:
    if wrong := [path for path, x in _numbers(config, "") if not math.isfinite(x)]:
        raise UsageError(f"{', '.join(wrong)} must be finite: JSON has no word for it; for no limit use a large number")
    return msgspec.json.format(msgspec.json.encode(config), indent=2)


def parents_config(data: bytes | str) -> RunConfig[Any]:
    """The config that a worker process gets from its parent, over a channel of their own: the parent has judged it."""
    return config_of(fields_of(data))


def fields_of(data: bytes | str) -> Any:
    """The JSON of a config, not checked."""
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise UsageError(f"config.json cannot be read: {error}") from error


def config_of(fields: Any) -> RunConfig[Any]:
    """Imports the algorithm that `fields` name. An unknown or misspelt field is an error."""
    try:
        algo = algorithm_class(fields["algorithm"]).Config
        kind = RunConfig[algo]  # type: ignore[valid-type]  # which class that is, only the run knows
        config = converted(fields, kind, "config.json: ")
        if unknown := _unknown(fields, config, ""):
            raise UsageError(f"config.json has unknown fields: {', '.join(sorted(unknown))}")
        return config
    except (msgspec.ValidationError, KeyError, TypeError) as error:
        raise UsageError(f"config.json cannot be read: {error}") from error


def _unknown(given: dict[str, Any], record: Any, prefix: str) -> list[str]:
    """Paths in `given` that the dataclass it was read into does not have."""
    known = {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}
    found = [prefix + name for name in given if name not in known]
    for name, value in known.items():
        if name in given and dataclasses.is_dataclass(value):
            found += _unknown(given[name], value, f"{prefix}{name}.")
        elif isinstance(value, list):
            for index, (part, each) in enumerate(zip(given.get(name, ()), value)):
                found += _unknown(part, each, f"{prefix}{name}.{index}.")
    return found


def _numbers(record: Any, prefix: str) -> Iterator[tuple[str, float]]:
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if dataclasses.is_dataclass(value):
            yield from _numbers(value, f"{prefix}{field.name}.")
        elif isinstance(value, float):
            yield prefix + field.name, value
