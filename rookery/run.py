"""A run from outside: start it, resume it, load what it learnt.

A run is a folder: config.json, metrics.jsonl, checkpoints/, logs/, summary.json, and what plots and evaluations add;
numeric/ if gradients stayed non-finite.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from rookery import checkpoint
from rookery.claim import claimed
from rookery.config import RunConfig
from rookery.errors import INTERRUPT, REQUEUE, CheckpointError, EnvError, RookeryError, StorageError, UsageError
from rookery.journal import Journal
from rookery.learner import Learner
from rookery.metrics.panel import Panel
from rookery.metrics.sink import Sinks
from rookery.nets.torso import bf16_is_emulated
from rookery.ranges import within
from rookery.recipes import recipe as recipe_named
from rookery.recipes.recipe import with_fields
from rookery.registry import build_algorithm, check_trusted, decode_config, encode_config
from rookery.topologies.job import Job, restore
from rookery.topologies.probe import probe
from rookery.topologies.signals import Signals, Stopped
from rookery.topologies.threads import Threads
from rookery.types import EnvSpec


@dataclass(frozen=True)
class Run:
    """A finished run."""

    path: Path
    config: RunConfig
    summary: dict[str, Any]
    exit_code: int = 0


def configure(recipe: str, env: str, preset: str = "", **fields: Any) -> RunConfig:
    """The whole config of a run, from a recipe's name, an environment and the fields that shall differ."""
    outline = {k: v for k, v in fields.items() if k in ("env_kwargs", "atari")}

    def spec() -> EnvSpec:
        return probe(env, outline.get("env_kwargs", {}))

    return recipe_named(recipe).build(env, spec, preset, **fields)


def train(recipe: str | RunConfig, env: str = "", **fields: Any) -> Run:
    """Train, and return the finished run. `train("ppo", env="CartPole-v1", env_steps=100_000)`.

    Fields are those of `rookery.config.RunConfig`; nested ones as `algo={"clip": 0.1}`.
    """
    if not isinstance(recipe, RunConfig) and not env:
        raise UsageError('which environment? train("ppo", env="CartPole-v1")')
    config = check(recipe if isinstance(recipe, RunConfig) else configure(recipe, env, **fields))
    config = replace(config, out=config.out or _folder_name(config))
    folder = Path(config.out)
    before = {path.name for path in folder.iterdir()} if folder.is_dir() else None
    with _opened(folder):
        _write(folder / "config.json", encode_config(config))
        try:
            return _execute(config, folder, saved=None)
        except (UsageError, Stopped):  # nothing has begun: the same command, corrected or later, finds the place free
            _clear_folder(folder, before)
            raise
        except RookeryError as error:
            error.add_note(f"run folder: {folder}")
            raise


def resume(path: str | Path, trust: tuple[str, ...] = (), **fields: Any) -> Run:
    """Go on with a run where its newest complete checkpoint ends, or from the start if it has none yet.

    `env_steps=...` extends it.
    """
    folder = Path(path)
    read_config(folder, trust)  # or it is not a run folder
    with claimed(folder):
        before = read_config(folder, trust)
        # A fault plan was for the life that ended; the next one is not struck again unless asked to be.
        config = check(with_fields(before, {"fault_plan": ""} | fields))
        if ":" in config.env:
            check_trusted(config.env.partition(":")[0], trust)
        if checkpoint.all_steps(folder / "checkpoints") or (folder / "summary.json").exists():
            saved, notes = checkpoint.newest(folder / "checkpoints")
            _check_same(before, config)
        else:
            saved, notes = None, ["the run had no checkpoint yet: it begins anew"]
        _write(folder / "config.json", encode_config(config))
        try:
            return _execute(config, folder, saved, notes)
        except (UsageError, CheckpointError):  # it cannot be resumed like this: as it was, it still can
            _write(folder / "config.json", encode_config(before))
            raise


