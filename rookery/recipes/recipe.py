"""What a recipe is: a paper's name, an algorithm, and a visible table of presets by environment.

A preset is a row of dotted config fields. An environment that no row names takes the generic row of its kind.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from rookery.core.config import RunConfig
from rookery.core.errors import UsageError
from rookery.core.hints import nearest
from rookery.core.machine import Machine
from rookery.core.types import EnvSpec


@dataclass(frozen=True)
class Preset:
    name: str
    envs: tuple[str, ...]  # ids or patterns; a generic row has none
    fields: dict[str, Any]  # dotted path -> value
    source: str = ""  # where the numbers come from


@dataclass(frozen=True)
class Recipe:
    name: str
    about: str  # one line
    algorithm: str  # import path
    config: Callable[[], Any]  # the algorithm's config class
    presets: tuple[Preset, ...]
    generic: dict[str, str] = field(default_factory=dict)  # kind of environment -> preset name

    def preset(self, name: str) -> Preset:
        found = {preset.name: preset for preset in self.presets}
        if name not in found:
            raise UsageError(f"recipe {self.name} has no preset {name!r}; {nearest(name, found)}")
        return found[name]

    def preset_for(self, env: str, spec: Callable[[], EnvSpec]) -> Preset:
        """The row for an environment; `spec` is asked only if no row names it."""
        for preset in self.presets:
            if any(fnmatchcase(env, pattern) for pattern in preset.envs):
                return preset
        return self.preset(self.generic[kind_of(spec())])

    def build(self, env: str, spec: Callable[[], EnvSpec], preset: str = "", **overrides: Any) -> RunConfig:
        """The whole config: defaults, then the preset's row, then what the user said."""
        looked: list[EnvSpec] = []

        def look() -> EnvSpec:
            looked.append(spec())
            return looked[0]

        row = self.preset(preset) if preset else self.preset_for(env, look)
        config = RunConfig(recipe=self.name, algorithm=self.algorithm, env=env, algo=self.config(), preset=row.name)
        config = with_fields(config, row.fields)
        if looked and looked[0].mask_from == "info":  # only a reset shows it: the actors are told what it has shown
            config = with_fields(config, {"net.action_mask": "info"})
        return with_fields(config, _actors(config, dict(overrides)))


def _actors(config: RunConfig, overrides: dict[str, Any]) -> dict[str, Any]:
    """Keep the preset's number of environments when only the number of actors (or the topology) was said."""
    lanes = config.actors * config.envs_per_actor
    if overrides.get("topology") == "local" and "actors" not in overrides and "envs_per_actor" not in overrides:
        overrides["actors"] = actors_for(lanes)
    if overrides.get("topology", "auto") == "auto":
        overrides["topology"] = topology_for(config, overrides)
    actors = overrides.get("actors")
    if isinstance(actors, int) and actors > 0 and "envs_per_actor" not in overrides:  # anything else is refused later
        overrides["envs_per_actor"] = max(1, lanes // actors)
    return overrides


def actors_for(lanes: int) -> int:
    """As many actors as there are cores, if they divide the environments."""
    return next(n for n in range(min(Machine().cores(), lanes), 0, -1) if lanes % n == 0)


def topology_for(config: RunConfig, overrides: dict[str, Any]) -> str:
    """Where actors run if that was not said: several actors are processes, several ranks learn together."""

    def said(name: str) -> int:
        value = overrides.get(name)
        return value if isinstance(value, int) else 1  # anything else is refused later

    ray = overrides.get("ray", {})
    address = ray.get("address") if isinstance(ray, dict) else getattr(ray, "address", "")
    if address or overrides.get("ray.address"):
        return "ray_cluster"
    if config.topology not in ("auto", "serial"):
        return config.topology
    if said("ranks") > 1:
        return "allreduce"
    if said("actors") > 1:
        return "local"
    return "serial" if {"actors", "envs_per_actor"} & set(overrides) else config.topology  # nothing is left to choose


def kind_of(spec: EnvSpec) -> str:
    if any(leaf.kind == "image" for leaf in spec.obs.values()):
        return "pixels"
    return "continuous" if spec.action.kind == "box" else "vector"


def with_fields(config: Any, fields: dict[str, Any], group: str = "", whole: Any = None) -> Any:
    """A copy with dotted fields replaced; a dict value replaces fields inside. Unknown names get the nearest.

    `group`, `whole`: where `config` is part of a larger one, its dotted path with a dot behind, and that one.
    """
    whole = config if whole is None else whole
    known = {f.name for f in dataclasses.fields(config)}
    nested: dict[str, dict[str, Any]] = {}
    plain: dict[str, Any] = {}
    for path, value in fields.items():
        head, _, rest = path.partition(".")
        if head not in known:
            near = nearest(group + head, paths(whole), _keyword, _listed(group, known))
            raise UsageError(f"there is no field {group + path!r}; {near}")
        inner = getattr(config, head)
        if rest:
            nested.setdefault(head, {})[rest] = value
        elif dataclasses.is_dataclass(inner) and not dataclasses.is_dataclass(value):
            if not isinstance(value, dict):
                first = _keyword(f"{group}{path}.{dataclasses.fields(inner)[0].name}")
                raise UsageError(f"{group}{path} is a group of fields; give those to change: {first}")
            nested.setdefault(head, {}).update(value)
        else:
            plain[head] = value
    for head, inner in nested.items():
        plain[head] = with_fields(getattr(config, head), inner, f"{group}{head}.", whole)
    return dataclasses.replace(config, **plain)


def paths(record: Any, prefix: str = "") -> Iterator[str]:
    """The dotted paths of all fields, groups left out."""
    for each in dataclasses.fields(record):
        value = getattr(record, each.name)
        if dataclasses.is_dataclass(value):
            yield from paths(value, f"{prefix}{each.name}.")
        else:
            yield prefix + each.name


def _keyword(path: str) -> str:
    """A field as a Python caller gives it."""
    *groups, last = path.split(".")
    if not groups:
        return last
    inner = f'{{"{last}": ...}}'
    for name in reversed(groups[1:]):
        inner = f'{{"{name}": {inner}}}'
    return f"{groups[0]}={inner}"


def _listed(group: str, known: Collection[str]) -> str:
    return f"fields of {group[:-1]}: {', '.join(sorted(known))}" if group else f"fields: {', '.join(sorted(known))}"
