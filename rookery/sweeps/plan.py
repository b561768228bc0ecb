"""What a sweep is asked to do: one config, the fields that vary, the seeds. From it every run, with name and config.

    plan = Plan(base, grid={"algo.lr": [1e-4, 3e-4]}, seeds=(1, 2, 3))
    checked(plan)                       # or UsageError, before anything is started
    for setting in plan.settings(): ...

A setting is one choice of values; its runs differ only by their seed. The name of a run follows from its values alone,
so that the same sweep, asked again with more values or seeds, finds the runs that it has. Not here: how trials are
sampled (`study.py`), and how values are spelt on the command line (`cli/sweep_words.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any

import msgspec

from rookery.algorithms.registry import build_algorithm, config_of, encode_config
from rookery.core.config import RunConfig
from rookery.core.errors import CheckpointError, UsageError
from rookery.core.hints import nearest
from rookery.core.ranges import Whole
from rookery.core.types import EnvSpec
from rookery.recipes.recipe import paths, with_fields
from rookery.storage import folder as folders
from rookery.storage.trust import judge

FILE = "sweep.json"
FORMAT = 1
LONGEST = 80  # characters of a setting's name
LIMIT = 100_000  # runs
SEEDS, TRIAL_SEEDS = 5, 1  # runs of a setting if nothing is said, and of a trial
OWN = {  # fields that a sweep sets itself, and what to do instead
    "recipe": "a sweep has one recipe", "algorithm": "a sweep has one recipe", "preset": "a sweep has one preset",
    "env": "a sweep has one environment: start one sweep for each, and compare their runs",
    "seed": "give the seeds of the sweep", "out": "every run has its folder in that of the sweep",
    "quiet": "the runs of a sweep draw no panel",
}  # fmt: skip


@dataclass(frozen=True)
class Range:
    """Numbers to sample from; `log`: evenly in their logarithm."""

    low: float
    high: float
    log: bool = False


@dataclass(frozen=True)
class Planned:
    """One run."""

    name: str
    setting: str
    values: dict[str, Any]
    seed: int


@dataclass(frozen=True)
class Setting:
    """One choice of values."""

    name: str
    values: dict[str, Any]  # field -> value

    def runs(self, seeds: Sequence[int]) -> list[Planned]:
        return [Planned(f"{self.name}-seed-{seed}", self.name, self.values, seed) for seed in seeds]


@dataclass(frozen=True)
class Plan:
    base: RunConfig
    grid: dict[str, list[Any]] = field(default_factory=dict)  # field -> values
    search: dict[str, Range] = field(default_factory=dict)  # field -> range; for trials
    seeds: tuple[int, ...] = tuple(range(1, SEEDS + 1))
    trials: int = 0  # sampled by Optuna; 0: every combination of `grid`
    jobs: int = 1  # runs at a time
    recipe: str = ""  # as it was asked for: a name, or an import path

    def settings(self) -> Iterator[Setting]:
        """Every combination; the last field varies fastest."""
        for values in itertools.product(*self.grid.values()):
            yield self.setting(dict(zip(self.grid, values)))

    def setting(self, values: dict[str, Any]) -> Setting:
        return Setting(setting_name(values, self.titles()), values)

    def titles(self) -> dict[str, str]:
        """A short name for every field that varies: its last part, if that is the only one."""
        fields = [*self.grid, *self.search]
        last = [name.rpartition(".")[2] for name in fields]
        return {name: short if last.count(short) == 1 else name for name, short in zip(fields, last)}

    def config(self, run: Planned, folder: Path) -> RunConfig:
        fields = run.values | {"seed": run.seed, "out": str(folder / "runs" / run.name)}
        return with_fields(self.base, fields)

    @property
    def total(self) -> int:
        """Runs in all."""
        return (self.trials or math.prod(map(len, self.grid.values()))) * len(self.seeds)


def setting_name(values: dict[str, Any], titles: dict[str, str]) -> str:
    """For a folder: "lr-0.0003-hidden-64x64". What is too long, or has other characters, ends with a digest."""
    words = "-".join(f"{titles[name]}-{_plain(value)}" for name, value in values.items()) or "base"
    name = re.sub(r"[^A-Za-z0-9.+_-]+", "_", words)
    unique = not any(isinstance(value, dict) for value in values.values())  # 1 and "1" look the same in it
    if unique and name == words and len(name) <= LONGEST:
        return name
    digest = blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=4).hexdigest()
    return f"{name[:LONGEST].rstrip('-_.')}-{digest}"


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return "-".join(f"{name}-{_plain(each)}" for name, each in value.items())
    return "x".join(map(_plain, value)) if isinstance(value, list | tuple) else str(value)


def shown(value: Any) -> str:
    """A value in a table, and as the command line takes it: lists with spaces."""
    if isinstance(value, list | tuple):
        return " ".join(map(shown, value))
    if isinstance(value, dict):
        return json.dumps(value)
    return "none" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def seeds_of(asked: int | Sequence[int]) -> tuple[int, ...]:
    """A count is that many seeds from 1."""
    seeds = tuple(range(1, asked + 1)) if isinstance(asked, int) else tuple(asked)
    if not seeds or any(not isinstance(seed, int) or seed < 0 for seed in seeds) or len(set(seeds)) < len(seeds):
        raise UsageError(f"seeds is {asked!r}; it must be how many, 1 or more, or a list of different whole numbers")
    return seeds


def hint_of(base: RunConfig, path: str) -> Any:
    """The type of a field by its dotted path; UsageError with the nearest name if there is none."""
    known = list(paths(base))
    if path in OWN:
        raise UsageError(f"{path} cannot be varied: {OWN[path]}")
    if inner := [name for name in known if name.startswith(f"{path}.")]:
        raise UsageError(f"{path} is a group of fields; vary one of them, such as {inner[0]}")
    if path not in known:
        near = nearest(path, known, otherwise="nested ones are written algo.lr, net.core_size")
        raise UsageError(f"there is no field {path!r} to vary; {near}")
    *groups, last = path.split(".")
    record = functools.reduce(getattr, groups, base)
    return typing.get_type_hints(type(record), include_extras=True)[last]


def value_at(config: Any, path: str) -> Any:
    """A field of a config as a file has it."""
    return _as_stored(functools.reduce(getattr, path.split("."), config))


def checked(plan: Plan, spec_of: Callable[[str, dict[str, Any]], EnvSpec]) -> Plan:
    """The plan with its values as the fields hold them. Every config is built: UsageError for the first that is wrong.

    `spec_of`: looks at an environment, and is asked once for each `env_kwargs`.
    """
    from rookery.run.run import check

    specs: dict[str, EnvSpec] = {}

    def build(values: dict[str, Any]) -> RunConfig:
        config = check(with_fields(plan.base, values))
        if config.topology == "auto":
            raise UsageError("topology auto cannot be a value in a sweep: name serial, local or another one")
        kwargs = json.dumps(config.env_kwargs, sort_keys=True)
        if kwargs not in specs:
            specs[kwargs] = spec_of(config.env, config.env_kwargs)
        build_algorithm(config, specs[kwargs])
        return config

    def one(path: str, value: Any) -> Any:
        hint_of(plan.base, path)
        return value_at(check(with_fields(plan.base, {path: value})), path)

    grid = {path: _unique([one(path, value) for value in _list(path, values)]) for path, values in plan.grid.items()}
    for path, each in plan.search.items():
        _check_range(plan.base, path, each)
    if both := grid.keys() & plan.search.keys():
        raise UsageError(f"{both.pop()} is given values and a range: leave one out")
    if plan.search and not plan.trials:
        raise UsageError("ranges are sampled from, in trials: say how many")
    if plan.trials and not (plan.search or grid):
        raise UsageError("trials need something to sample: give fields with their values, or ranges")
    plan = replace(plan, grid=grid)
    if plan.total > LIMIT:
        raise UsageError(f"these are {plan.total:,} runs; a sweep has {LIMIT:,} at most")
    if plan.trials:
        for low in (True, False):
            build({path: _end(plan.base, path, each, low) for path, each in plan.search.items()})
        for path, values in grid.items():
            for value in values:
                build({path: value})
    else:
        for setting in plan.settings():
            _with_setting(build, setting)
    return plan


def _with_setting(build: Callable[[dict[str, Any]], RunConfig], setting: Setting) -> None:
    try:
        build(setting.values)
    except UsageError as error:
        if setting.values:
            error.add_note("with " + ", ".join(f"{path} {shown(value)}" for path, value in setting.values.items()))
        raise


def _list(path: str, values: Any) -> list[Any]:
    if isinstance(values, Mapping) and path != "env_kwargs":
        inner = next(iter(values), "lr")
        raise UsageError(f"{path}: write fields of a group by their dotted path, {{'{path}.{inner}': [...]}}")
    if isinstance(values, str | Mapping) or not isinstance(values, Iterable) or not (found := list(values)):
        raise UsageError(f"{path}: give a list of the values to try, and not {values!r}")
    return found


def _unique(values: list[Any]) -> list[Any]:
    return [value for place, value in enumerate(values) if value not in values[:place]]


def range_of(path: str, words: Any) -> Range:
    """A range as a caller gives it: ("log", 1e-5, 1e-2)."""
    try:
        kind, low, high = words
        return Range(float(low), float(high), {"log": True, "range": False}[kind])
    except (TypeError, ValueError, KeyError):
        raise UsageError(f"{path}: a range is ('range', low, high) or ('log', low, high), and not {words!r}") from None


def _check_range(base: RunConfig, path: str, each: Range) -> None:
    if numeric(hint_of(base, path)) is None:
        raise UsageError(f"{path} is no number, and has no range: give it values to choose from")
    if not each.low < each.high or (each.log and each.low <= 0):
        above = " and above 0" if each.log else ""
        raise UsageError(f"{path}: the range goes from {each.low:g} to {each.high:g}; the first must be lower{above}")


def numeric(hint: Any) -> type | None:
    """int or float for a field of that type, None for any other."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return next((kind for each in typing.get_args(hint) if (kind := numeric(each))), None)
    if typing.get_origin(hint) is typing.Annotated:
        return numeric(typing.get_args(hint)[0])
    return hint if hint in (int, float) else None