def _check_same(before: RunConfig, config: RunConfig) -> None:
    for name in ("actors", "envs_per_actor"):
        if getattr(config, name) != getattr(before, name):
            raise UsageError(
                f"the run has {name} {getattr(before, name)}, and its checkpoints hold the state of as many; "
                f"it cannot be resumed with {getattr(config, name)}: leave it as it is, or start a new run"
            )


def check(config: RunConfig) -> RunConfig:
    """The config as it will be written; what cannot be run is refused, before anything is written or started."""
    config = within(config, kind=RunConfig[type(config.algo)])
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("there is no CUDA device here (or this build of torch has no CUDA); use --device cpu")
    return config


def read_config(folder: Path, trust: tuple[str, ...] = ()) -> RunConfig:
    try:
        return decode_config((folder / "config.json").read_bytes(), trust)
    except OSError as error:
        raise CheckpointError(f"{folder} is not a run folder: {error}") from error


def _execute(config: RunConfig, folder: Path, saved: checkpoint.Checkpoint | None, notes: list[str] = []) -> Run:  # noqa: B006
    topology = importlib.import_module(f"rookery.topologies.{config.topology}")
    threads = Threads(config)
    with Signals() as signals, closing(Sinks.of_run(folder)) as sinks, closing(Panel(config.quiet)) as panel:
        journal = Journal(config, sinks, panel)

        def open_job(spec: EnvSpec) -> Job:
            algorithm = build_algorithm(config, spec)
            learner = Learner(algorithm, config.seed, config.device, config.compile)
            if not config.threads:
                threads.fit(algorithm.work(learner.nets))
            _write(folder / "spec.json", msgspec.json.encode(spec))
            job = Job(config, algorithm, learner, journal, folder, signals, threads, spec)
            for note in (*notes, *_warnings(config)):
                journal.say(note)
            if saved is not None:
                restore(job, saved)
            return job

        try:
            job = topology.run(config, folder, signals, open_job)
        except UsageError as error:
            if not journal.begun:
                raise
            gone = EnvError(f"environments that could be made before cannot any more: {error}")
            gone.__notes__ = getattr(error, "__notes__", [])
            raise gone from error
        finally:
            threads.restore()
        journal.report(force=True)
        code = signals.requested or 0
        if not job.learner.updates:
            journal.say("the run ended before its first update, nothing was learnt: take more steps (--env-steps)")
        reason = {0: journal.finished() or "done", INTERRUPT: "interrupted", REQUEUE: "requeue"}[code]
        summary = journal.summary(reason, job.learner.updates, job.learner.skipped)
    _write(folder / "summary.json", json.dumps(summary, indent=2).encode())
    return Run(folder, config, summary, code)


def _warnings(config: RunConfig) -> list[str]:
    if config.net.precision == "bf16" and bf16_is_emulated(config.device):
        return ["this processor has no bf16 arithmetic: bf16 is emulated here, about ten times slower than fp32"]
    return []


def _folder_name(config: RunConfig) -> str:
    env = re.sub(r"[^A-Za-z0-9]+", "-", config.env).strip("-")
    name = f"runs/{config.recipe}-{env}-{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = (name if n == 1 else f"{name}-{n}" for n in itertools.count(1))
    return next(each for each in names if not os.path.exists(each))


@contextmanager
def _opened(folder: Path) -> Iterator[None]:
    """A folder for a new run, ours alone."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"cannot write the run folder {folder}: {error.strerror or error}") from error
    with claimed(folder):
        if (folder / "config.json").exists():
            raise UsageError(
                f"{folder} already holds a run; resume it (rookery resume {folder}) or choose another --out"
            )
        yield


def _clear_folder(folder: Path, before: set[str] | None) -> None:
    """Take away what a run that never began has written, and nothing that was there before (None: no folder)."""
    if before is None:
        shutil.rmtree(folder, ignore_errors=True)
        return
    for path in folder.iterdir():
        if path.name in before:
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _write(path: Path, data: bytes) -> None:
    """Whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}") from error
