"""The interface of a run: start it, resume it, load its policy.

A run is a folder: config.json, metrics.jsonl, checkpoints/, logs/, summary.json, and what plots and evaluations add;
numeric/ if gradients stayed non-finite.
"""

from __future__ import annotations

import importlib
import json
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import msgspec
import torch

from rookery.algorithms.registry import build_algorithm, encode_config
from rookery.core.config import RunConfig
from rookery.core.errors import (
    INTERRUPT,
    REQUEUE,
    CheckpointError,
    EnvError,
    LearnerError,
    RookeryError,
    UsageError,
)
from rookery.core.fields import Fields
from rookery.core.ranges import within
from rookery.core.reduce import ALONE, Reduce
from rookery.core.types import EnvSpec
from rookery.core.wording import setting
from rookery.envs.given import check_not_importing, given
from rookery.metrics.journal import Journal
from rookery.metrics.panel import Panel
from rookery.metrics.report import write_beside
from rookery.metrics.sink import Sinks
from rookery.metrics.tracker import check_trackers
from rookery.pipes.collective import Place, place_of
from rookery.play.policy import check_resumed
from rookery.processes.orphans import guarded
from rookery.processes.signals import Signals, Stopped
from rookery.processes.threads import Threads
from rookery.recipes.recipe import with_fields
from rookery.roles.learner import Learner
from rookery.run import init_from as warm
from rookery.run.auto import check_settled, settled
from rookery.run.configured import Env, asked
from rookery.run.env import check_env, resolve
from rookery.run.evaluation import Evaluations, policy_of
from rookery.run.finished import Run, trusted
from rookery.run.history import Changed, changed, check_changes, stamp, stored_env, with_history
from rookery.run.notes import rank_notes, rewound, warnings_of
from rookery.run.ranks import LocalRanks, RankLauncher, as_rank, supervise
from rookery.run.run_folder import clear_folder, folder_name, opened, rank_folder
from rookery.run.tracking import CLOSING as TRACKED_CLOSING
from rookery.run.tracking import trackers
from rookery.storage import checkpoint
from rookery.storage import folder as folders
from rookery.storage.claim import claimed
from rookery.storage.stored import absurd, check_arrays, check_room, read_config
from rookery.storage.trust import resume_command
from rookery.topologies.callbacks import Callbacks, Training
from rookery.topologies.callbacks import check as check_callbacks
from rookery.topologies.callbacks import paths as callback_paths
from rookery.topologies.job import Job, restore

CLOSING = 5.0  # seconds to write the last records


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=3)


def train(
    recipe: str | RunConfig, env: Env = "", *, preset: str = "", callbacks: Sequence[Any] = (), overwrite: bool = False,
    init_from: Any = None, init_best: bool = False, trust: tuple[str, ...] = (), **fields: Unpack[Fields],
) -> Run:  # fmt: skip
    """Train, and return the finished run: its folder, with checkpoints and a report, for `load`, `evaluate`, `resume`.

    `recipe`: its name ("ppo", "dqn", ...; `rookery recipes` lists them), or what `configure` returned, of which the
    fields given here are changed.
    `env`: an id, an import path "package.module:make", or what makes an environment: a function, a lambda, a class.

    The fields used most: `env_steps` (how long), `seed`, `out` (the folder), `quiet=True` (no panel), `actors=4`
    (processes), `target_return`, `algo={"lr": 1e-3}`, `net={"hidden": (64, 64), "core": "lstm"}`,
    `eval={"every": 10_000}`. All of them, with defaults: `rookery train ppo --help`, `rookery.core.config.RunConfig`.

    `callbacks`: see `rookery.Callback`; a plain function is called after every update.
    `preset`: a row of the recipe's table by its name, instead of the one for this environment.
    `overwrite`: delete what is in the folder `out` if it is a run that failed.
    `init_from`: begin with the networks of another run: its folder, one of its checkpoints, or a Run or Policy.
    `init_best`: with its best checkpoint, not the newest. `trust`: modules that its config.json may name.
    Ctrl-C writes a checkpoint and raises KeyboardInterrupt.

    >>> run = rookery.train("ppo", env="CartPole-v1", env_steps=2_000, algo={"lr": 1e-3}, quiet=True)
    >>> run.summary["env_steps"] >= 2_000
    True
    """
    check_not_importing()
    check_callbacks(callbacks)
    config, why = settled(check(asked(recipe, env, preset, fields, init_from, init_best, trust)))
    with _interrupting(), Signals() as signals:
        return _uninterrupted(start(config, signals, overwrite=overwrite, callbacks=callbacks, why=why))


