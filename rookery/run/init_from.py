"""Warm start: the networks of a new run begin with the weights of another run's checkpoint.

    source = source_of("runs/a")                     # newest checkpoint; or a checkpoint folder, a Run, a Policy
    config = with_network(config, source, named)     # net.* as there, but what the user has named
    config = begun_from(config, source)              # refused if the weights do not fit; recorded in config.json
    keep(config, folder)                             # when the run begins: a verified copy in RUN/init
    begin(config, folder, learner, spec)             # in every process that learns, from that copy

Networks, target networks and the statistics of normalisers come along. Optimiser, counters, replay memory and random
streams do not: they belong to the data and the schedule of the other run, and so does the state of `OF_RUN`. Once a run
has begun it reads its own copy only, so a path in a config.json is never read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from rookery.algorithms.registry import build_algorithm
from rookery.core.config import InitFrom, RunConfig
from rookery.core.errors import CheckpointError, RookeryError, UsageError
from rookery.core.types import EnvSpec
from rookery.play.policy import Policy, load, looks, outline
from rookery.recipes.recipe import with_fields
from rookery.roles.learner import Learner
from rookery.run.finished import trusted
from rookery.storage import checkpoint
from rookery.storage import folder as folders
from rookery.storage.folder import run_of
from rookery.storage.stored import check_weights, decode_spec, outline_of

INIT = "init"  # folder in the run's own
OF_RUN = ("reward_scaler.returns", "epsilon.value", "kl.value", "random_start.flag")  # state of a run, not weights
OWN = ("net.action_mask", "net.precision")  # matters of the new environment and the machine
TARGET = ("target_", "target.")  # how names of target networks begin; behind it is the network that they follow

Tensors = Mapping[str, torch.Tensor]


class Source(NamedTuple):
    config: RunConfig
    spec: EnvSpec
    tensors: dict[str, torch.Tensor]
    record: InitFrom


class Unfit(UsageError):
    """The networks of a run do not fit the weights that it is to begin with; `changes` would make them fit."""

    def __init__(self, about: str, changes: dict[str, Any]):
        self.about, self.changes = about, changes
        told = ", ".join(f"{path}={value!r}" for path, value in changes.items())
        super().__init__(f"{about}; it would fit with {told}" if changes else about)


def source_of(
    given: Any, best: bool = False, trust: tuple[str, ...] = (), tell: Callable[[str], None] = lambda text: None
) -> Source:  # fmt: skip
    """The networks of a run, verified. `given`: a run folder, one of its checkpoints, a Run or a Policy."""
    if isinstance(given, Policy):
        given, trust = given.path, (*trust, *given.trust)
    trust = trusted(given, trust)
    path = folders.real(os.path.abspath(given))
    policy = load(path, "best" if best else "newest", trust, tell)
    run = run_of(path)
    where = os.path.relpath(policy.path, run)
    record = InitFrom(str(run), where, policy.env_steps, checkpoint.digest(policy.path))
    return Source(policy.config, policy.spec, _learnt(policy.nets.state_dict()), record)


def with_network(config: RunConfig, source: Source, named: Mapping[str, Any]) -> RunConfig:
    """The config with the network of the source, but for the fields in `named`, which the user has given.

    That is `net.*`, and for the same recipe those fields of `algo.*` that the shapes of its networks depend on.
    """
    given = {*OWN, *_paths(named)}
    differing = {path: value for path, value in _differing(config, source.config).items() if not _within(path, given)}
    config = with_fields(config, {path: value for path, value in differing.items() if path.startswith("net.")})
    if config.recipe != source.config.recipe or not _misfit(config, source):
        return config
    return with_fields(config, _needed(config, source, differing))


def begun_from(config: RunConfig, source: Source) -> RunConfig:
    """The config with a record of the source; `Unfit` if its weights do not fit the networks of this run."""
    if why := _misfit(config, source):
        changes = _needed(config, source, _differing(config, source.config))
        about = f"the weights of {_name(source.record)} do not fit the networks of this run: {why}"
        if not changes:
            about += (
                f"; recipe {config.recipe} has other networks than {source.config.recipe}, and no field of net or algo "
                "would change that: begin with a run of the same recipe"
            )
        raise Unfit(about, changes)
    return replace(config, init_from=source.record)


def check_apart(config: RunConfig, folder: Path) -> None:
    """UsageError if the run would begin in the folder that it begins from."""
    if config.init_from is not None and Path(config.init_from.run) == Path(os.path.abspath(folder)):
        raise UsageError(f"{folder} holds the run whose networks the new one begins with: choose another folder")


def keep(config: RunConfig, folder: Path) -> None:
    """Copy the networks that the run begins with into its folder, if there are any."""
    if (record := config.init_from) is None:
        return
    path = Path(record.run, record.checkpoint)
    try:
        saved = checkpoint.load(path)
        spec = decode_spec(folders.read(Path(record.run), "spec.json"), Path(record.run, "spec.json"))
        if checkpoint.digest(path) != record.digest:
            raise UsageError(f"{path} is not the checkpoint that this run was configured with: its digest differs")
    except CheckpointError as error:
        raise UsageError(f"the run cannot begin with the networks of another one: {error}") from error
    nets = {name: tensor for name, tensor in saved.tensors.items() if name.startswith("nets/")}
    meta = {"spec": msgspec.json.encode(spec).decode()}
    checkpoint.save(folder / INIT, saved.env_steps, nets, meta, keep=1)


def begin(config: RunConfig, folder: Path, learner: Learner, spec: EnvSpec) -> str:
    """Put the networks that the run begins with into a fresh learner; what to say about it, "" if there are none."""
    if (record := config.init_from) is None:
        return ""
    if not folders.exists(folder, INIT):
        raise CheckpointError(f"{folder / INIT} is missing: the run began with the networks of {_name(record)} there")
    saved, _ = checkpoint.newest(folder / INIT)
    text = saved.meta.get("spec")
    trained_on = decode_spec(str(text).encode(), saved.path / "meta.json")
    if looks(trained_on) != looks(spec):
        raise UsageError(
            f"the weights of {_name(record)} do not fit {spec.id}: they were trained on {outline(trained_on)}, and "
            f"this environment has {outline(spec)}"
        )
    given = _learnt({name.removeprefix("nets/"): tensor for name, tensor in saved.tensors.items()})
    own = learner.nets.state_dict()
    taken = _matched(_learnt(own), given)
    check_weights(taken, _learnt(own), own, saved, "they are no networks of this run")
    learner.nets.load_state_dict(own | taken)
    return f"begins with the networks of {_name(record)} ({record.env_steps:,} steps)"


def _name(record: InitFrom) -> str:
    return str(Path(record.run, record.checkpoint))


# What fits


def _learnt(tensors: Tensors) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name not in OF_RUN}


def _matched(own: Tensors, given: Tensors) -> dict[str, torch.Tensor]:
    """What is given for these networks. A target network that is not given is what it follows; others are left out."""
    taken = {name: tensor for name, tensor in given.items() if name in own or not name.startswith(TARGET)}
    for name in own:
        if name not in given and name.startswith(TARGET) and (online := name[len("target.") :]) in given:
            taken[name] = given[online]
    return taken


def _misfit(config: RunConfig, source: Source) -> str:
    """The first tensor of the networks that is another one in the source, or nothing."""
    algorithm = build_algorithm(config, source.spec)
    shapes = outline_of(algorithm)
    own = _learnt(algorithm.nets().state_dict() if shapes is None else shapes)
    taken = _matched(own, source.tensors)
    for name in sorted(own.keys() | taken.keys()):
        here, there = (
            f"{tensors[name].dtype} {list(tensors[name].shape)}" if name in tensors else "absent"
            for tensors in (own, taken)
        )
        if here != there:
            return f"{name} is {here.removeprefix('torch.')} here and {there.removeprefix('torch.')} there"
    return ""


def _needed(config: RunConfig, source: Source, differing: Mapping[str, Any]) -> dict[str, Any]:
    """The fewest of these fields with which the networks fit; none if they do not fit with all of them."""

    def fits(changes: Mapping[str, Any]) -> bool:
        try:
            return not _misfit(with_fields(config, dict(changes)), source)
        except (RookeryError, RuntimeError, ValueError):  # fields that do not go together
            return False

    needed = dict(differing)
    if not fits(needed):
        return {}
    for path in differing:
        if fits(fewer := {name: value for name, value in needed.items() if name != path}):
            needed = fewer
    return needed


def _differing(config: RunConfig, other: RunConfig) -> dict[str, Any]:
    """Fields of `net` and `algo` that both have, with their value in the other where that is another one."""
    own, there = dict(_values(config)), dict(_values(other))
    return {path: there[path] for path in own if path in there and there[path] != own[path]}


def _values(config: RunConfig) -> Iterator[tuple[str, Any]]:
    for group in ("net", "algo"):
        yield from _leaves(getattr(config, group), f"{group}.")


def _leaves(record: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for field in fields(record):
        value = getattr(record, field.name)
        if is_dataclass(value):
            yield from _leaves(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, value


def _paths(named: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted paths of fields as a Python caller names them: nested, dotted, or a whole group."""
    for name, value in named.items():
        if isinstance(value, Mapping):
            yield from _paths(value, f"{prefix}{name}.")
        else:
            yield prefix + name


def _within(path: str, named: set[str]) -> bool:
    return any(path == name or path.startswith(f"{name}.") for name in named)
