"""A sweep: many runs of one recipe on one machine, which differ by some fields and by their seed.

A folder: sweep.json (what is asked for), runs/NAME/ (ordinary run folders), failures.json, optuna.log with trials, and
at the end summary.json and sweep.md. Whatever has ended the sweep, it goes on from that folder: complete runs are kept,
interrupted ones resumed from their checkpoints. Each run is a process of its own (`runner.py`).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgspec

from rookery.core.config import RunConfig
from rookery.core.errors import INTERRUPT, CheckpointError, RookeryError, StorageError, UsageError
from rookery.core.fields import Fields
from rookery.core.types import EnvSpec
from rookery.envs.given import check_not_importing, given, unguarded
from rookery.processes.signals import Signals, Stopped
from rookery.recipes import RECIPES
from rookery.recipes import recipe as recipe_named
from rookery.run.configured import asked as asked_config
from rookery.run.env import spec_of
from rookery.run.run import check
from rookery.storage import folder as folders
from rookery.storage.claim import claimed
from rookery.storage.trust import findings
from rookery.sweeps import plan as plans
from rookery.sweeps.budget import jobs_for, memory_note, with_threads
from rookery.sweeps.plan import Plan, Planned, Range
from rookery.sweeps.result import (
    Sweep,
    SweepRun,
    final_value,
    outcomes,
    read_summary,
    train_command,
    write,
)
from rookery.sweeps.runner import LOG, Ended, Runner
from rookery.sweeps.study import Grid, Source, Trials, import_optuna, objective
from rookery.sweeps.view import View, opened_view

FAILURES = "failures.json"
PROBE = 10.0  # seconds an environment may take to report its spaces, once shutdown is requested
TICK = 0.5  # seconds between two looks at the runs
RESUMABLE = ("interrupted", "requeue")  # how a run has ended that can go on

Spec = Callable[[str, dict[str, Any]], EnvSpec]


def sweep(
    recipe: str | RunConfig, env: Any = "", *, preset: str = "", seeds: int | Sequence[int] | None = None,
    set: Mapping[str, Sequence[Any]] | None = None, search: Mapping[str, tuple[str, float, float]] | None = None,
    optuna: int = 0, jobs: int | None = None, out: str | Path = "", retry: bool = False, **fields: Any,
) -> Sweep:  # fmt: skip
    """Train a recipe with several settings and seeds, and compare them.

    `set`: for each field by its dotted path the values to try, in every combination. `seeds`: how many, from 1, or
    which; 5 if nothing is said. `jobs`: how many runs train at a time, each in a process of its own. Other fields are
    those of `rookery.train`.
    `optuna`: instead of every combination, so many trials, sampled from the values and from `search`, which has ranges:
    `{"algo.lr": ("log", 1e-5, 1e-2), "algo.epochs": ("range", 1, 20)}`. A trial is one run unless `seeds` says more.
    `out`: the folder. Called again with the same one, a sweep goes on where it was: complete runs are kept, interrupted
    ones resumed, and those that failed are tried again with `retry=True`. More values, seeds and trials may be given.
    Ctrl-C has all runs write a checkpoint, and raises KeyboardInterrupt.

    >>> found = rookery.sweep(
    ...     "ppo", env="CartPole-v1", set={"algo.lr": [1e-3]}, seeds=1, env_steps=1_000, out="sweep", quiet=True
    ... )
    >>> found.best.values, found.best.row.runs
    ({'algo.lr': 0.001}, 1)
    >>> run = rookery.train(found.best.config, env_steps=2_000, out="again", quiet=True)
    """
    check_not_importing()
    if not isinstance(recipe, RunConfig) and not env:
        raise UsageError('which environment? sweep("ppo", env="CartPole-v1")')
    if "seed" in fields:
        raise UsageError("seed cannot be given: give the seeds of the sweep, seeds=5 or seeds=[7]")
    base = asked_config(recipe, env, preset, cast(Fields, fields))
    name = recipe.recipe if isinstance(recipe, RunConfig) else recipe
    ranges = {path: plans.range_of(path, each) for path, each in (search or {}).items()}
    asked = asked_plan(base, name, {**(set or {})}, ranges, seeds, optuna, jobs)
    try:
        with Signals() as signals, opened_view(base.quiet) as view:
            found = start(asked, out, signals, view, retry)
    except Stopped as stop:
        if stop.exit_code != INTERRUPT:
            raise
        raise KeyboardInterrupt(str(stop)) from stop
    if found.exit_code == INTERRUPT:
        raise KeyboardInterrupt(f"interrupted; the same call with out={str(found.path)!r} goes on")
    return found


def asked_plan(
    base: RunConfig, recipe: str, grid: dict[str, Any], search: dict[str, Range], seeds: int | Sequence[int] | None,
    trials: int, jobs: int | None,
) -> Plan:  # fmt: skip
    """What is asked for, with what follows from the machine; not checked yet."""
    if jobs is not None and jobs < 1:
        raise UsageError(f"jobs is {jobs}; it must be 1 or more")
    if trials < 0:
        raise UsageError(f"{trials} trials cannot be made")
    base = check(replace(base, out="", quiet=True, seed=1))
    if base.topology == "auto":  # several runs use the cores better than several processes of one
        base = replace(base, topology="serial")
    count = plans.TRIAL_SEEDS if trials else plans.SEEDS
    return Plan(
        base, grid, search, plans.seeds_of(count if seeds is None else seeds), trials, jobs or jobs_for(base), recipe
    )


def start(plan: Plan, out: str | Path, signals: Signals, view: View, retry: bool = False) -> Sweep:
    """Carry out a plan in a folder: a new one, or that of the same sweep, which goes on."""
    folder = folders.real(out or _free_name(plan.base))
    spec = functools.cache(lambda env, kwargs: spec_of(env, json.loads(kwargs)))
    with signals.interruptible(PROBE):  # an environment may take long to say what it is
        plan = _accepted(plan, lambda env, kwargs: spec(env, json.dumps(kwargs, sort_keys=True)), view)
    if folder.is_dir() and folders.exists(folder, "config.json"):
        raise UsageError(f"{folder} holds a run, and a sweep has a folder of its own: choose another")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"cannot write the folder {folder}: {error.strerror or error}") from error
    with claimed(folder):
        folders.sweep(folder)
        if folders.exists(folder, plans.FILE):
            old = plans.stored(folder)
            if not plan.base.threads and isinstance(threads := old.base.get("threads"), int):
                plan = replace(plan, base=check(replace(plan.base, threads=threads)))
            if wrong := plans.differences(old, plan):
                raise UsageError(f"{folder} holds another sweep, with {', '.join(wrong[:5])}: choose another folder")
        plan = replace(plan, base=with_threads(plan.base, plan.jobs))
        return _carry_out(plan, folder, signals, view, retry, spec)


def go_on(
    path: str | Path, trust: Sequence[str], signals: Signals, view: View, retry: bool = False, jobs: int | None = None,
    seeds: int | Sequence[int] | None = None, trials: int | None = None,
) -> Sweep:  # fmt: skip
    """Go on with the sweep of a folder, which may come from another person."""
    folder = folders.real(path)
    if not folders.exists(folder, plans.FILE):
        raise CheckpointError(f"{folder} is not the folder of a sweep: it has no {plans.FILE}")
    plan = plans.planned(plans.stored(folder), trust)
    if plan.base.compile:
        raise UsageError(
            f"the runs in {folder} use torch.compile, which starts a compiler, and a file does not start one: give the "
            "whole command again with this folder"
        )
    own = plan.seeds if seeds is None else plans.seeds_of(seeds)
    plan = replace(plan, jobs=jobs or plan.jobs, trials=trials or plan.trials, seeds=own)
    return start(plan, folder, signals, view, retry)


def _accepted(plan: Plan, spec: Spec, view: View) -> Plan:
    """What cannot be trained is refused here, before anything is written or started."""
    known = given(plan.base.env)
    if known is not None and known.why:
        raise UsageError(
            f"env {plan.base.env} {known.why}, and every run of a sweep is a process of its own, which imports its "
            "environment: write it as a function at the top level of a module or script"
        )
    if known is not None and known.script and unguarded(known.script):
        view.say(f'{known.script} has no `if __name__ == "__main__":`; every run imports it and runs its top level')
    if plan.trials:
        import_optuna()
    return plans.checked(plan, spec)


def _free_name(base: RunConfig) -> str:
    from rookery.run.run_folder import folder_name

    return folder_name(base).replace("runs/", "runs/sweep-", 1).replace(f"-{base.seed}-", "-", 1)


# Carrying it out


def _carry_out(
    plan: Plan, folder: Path, signals: Signals, view: View, retry: bool, spec: Callable[[str, str], EnvSpec]
) -> Sweep:
    if note := memory_note(plan.base, plan.jobs):
        view.say(note)
    plans.store(plan, folder)
    source: Source = Trials(plan, folder) if plan.trials else Grid(plan)
    work = Work(plan, folder, source, signals, view, retry)
    with Runner(plan.jobs, signals) as runner:
        work.until_done(runner)
    runs = list(work.runs.values())
    failed = next((run.exit_code for run in runs if run.state in ("failed", "stopped")), 0)
    table = outcomes(plan, source.settings, runs)
    found = Sweep(folder, plan, runs, table, (signals.requested or 0) or failed)
    found = replace(found, command=_command(found, spec))
    write(found)
    return found


def _command(found: Sweep, spec: Callable[[str, str], EnvSpec]) -> str:
    """The command that trains the best setting; empty if nothing has a result, or its recipe is code of the user's."""
    best, base = found.best, found.plan.base
    if best is None or given(base.env) is not None or found.plan.recipe not in RECIPES:
        return ""
    chosen = recipe_named(found.plan.recipe)

    def look() -> EnvSpec:
        return spec(base.env, json.dumps(base.env_kwargs, sort_keys=True))

    usual = chosen.build(base.env, look)
    plain = usual if usual.preset == base.preset else chosen.build(base.env, look, base.preset)
    return train_command(found.plan.recipe, best, plain, "" if plain is usual else base.preset)