def _end(base: RunConfig, path: str, each: Range, low: bool) -> Any:
    end = each.low if low else each.high
    return int(end) if numeric(hint_of(base, path)) is int else end


# The file


def store(plan: Plan, folder: Path) -> None:
    record = {
        "format": FORMAT, "recipe": plan.recipe, "env": plan.base.env, "set": plan.grid,
        "search": {path: dataclasses.asdict(each) for path, each in plan.search.items()}, "seeds": list(plan.seeds),
        "trials": plan.trials, "jobs": plan.jobs, "base": msgspec.json.decode(encode_config(plan.base)),
    }  # fmt: skip
    folders.store(folder, FILE, json.dumps(record, indent=2).encode() + b"\n")


class Stored(msgspec.Struct):
    """A sweep.json, checked for its types only."""

    format: int
    recipe: str
    set: dict[str, list[Any]]
    search: dict[str, Range]
    seeds: list[Whole]
    trials: Whole
    jobs: Annotated[int, msgspec.Meta(ge=1, le=LIMIT)]
    base: dict[str, Any]


def stored(folder: Path) -> Stored:
    try:
        found = msgspec.json.decode(folders.read(folder, FILE), type=Stored)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise CheckpointError(f"{folder / FILE} cannot be read: {error}") from error
    if found.format != FORMAT:
        raise CheckpointError(f"{folder / FILE} has format {found.format}; this version of Rookery reads {FORMAT}")
    return found