@contextmanager
def _interrupting() -> Iterator[None]:
    """Ctrl-C before the run had begun is a KeyboardInterrupt for a Python caller."""
    try:
        yield
    except Stopped as stop:
        if stop.exit_code != INTERRUPT:
            raise
        raise KeyboardInterrupt(str(stop)) from stop


def _uninterrupted(run: Run) -> Run:
    if run.exit_code == INTERRUPT:
        env = ", env=..." if given(run.config.env) is not None else ""
        raise KeyboardInterrupt(f"interrupted; the checkpoint is written: rookery.resume({str(run.path)!r}{env})")
    return run


def start(
    config: RunConfig, signals: Signals, tell: Callable[[str], None] = _warn, overwrite: bool = False,
    callbacks: Sequence[Any] = (), why: str = "",
) -> Run:  # fmt: skip
    """Train a checked config, whose topology is settled (`why`: by a measurement, to be recorded).

    Signals that came before now count: the folder is written and can be resumed.
    """
    for note in check_env(config):
        tell(note)
    if config.topology == "allreduce" and (place := place_of()) is not None:
        return as_rank(_of_group(config, place), place, signals, rank_folder, callbacks=callbacks)
    config = replace(config, out=config.out or folder_name(config))
    folder = folders.real(config.out)
    warm.check_apart(config, folder)
    before = {path.name for path in folder.iterdir()} if folder.is_dir() else None
    with opened(folder, overwrite):
        if before is not None:  # a run that was overwritten has gone
            before &= {path.name for path in folder.iterdir()}
        try:
            warm.keep(config, folder)  # first: a folder with a config.json can be resumed
            folders.store(folder, "config.json", encode_config(config))
            return _carry_out(config, folder, None, [], signals, tell, callbacks, why)
        except UsageError:  # nothing has begun: the same command, corrected, finds the place free
            clear_folder(folder, before)
            raise
        except Stopped as stop:
            if stop.exit_code == INTERRUPT:
                clear_folder(folder, before)
            else:
                stop.add_note(f"continue with: {resume_command(folder, config)}")
            raise
        except RookeryError as error:
            error.add_note(f"run folder: {folder}")
            raise


def resume(
    path: str | os.PathLike[str], trust: tuple[str, ...] = (), *, env: Env = "", callbacks: Sequence[Any] = (),
    tell: Callable[[str], None] = _warn, **fields: Unpack[Fields],
) -> Run:  # fmt: skip
    """Continue a run from its newest complete checkpoint, or from the start if it has none yet.

    `env_steps=...` extends it. `trust`: modules that its config.json may name, besides what Rookery knows itself.
    `env`: what makes the environments, instead of what config.json names; needed if that was a lambda, or defined in a
    notebook. `callbacks`: as of `train`; they are not stored.
    `tell` is called with what could not be used: a damaged checkpoint, a missing replay memory.

    >>> longer = rookery.resume(run, env_steps=3_000)
    >>> longer.path == run.path, longer.summary["env_steps"] >= 3_000
    (True, True)
    """
    check_not_importing()
    check_callbacks(callbacks)
    own = resolve(env) if env else ""
    with _interrupting(), Signals() as signals:
        return _uninterrupted(go_on(path, trusted(path, trust), dict(fields), signals, tell, own, callbacks))