class Work:
    """All runs of a sweep and what is known of each."""

    def __init__(self, plan: Plan, folder: Path, source: Source, signals: Signals, view: View, retry: bool):
        self._plan, self._folder, self._source = plan, folder, source
        self._signals, self._view, self._retry = signals, view, retry
        self._failures = _failures(folder)
        self._waiting: list[Planned] = []
        self.runs: dict[str, SweepRun] = {}

    def until_done(self, runner: Runner) -> None:
        """Start what is to be trained, as many at a time as the runner has places, until nothing is left."""
        while True:
            self._fill(runner)
            self._view.update(list(self.runs.values()), self._plan.total)
            if not runner.running:
                return
            for end in runner.wait(TICK):
                self._ended(end)

    def _fill(self, runner: Runner) -> None:
        while runner.free and self._signals.requested is None:
            if not self._waiting:
                self._waiting = self._add(self._source.next())
                if not self._waiting:
                    return
            run = self._waiting.pop(0)
            known = self.runs[run.name]
            if known.state == "waiting":
                self._start(runner, run)

    def _add(self, planned: list[Planned]) -> list[Planned]:
        """The runs of one or more settings become known: some may be complete already."""
        for run in planned:
            path = self._folder / "runs" / run.name
            steps = run.values.get("env_steps", self._plan.base.env_steps)
            self.runs[run.name] = SweepRun(run.name, path, run.setting, run.values, run.seed, steps)
            self._look(self.runs[run.name])
        for setting in dict.fromkeys(run.setting for run in planned):
            self._tell(setting)
        return planned

    def _look(self, run: SweepRun) -> None:
        """What the folder of a run says of it."""
        if run.name in self._failures and not self._retry:
            failure = self._failures[run.name]
            run.state, run.error, run.exit_code = "failed", failure.error, failure.exit_code
        elif (summary := read_summary(run.path)) and summary.get("exit_reason") not in RESUMABLE:
            run.state, run.summary = "done", summary

    def _start(self, runner: Runner, run: Planned) -> None:
        config = self._plan.config(run, self._folder)
        trust = [each.module for each in findings(msgspec.to_builtins(config)) if each.module]
        try:
            with folders.opened(self._folder, f"runs/{run.name}", create=True):  # or there is a link in its place
                begun = folders.exists(Path(config.out), "config.json")
            runner.start(run.name, config, begun, trust)
            self.runs[run.name].state = "running"
        except OSError as error:
            self._ended(Ended(run.name, StorageError.exit_code, f"cannot use {config.out}: {error.strerror or error}"))
        except RookeryError as error:
            self._ended(Ended(run.name, error.exit_code, str(error)))

    def _ended(self, end: Ended) -> None:
        run = self.runs[end.name]
        run.exit_code, run.summary = end.exit_code, read_summary(run.path)
        self._failures.pop(run.name, None)
        if end.stopped:
            run.state = "stopped"
        elif end.exit_code:
            run.state, run.error = "failed", end.error
            self._failures[run.name] = Failure(end.exit_code, end.error)
            self._view.say(f"run {run.name} has failed (its output is in {run.path / LOG}): {end.error}")
        else:
            run.state = "done"
        folders.store(self._folder, FAILURES, msgspec.json.encode(self._failures))
        self._tell(run.setting)

    def _tell(self, setting: str) -> None:
        """Tell the source of a setting, once all of its runs have ended."""
        runs = [run for run in self.runs.values() if run.setting == setting]
        if any(run.state not in ("done", "failed") for run in runs):
            return
        values = [final_value(run.path) if run.state == "done" else None for run in runs]
        self._source.ended(setting, objective(values))


class Failure(msgspec.Struct):
    exit_code: int
    error: str


def _failures(folder: Path) -> dict[str, Failure]:
    if not folders.exists(folder, FAILURES):
        return {}
    try:
        return msgspec.json.decode(folders.read(folder, FAILURES), type=dict[str, Failure])
    except (msgspec.DecodeError, RecursionError) as error:
        raise CheckpointError(
            f"{folder / FAILURES} cannot be read: {error}; remove it to try these runs again"
        ) from error
