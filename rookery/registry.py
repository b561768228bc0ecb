"""From names in a config to code: which algorithm a run uses, and how a config file is read back.

A config may come from a stranger. Only modules of this package are imported on its word; anything else must be
named as trusted by the user.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Iterator
from typing import Any

import msgspec

from rookery.algorithms.base import Algorithm
from rookery.config import RunConfig
from rookery.errors import UsageError
from rookery.ranges import converted
from rookery.types import EnvSpec


def algorithm_class(path: str, trust: tuple[str, ...] = ()) -> type[Algorithm]:
    module, _, name = path.partition(":")
    check_trusted(module, trust)
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"there is no algorithm {path!r}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Algorithm) and hasattr(found, "Config")):
        raise UsageError(f"{path!r} is not an Algorithm")
    return found


def check_trusted(module: str, trust: tuple[str, ...]) -> None:
    """Refuse to import a module that a file names and the user did not."""
    if module.split(".")[0] != "rookery" and not any(module == t or module.startswith(t + ".") for t in trust):
        raise UsageError(f"the run names code outside Rookery, {module!r}; if you trust it, add --trust {module}")


def build_algorithm(config: RunConfig, spec: EnvSpec) -> Algorithm:
    module = config.algorithm.partition(":")[0]
    return algorithm_class(config.algorithm, trust=(module,))(config.algo, config.net, spec, config.lanes)


def encode_config(config: RunConfig) -> bytes:
    if wrong := [path for path, x in _numbers(config, "") if not math.isfinite(x)]:
        raise UsageError(f"{', '.join(wrong)} must be finite: JSON has no word for it; for no limit use a large number")
    return msgspec.json.format(msgspec.json.encode(config), indent=2)


def decode_config(data: bytes | str, trust: tuple[str, ...] = ()) -> RunConfig[Any]:
    """A config as `encode_config` wrote it; an unknown or misspelt field is an error."""
    try:
        fields = msgspec.json.decode(data)
        algo = algorithm_class(str(fields["algorithm"]), trust).Config
        config = converted(fields, RunConfig[algo], "config.json: ")
        if unknown := _unknown(fields, config, ""):
            raise UsageError(f"config.json has unknown fields: {', '.join(sorted(unknown))}")
        if config.net.module:
            check_trusted(config.net.module.partition(":")[0], trust)
        return config
    except (msgspec.DecodeError, msgspec.ValidationError, KeyError, TypeError) as error:
        raise UsageError(f"config.json cannot be read: {error}") from error


def _unknown(given: dict[str, Any], record: Any, prefix: str) -> list[str]:
    """Paths in `given` that the dataclass it was read into does not have."""
    known = {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}
    found = [prefix + name for name in given if name not in known]
    for name, value in known.items():
        if name in given and dataclasses.is_dataclass(value):
            found += _unknown(given[name], value, f"{prefix}{name}.")
    return found


def _numbers(record: Any, prefix: str) -> Iterator[tuple[str, float]]:
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if dataclasses.is_dataclass(value):
            yield from _numbers(value, f"{prefix}{field.name}.")
        elif isinstance(value, float):
            yield prefix + field.name, value