def go_on(
    path: str | os.PathLike[str], trust: tuple[str, ...], fields: dict[str, Any], signals: Signals,
    tell: Callable[[str], None], env: str = "", callbacks: Sequence[Any] = (),
) -> Run:  # fmt: skip
    """Resume with signal handlers installed by the caller; the dotted `fields` change. `env`: the caller's own."""
    check_changes(fields)
    folder = folders.real(Path(path))
    first = read_config(folder, trust, env)  # or it is not a run folder
    folders.check(folder)
    if first.topology == "allreduce" and (place := place_of()) is not None:
        config = _of_group(check(with_fields(first, {"fault_plan": "", "out": str(folder)} | fields)), place)
        changes = changed(replace(first, out=config.out), config)
        return as_rank(config, place, signals, rank_folder, resumed=changes, callbacks=callbacks)
    with claimed(folder):
        folders.sweep(folder)
        before, stored = read_config(folder, trust, env), folders.read(folder, "config.json")
        if before.compile and "compile" not in fields:  # a compiler is a program: no file starts it by itself
            raise UsageError(
                f"the run in {folder} uses torch.compile, which starts a compiler; "
                "resume it with compile=True to allow that, or with compile=False"
            )
        # A fault plan applies to one process; a resumed run needs it given again.
        config = check(with_fields(before, {"fault_plan": ""} | fields))
        check_settled(config)
        for note in check_env(config):
            tell(note)
        if checkpoint.all_steps(folder / "checkpoints") or folders.exists(folder, "summary.json"):
            saved, notes = checkpoint.newest_told(folder / "checkpoints")
            for note in notes:
                tell(note)
            _check_same(before, config)
        else:
            saved, notes = None, ["the run had no checkpoint yet: it starts from the beginning"]
        changes = changed(replace(before, env=stored_env(stored, config.env)), config)
        config = with_history(config, 0 if saved is None else saved.env_steps, changes)
        folders.store(folder, "config.json", encode_config(config))
        try:
            return _carry_out(config, folder, saved, notes, signals, tell, callbacks, resumed=changes)
        except (UsageError, CheckpointError) as error:  # it cannot be resumed like this: as it was, it still can
            folders.store(folder, "config.json", stored)
            if saved is not None and str(saved.path) not in str(error):
                error.add_note(f"checkpoint: {saved.path}")
            raise


def _check_same(before: RunConfig, config: RunConfig) -> None:
    for name in ("ranks", "actors", "envs_per_actor"):
        if getattr(config, name) != getattr(before, name):
            raise UsageError(
                f"the run has {name} {getattr(before, name)}, and its checkpoints hold the state of as many; "
                f"it cannot be resumed with {getattr(config, name)}: leave it as it is, or start a new run"
            )


def check(config: RunConfig) -> RunConfig:
    """The config as it will be written; what cannot be run is refused, before anything is written or started."""
    generic: Any = RunConfig  # its parameter is known at run time only
    config = within(config, kind=generic[type(config.algo)])
    if why := absurd(config):
        raise UsageError(why)
    if config.ranks > 1 and config.topology not in ("allreduce", "ray_cluster"):
        raise UsageError(
            f"{config.ranks} ranks need topology allreduce or ray_cluster, and this run has {config.topology}: name "
            "one of the two, or no topology at all"
        )
    if config.eval.stop and (config.eval.every == 0 or config.target_return is None):
        raise UsageError(
            f"{setting('eval.stop')} ends a run when an evaluation reaches the target return: "
            f"give {setting('target_return')} a value, and {setting('eval.every')} the steps between two evaluations"
        )
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            f"there is no CUDA device here (or this build of torch has no CUDA); use {setting('device', 'cpu')}"
        )
    check_trackers(config.track)
    return config


def _carry_out(
    config: RunConfig, folder: Path, saved: checkpoint.Checkpoint | None, notes: list[str], signals: Signals,
    tell: Callable[[str], None], callbacks: Sequence[Any] = (), why: str = "", resumed: Changed | None = None,
) -> Run:  # fmt: skip
    """Train in this process, or in one for each rank. `resumed`: what the resume has changed; None: a new run."""
    if config.ranks == 1:
        return execute(config, folder, saved, notes, signals, tell, callbacks=callbacks, why=why, resumed=resumed)
    named = callback_paths(callbacks)
    for note in rank_notes(config):
        tell(note)
    with _ranks(config) as (for_ranks, launcher):
        code = supervise(for_ranks, folder, saved, notes, signals, tell, launcher, named, resumed)
    return Run(folder, config, json.loads((folder / "summary.json").read_text()), code)


def _ranks(config: RunConfig) -> AbstractContextManager[tuple[RunConfig, RankLauncher]]:
    """The config for the ranks, and what starts them."""
    if config.topology == "ray_cluster":
        from rookery.topologies import ray_cluster

        return ray_cluster.ranks(config)
    return nullcontext((config, LocalRanks()))


def _of_group(config: RunConfig, place: Place) -> RunConfig:
    """The config with as many ranks as torchrun has started."""
    if config.ranks not in (1, place.size):
        raise UsageError(f"{setting('ranks')} is {config.ranks}, and torchrun has started {place.size}: leave it out")
    return check(replace(config, ranks=place.size))


