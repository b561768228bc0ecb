"""A run from outside: start it, resume it, load what it learnt.

A run is a folder: config.json, metrics.jsonl, checkpoints/, logs/, summary.json, and what plots and evaluations add.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import time
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from rookery import checkpoint
from rookery.config import RunConfig
from rookery.errors import INTERRUPT, REQUEUE, CheckpointError, EnvError, RookeryError, StorageError, UsageError
from rookery.journal import Journal
from rookery.learner import Learner
from rookery.metrics.panel import Panel
from rookery.metrics.sink import Sinks
from rookery.nets.torso import bf16_is_emulated
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
    config = recipe if isinstance(recipe, RunConfig) else configure(recipe, env, **fields)
    check(config)
    config = replace(config, out=config.out or _folder_name(config))
    folder = Path(config.out)
    before = {path.name for path in folder.iterdir()} if folder.is_dir() else None
    _open_folder(folder, config)
    try:
        return _execute(config, folder, saved=None)
    except (UsageError, Stopped):  # nothing has begun: the same command, corrected or later, shall find the place free
        _clear_folder(folder, before)
        raise
    except RookeryError as error:
        error.add_note(f"run folder: {folder}")
        raise


def resume(path: str | Path, trust: tuple[str, ...] = (), **fields: Any) -> Run:
    """Go on with a run where its newest complete checkpoint ends. `env_steps=...` extends it."""
    folder = Path(path)
    before = read_config(folder, trust)
    # A fault plan was for the life that ended; the next one is not struck again unless asked to be.
    config = with_fields(before, {"fault_plan": ""} | fields)
    check(config)
    for name in ("actors", "envs_per_actor"):
        if getattr(config, name) != getattr(before, name):
            raise UsageError(
                f"the run has {name} {getattr(before, name)}, and its checkpoints hold the state of as many; "
                f"it cannot be resumed with {getattr(config, name)}: leave it as it is, or start a new run"
            )
    if ":" in config.env:
        check_trusted(config.env.partition(":")[0], trust)
    saved, skipped = checkpoint.newest(folder / "checkpoints")
    _write(folder / "config.json", encode_config(config))
    try:
        return _execute(config, folder, saved, skipped)
    except (UsageError, CheckpointError):  # it cannot be resumed like this: as it was, it still can
        _write(folder / "config.json", encode_config(before))
        raise


def check(config: RunConfig) -> None:
    """Refuse what cannot be run, before anything is written or started."""
    for name in ("env_steps", "actors", "envs_per_actor"):
        if getattr(config, name) < 1:
            raise UsageError(f"{name} is {getattr(config, name)}; at least 1 is needed")
    for name in ("every", "keep"):
        if getattr(config.checkpoint, name) < 1:
            raise UsageError(f"checkpoint.{name} is {getattr(config.checkpoint, name)}; at least 1 is needed")
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("there is no CUDA device here (or this build of torch has no CUDA); use --device cpu")


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
            raise EnvError(f"environments that could be made before cannot any more: {error}") from error
        finally:
            threads.restore()
        journal.report(force=True)
        code = signals.requested or 0
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
    return f"runs/{config.recipe}-{env}-{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}"


def _open_folder(folder: Path, config: RunConfig) -> None:
    if (folder / "config.json").exists():
        raise UsageError(f"{folder} already holds a run; resume it (rookery resume {folder}) or choose another --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / "config.json", encode_config(config))
    except OSError as error:
        raise StorageError(f"cannot write the run folder {folder}: {error}") from error


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
    temporary.write_bytes(data)
    os.replace(temporary, path)
