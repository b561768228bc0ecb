"""A run's config from words: every field of RunConfig by its dotted path, typed by the dataclasses themselves.

The environment decides the preset and the preset the defaults, so the words are read twice: first the few that
choose the defaults, then all of them against those defaults.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from pathlib import Path
from typing import Annotated, Any

import tyro

from rookery.cli.flags import HELP, comments_of, flags_of, last, parse, spell
from rookery.core.config import RunConfig, Topology
from rookery.core.errors import UsageError

FIXED = ("recipe", "algorithm", "preset", "init_from", "history")  # what a run is; not for editing
EXTRA = {  # flags of the command line that are no fields of a run
    "preset": (str, "take this row of the recipe's table, whatever the environment (`rookery recipes`)"),
    "overwrite": (bool, "delete what is in the folder of --out, if it is a run that failed or was killed"),
    "init_from": (str, "begin with the networks of this run, or of this one of its checkpoints (docs/python.md)"),
    "init_best": (bool, "with its best checkpoint, not the newest"),
    "trust": (tuple[str, ...], "modules that a stored run may import and call, besides those on the list of Rookery"),
}
ABOUT = (
    "Short forms: --core for --net.core, --precision for --net.precision, --lag for --algo.queue.lag, --ray-address "
    "for --ray.address; 1e6, 100k and 2M are numbers."
)


def config_for(recipe: str, words: list[str], prog: str) -> RunConfig:
    """The config that `rookery train RECIPE words...` asks for."""
    return asked(recipe, words, prog)[0]


def asked(recipe: str, words: list[str], prog: str) -> tuple[RunConfig, dict[str, Any]]:
    """The same, and the values of the extra flags."""
    from rookery.recipes import recipe as recipe_named
    from rookery.run.configured import configure

    chosen = recipe_named(recipe)
    config = RunConfig(recipe=chosen.name, algorithm=chosen.algorithm, env="", algo=chosen.config())
    spelt = spell(words, flags_of(_view(config, EXTRA)))
    env = last(spelt, "env")
    asks_help = any(word in HELP for word in spelt)
    if not env and not asks_help:
        raise UsageError(f"which environment? {prog} --env CartPole-v1")
    if env:
        config = configure(recipe, env, last(spelt, "preset") or "", **_outline(spelt))
    source = _source(spelt, recipe) if env else None
    if source is not None:
        from rookery.run.init_from import with_network

        config = with_network(config, source, {})
    row = f"\n\nThe defaults are those of the preset {config.preset!r}." if config.preset else ""
    if asks_help and not env:
        row = "\n\nThe defaults depend on the environment: add --env ID to see them."
    found, extra = read(config, spelt, prog, f"{chosen.about}.{row}\n\n{ABOUT}", EXTRA)
    if found.topology == "auto":  # named, and what follows from the other words and the preset is known already
        found = dataclasses.replace(found, topology=config.topology)
    return (found if source is None else _begun_from(found, source)), extra


def _source(spelt: list[str], recipe: str) -> Any:
    """The networks of the run that `--init-from` names, if it is there."""
    from rookery.cli.runs import open_run, trusted
    from rookery.cli.show import warn
    from rookery.run.init_from import source_of

    if not (run := last(spelt, "init-from")):
        if "--init-best" in spelt:
            raise UsageError("--init-best is for --init-from RUN: which run?")
        return None
    trust = trusted(spelt)
    open_run(Path(run), trust, ["rookery", "train", recipe, *spelt], acts=False)
    return source_of(run, "--init-best" in spelt, trust, warn)


def _begun_from(config: RunConfig, source: Any) -> RunConfig:
    from rookery.run.init_from import Unfit, begun_from

    try:
        return begun_from(config, source)
    except Unfit as error:
        words = ((f"--{path.replace('_', '-')}", value) for path, value in error.changes.items())
        flags = " ".join(f"{flag} {_spelt(value)}" for flag, value in words)
        raise UsageError(f"{error.about}; it would fit with {flags}" if flags else error.about) from None


def _spelt(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def read(
    config: RunConfig, words: list[str], prog: str, about: str, extra: dict[str, tuple[Any, str]]
) -> tuple[RunConfig, dict[str, Any]]:
    """A copy of `config` with what the words change, and the values of the extra flags."""
    view = _view(config, extra)
    parsed = parse(type(view), words, prog, about, view)
    fields = {f.name: getattr(parsed, f.name) for f in dataclasses.fields(config) if f.name not in FIXED}
    return dataclasses.replace(config, **fields), {name: getattr(parsed, name) for name in extra}


def changes(old: Any, new: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted path -> new value of every field that differs."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(old):
        before, after = getattr(old, field.name), getattr(new, field.name)
        if dataclasses.is_dataclass(before):
            found |= changes(before, after, f"{prefix}{field.name}.")
        elif before != after:
            found[prefix + field.name] = after
    return found


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UsageError(f"--env-kwargs is not JSON: {error}; write it as '{{\"name\": 1}}'") from None
    if not isinstance(value, dict):
        raise UsageError(f"--env-kwargs is a JSON object, such as '{{\"name\": 1}}', not {text}")
    return value


JSON = tyro.constructors.PrimitiveConstructorSpec(
    nargs=1,
    metavar="JSON",
    instance_from_str=lambda words: json_object(words[0]),
    is_instance=lambda value: isinstance(value, dict),
    str_from_instance=lambda value: [json.dumps(value)],
)


def _outline(spelt: list[str]) -> dict[str, Any]:
    """The fields among the words that choose other defaults; what is wrong is left for tyro to refuse."""
    found: dict[str, Any] = {}
    if (kwargs := last(spelt, "env-kwargs")) is not None:
        found["env_kwargs"] = json_object(kwargs)
    if (topology := last(spelt, "topology")) in typing.get_args(Topology):
        found["topology"] = topology
    if address := last(spelt, "ray.address"):
        found["ray.address"] = address
    for name in ("actors", "envs_per_actor", "ranks", "env_steps"):
        value = last(spelt, name.replace("_", "-"))
        if value is not None and value.isdigit() and int(value) > 0:
            found[name] = int(value)
    return found


def _view(config: RunConfig, extra: dict[str, tuple[Any, str]]) -> Any:
    """The config as tyro reads it: without the fixed fields, with a line of help each, and the extra flags."""
    hints, comments = typing.get_type_hints(RunConfig), comments_of(RunConfig)
    shown: list[tuple[str, Any]] = []
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        if field.name in FIXED:
            continue
        value = values[field.name] = getattr(config, field.name)
        kind = type(value) if dataclasses.is_dataclass(value) else hints[field.name]
        kind = Annotated[kind, JSON] if field.name == "env_kwargs" else kind
        if not dataclasses.is_dataclass(value):
            kind = Annotated[kind, tyro.conf.arg(help=comments[field.name])]
        shown.append((field.name, kind))
    for name, (kind, about) in extra.items():
        shown.append((name, Annotated[kind, tyro.conf.arg(help=about)]))
        values[name] = config.preset if name == "preset" else kind()
    return dataclasses.make_dataclass("Run", shown, frozen=True)(**values)