@guarded()
def execute(
    config: RunConfig, folder: Path, saved: checkpoint.Checkpoint | None, notes: list[str], signals: Signals,
    tell: Callable[[str], None] = _warn, group: Reduce = ALONE, callbacks: Sequence[Any] = (), why: str = "",
    resumed: Changed | None = None,
) -> Run:  # fmt: skip
    """Train in this process; with a group, as one rank of it. `why` it has its topology, if that was measured.

    `resumed`: as above.
    """
    signals.check()
    topology = importlib.import_module(f"rookery.topologies.{config.topology}")
    threads, ends = Threads(config), ExitStack()
    with _told(config, folder, signals, group.rank) as (sinks, panel):
        journal = Journal(config, sinks, panel, rank=group.rank)

        def open_job(spec: EnvSpec) -> Job:
            signals.check()
            algorithm = build_algorithm(config, spec)
            check_room(algorithm) if saved is None else check_resumed(algorithm, spec, saved, folder)
            learner = Learner(algorithm, config.seed, config.device, config.compile, group)
            check_arrays(config, algorithm, learner.nets, spec)
            if not config.threads:
                threads.fit(algorithm.work(learner.nets))
            if group.rank == 0:
                folders.store(folder, "spec.json", msgspec.json.encode(spec))
            job = Job(config, algorithm, learner, journal, folder, signals, threads, spec, tell=tell)
            behind, evaluated = rewound(folder, saved, journal) if group.rank == 0 else ([], [])
            told = [*notes, *warnings_of(config), *behind]
            if saved is not None:
                restore(job, saved)
            elif begun := warm.begin(config, folder, learner, spec):
                told.append(begun)
            journal.chose(why)
            if resumed is not None:
                journal.resumed({**stamp(), "changed": resumed})
            for note in told:
                journal.say(note)
            if callbacks:
                job.callbacks = Callbacks(callbacks, Training(job, partial(policy_of, job)))
            if group.rank == 0 and (config.eval.every or callbacks):
                job.evaluator = ends.enter_context(Evaluations(job, evaluated))
            return job

        try:
            more = {} if group.size == 1 else {"group": group}
            job = topology.run(config, folder, signals, open_job, **more)
        except UsageError as error:
            if not journal.begun:
                raise
            gone = EnvError(f"environments that could be made before cannot any more: {error}")
            gone.__notes__ = getattr(error, "__notes__", [])
            raise gone from error
        finally:
            ends.close()
            threads.restore()
        code = signals.requested or 0
        summary = _summary(job, code)
        sinks.ended(summary, code)
    summary["records_lost"] = sinks.lost
    if group.rank == 0:
        folders.store(folder, "summary.json", json.dumps(summary, indent=2).encode())
        write_beside(folder, tell)
    return Run(folder, config, summary, code, group.rank)


def _summary(job: Job, code: int) -> dict[str, Any]:
    """Of a run that has ended with this exit code, after its last record."""
    journal, learner = job.journal, job.learner
    journal.report(force=True)
    if not learner.updates:
        journal.say(
            f"the run ended before its first update, nothing was learnt: take more steps ({setting('env_steps')})"
        )
    reason = {0: journal.finished() or "done", INTERRUPT: "interrupted", REQUEUE: "requeue"}[code]
    return journal.summary(reason, learner.updates, learner.skipped)


@contextmanager
def _told(config: RunConfig, folder: Path, signals: Signals, rank: int) -> Iterator[tuple[Sinks, Panel]]:
    """Sinks and panel of a run. At its end they get a few seconds, less if shutdown was requested.

    Those of the first rank: the others write to their logs.
    """
    sinks = Sinks.of_run(folder, more=trackers(config, folder)) if rank == 0 else Sinks([])
    panel, closing = Panel(config.quiet or rank > 0), TRACKED_CLOSING if config.track else CLOSING
    try:
        yield sinks, panel
    except BaseException as error:
        sinks.ended({"error": str(error)}, getattr(error, "exit_code", LearnerError.exit_code))
        raise
    finally:
        panel.close()
        hurried = signals.requested is not None
        sinks.close(min(closing, max(0.5, config.supervisor.grace / 10)) if hurried else closing)
