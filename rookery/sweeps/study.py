"""Which settings are tried: every combination of the grid, or trials that Optuna samples one after another.

Both answer `next()`, the runs to train next, and are told with `ended` when all runs of a setting are done. Optuna
keeps its study in `optuna.log` in the folder of the sweep: lines of JSON, so that opening it runs no code. The folder
is claimed by one process, so the file needs no lock of its own.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from rookery.core.errors import CheckpointError, RookeryError, StorageError, UsageError
from rookery.storage import folder as folders
from rookery.sweeps.plan import Plan, Planned, Setting, hint_of, numeric

FILE = "optuna.log"
MOST = 1 << 28  # bytes of it
NAME = "sweep"
AGAIN = "trial"  # attribute of an entry that repeats a trial that had failed: which one


class Source(Protocol):
    settings: list[Setting]  # all that are known

    def next(self) -> list[Planned]: ...
    def ended(self, setting: str, value: float | None) -> None: ...


class Grid:
    """Every combination, with the first seed first: a view of all settings comes early."""

    def __init__(self, plan: Plan):
        self.settings = list(plan.settings())
        by_setting = [setting.runs(plan.seeds) for setting in self.settings]
        self._runs = [run for runs in zip(*by_setting) for run in runs]

    def next(self) -> list[Planned]:
        runs, self._runs = self._runs, []
        return runs

    def ended(self, setting: str, value: float | None) -> None:
        pass


class Trials:
    """The tree-structured Parzen estimator, seeded by the number of a trial: a study that was interrupted goes on as it
    would have. With several runs at a time, what is known when a trial is sampled depends on which ends first."""

    def __init__(self, plan: Plan, folder: Path):
        self._optuna, self._plan = import_optuna(), plan
        self._study = _study(self._optuna, folder)
        self._ints = {path: numeric(hint_of(plan.base, path)) is int for path in plan.search}
        self.settings: list[Setting] = []
        self._numbers: dict[str, int] = {}  # trial by the name of its setting
        self._old: list[Setting] = []  # ended before: their runs belong to the table, or are to be tried again
        self._open: list[Setting] = []  # interrupted: to be trained first
        self._failed: set[int] = set()  # trials, without those that were repeated
        for trial in self._study.get_trials(deepcopy=False):
            if AGAIN in trial.user_attrs:
                self._failed -= {number for number in self._failed if number == trial.user_attrs[AGAIN]}
                continue
            setting = self._setting(trial)
            (self._old if trial.state.is_finished() else self._open).append(setting)
            if trial.state == self._optuna.trial.TrialState.FAIL:
                self._failed.add(trial.number)

    def next(self) -> list[Planned]:
        if self._old:
            settings, self._old = self._old, []
            return [run for setting in settings for run in setting.runs(self._plan.seeds)]
        if self._open:
            return self._open.pop(0).runs(self._plan.seeds)
        if len(self.settings) >= self._plan.trials:
            return []
        return self._setting(None).runs(self._plan.seeds)

    def ended(self, setting: str, value: float | None) -> None:
        """`value`: what is maximised; None: a run of the trial has failed."""
        number, states = self._numbers[setting], self._optuna.trial.TrialState
        trial = self._study.get_trials(deepcopy=False)[number]
        if trial.state == states.RUNNING and value is None:
            self._study.tell(number, state=states.FAIL)
        elif trial.state == states.RUNNING:
            self._study.tell(number, value)
        elif value is not None and number in self._failed:
            attributes = {AGAIN: number}
            create = self._optuna.trial.create_trial
            self._study.add_trial(
                create(value=value, params=trial.params, distributions=trial.distributions, user_attrs=attributes)
            )
            self._failed.remove(number)

    def _setting(self, stored: Any) -> Setting:
        """Of a stored trial, of which values may be missing if it was interrupted; None: of a new one."""
        number = stored.number if stored is not None else len(self._study.get_trials(deepcopy=False))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # constant_liar is called experimental
            sampler = self._optuna.samplers.TPESampler
            self._study.sampler = sampler(seed=_seed(self._plan, number), constant_liar=self._plan.jobs > 1)
        if stored is None:
            trial = self._study.ask()
        elif stored.state.is_finished():
            trial = self._optuna.trial.FixedTrial(stored.params)
        else:
            trial = self._optuna.trial.Trial(self._study, stored._trial_id)
        try:
            values = {path: self._value(trial, path) for path in (*self._plan.grid, *self._plan.search)}
        except (ValueError, KeyError) as error:
            raise CheckpointError(f"trial {number} in {FILE} does not fit the fields of this sweep: {error}") from error
        setting = Setting(f"trial-{number:04d}", values)
        self.settings.append(setting)
        self._numbers[setting.name] = number
        return setting

    def _value(self, trial: Any, path: str) -> Any:
        if path in self._plan.search:
            each = self._plan.search[path]
            if self._ints[path]:
                return trial.suggest_int(path, int(each.low), int(each.high), log=each.log)
            return trial.suggest_float(path, each.low, each.high, log=each.log)
        choices = {_choice(value): value for value in self._plan.grid[path]}
        return choices[trial.suggest_categorical(path, list(choices))]


def _choice(value: Any) -> Any:
    """As Optuna stores it: lists and names as JSON."""
    return msgspec.json.encode(value).decode() if isinstance(value, list | dict) else value


def _seed(plan: Plan, number: int) -> int:
    return int(np.random.SeedSequence([plan.seeds[0], number]).generate_state(1)[0])


def import_optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise UsageError("trials are sampled by Optuna, which is not installed: pip install 'rookery[tune]'") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


class Claimed:
    """The lock of a file that no other process uses, because the folder is claimed."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        pass


def _study(optuna: Any, folder: Path) -> Any:
    path, journal = folder / FILE, optuna.storages.journal
    try:
        fd = folders.open_regular(folder, FILE, os.O_RDWR | os.O_CREAT, sole=True)
        with open(fd, "r+b") as file:
            _cut_torn_line(file, path)
        storage = optuna.storages.JournalStorage(journal.JournalFileBackend(str(path), lock_obj=Claimed()))
        return optuna.create_study(storage=storage, study_name=NAME, direction="maximize", load_if_exists=True)
    except OSError as error:
        raise StorageError(f"cannot use {path}: {error.strerror or error}") from error
    except RookeryError:
        raise
    except Exception as error:  # whatever Optuna makes of a damaged file
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def _cut_torn_line(file: Any, path: Path) -> None:
    """A process that was killed while it wrote has left a part of a line, which the next one would continue."""
    size = file.seek(0, os.SEEK_END)
    if size > MOST:
        raise CheckpointError(f"{path} has more than {MOST:,} bytes, and what Optuna writes there never has")
    file.seek(0)
    whole = file.read().rfind(b"\n") + 1
    if whole < size:
        file.truncate(whole)


def objective(values: Sequence[float | None]) -> float | None:
    """Of a trial from its runs: the mean, if every one has a result."""
    known = [value for value in values if value is not None and np.isfinite(value)]
    return float(np.mean(known)) if known and len(known) == len(values) else None