def planned(found: Stored, trust: Sequence[str]) -> Plan:
    """The plan of a file that may come from another person: all that its runs name is judged as in a stored run."""
    judge(found.base, trust)
    base, seeds = config_of(found.base), seeds_of(found.seeds)
    plan = Plan(base, found.set, found.search, seeds, found.trials, found.jobs, found.recipe)
    for path, values in plan.grid.items():
        hint_of(plan.base, path)
        for value in values:
            judge(msgspec.to_builtins(with_fields(plan.base, {path: value})), trust)
    return plan


def differences(found: Stored, plan: Plan) -> list[str]:
    """What another sweep in the same folder may not change, in words."""
    old, new = dict(_leaves(found.base)), dict(_leaves(_as_stored(plan.base)))
    # A field that an earlier version did not have has its default there.
    words = [f"{name} {shown(value)}" for name, value in old.items() if value != new.get(name)]
    if bool(found.trials) != bool(plan.trials):
        words.append("trials" if found.trials else "no trials")
    elif plan.trials and (found.set != _as_stored(plan.grid) or found.search != plan.search):
        words.append("other values or ranges to sample from")
    return words


def _leaves(fields: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in fields.items():
        if isinstance(value, dict) and prefix + name != "env_kwargs":
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _as_stored(value: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(value))
