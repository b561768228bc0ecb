"""From names in a config to code: which algorithm a run uses, and how a config file is read back.

A config may come from a stranger. Only modules of this package are imported on its word; anything else must be
named as trusted by the user.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import msgspec

from rookery.algorithms.base import Algorithm
from rookery.config import RunConfig
from rookery.errors import UsageError
from rookery.types import EnvSpec


def algorithm_class(path: str, trust: tuple[str, ...] = ()) -> type[Algorithm]:
    module, _, name = path.partition(":")
    check_trusted(module, trust)
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"there is no algorithm {path!r}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Algorithm)):
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
    return msgspec.json.format(msgspec.json.encode(config), indent=2)


def decode_config(data: bytes | str, trust: tuple[str, ...] = ()) -> RunConfig[Any]:
    """A config as `encode_config` wrote it; an unknown or misspelt field is an error."""
    try:
        fields = msgspec.json.decode(data)
        known = {f.name for f in dataclasses.fields(RunConfig)}
        if unknown := set(fields) - known:
            raise UsageError(f"config.json has unknown fields: {', '.join(sorted(unknown))}")
        algo = algorithm_class(fields["algorithm"], trust).Config
        known_algo = {f.name for f in dataclasses.fields(algo)}
        if unknown := set(fields["algo"]) - known_algo:
            raise UsageError(f"config.json has unknown fields: {', '.join(f'algo.{n}' for n in sorted(unknown))}")
        config = msgspec.convert(fields, RunConfig[algo])
    except (msgspec.DecodeError, msgspec.ValidationError, KeyError, TypeError) as error:
        raise UsageError(f"config.json cannot be read: {error}") from error
    if config.net.module:
        check_trusted(config.net.module.partition(":")[0], trust)
    return config
