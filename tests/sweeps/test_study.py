"""Trials: seeded, stored as lines of JSON, continued where they were; what was interrupted or failed is not lost."""

from __future__ import annotations

import builtins
import json

import pytest

from rookery.core.errors import CheckpointError, UsageError
from rookery.run.configured import configure
from rookery.sweeps import study
from rookery.sweeps.plan import Plan, Range
from rookery.sweeps.study import Grid, Trials, objective

GRID = {"net.hidden": [[64, 64], [32]], "net.activation": ["tanh", "relu"]}
SEARCH = {"algo.lr": Range(1e-5, 1e-2, log=True), "algo.epochs": Range(1, 20)}


@pytest.fixture(scope="module")
def base():
    return configure("ppo", "CartPole-v1")


def tried(plan: Plan, folder, values=None) -> list[dict]:
    """Carry out all trials that are left, with a made-up result for each."""
    trials, found = Trials(plan, folder), []
    while runs := trials.next():
        for name in dict.fromkeys(run.setting for run in runs):
            (values_of,) = [setting.values for setting in trials.settings if setting.name == name]
            found.append(values_of)
            trials.ended(name, -abs(values_of["algo.lr"] - 1e-3))
    return found


def test_a_study_that_goes_on_samples_what_it_would_have(base, tmp_path):
    plan = Plan(base, GRID, SEARCH, seeds=(1,), trials=14)  # the first ten are random
    whole = tried(plan, tmp_path / "whole" if (tmp_path / "whole").mkdir() is None else None)
    (tmp_path / "parts").mkdir()
    first = tried(Plan(base, GRID, SEARCH, seeds=(1,), trials=11), tmp_path / "parts")
    again = tried(plan, tmp_path / "parts")  # those that ended come first: their runs belong to the table
    assert len(whole) == 14 and first == whole[:11] and again == whole
    assert len({values["algo.lr"] for values in whole}) == 14
    assert all(1e-5 <= v["algo.lr"] <= 1e-2 and isinstance(v["algo.epochs"], int) for v in whole)
    assert all(values["net.hidden"] in GRID["net.hidden"] for values in whole)
    for line in (tmp_path / "parts" / study.FILE).read_text().splitlines():
        json.loads(line)


def test_another_first_seed_samples_other_values(base, tmp_path):
    for seed in (1, 2):
        (tmp_path / str(seed)).mkdir()
    one, two = (tried(Plan(base, {}, SEARCH, seeds=(seed,), trials=1), tmp_path / str(seed)) for seed in (1, 2))
    assert one != two


def test_an_interrupted_trial_is_trained_first_with_the_same_values(base, tmp_path):
    plan = Plan(base, GRID, SEARCH, seeds=(1, 2), trials=2)
    before = Trials(plan, tmp_path).next()
    path = tmp_path / study.FILE
    path.write_bytes(path.read_bytes() + b'{"op_code":4,"work')  # killed while it wrote
    trials = Trials(plan, tmp_path)
    assert trials.next() == before and [run.seed for run in before] == [1, 2]
    assert [run.setting for run in trials.next()] == ["trial-0001", "trial-0001"] and trials.next() == []


def test_a_failed_trial_that_succeeds_later_counts_once(base, tmp_path):
    plan = Plan(base, {}, SEARCH, seeds=(1,), trials=2)
    trials = Trials(plan, tmp_path)
    (failed,), (good,) = trials.next(), trials.next()
    trials.ended(failed.setting, None)
    trials.ended(good.setting, 1.0)
    again = Trials(plan, tmp_path)
    assert again.next() == [failed, good] and again.next() == []
    again.ended(failed.setting, 2.0)
    again.ended(failed.setting, 2.0)
    last = Trials(Plan(base, {}, SEARCH, seeds=(1,), trials=3), tmp_path)
    assert last.next() == [failed, good] and len(last.next()) == 1 and last.next() == []
    values = [trial.value for trial in last._study.get_trials()]
    assert values[:3] == [None, 1.0, 2.0]


def test_a_log_of_another_sweep_or_none_is_refused(base, tmp_path):
    tried(Plan(base, {}, SEARCH, seeds=(1,), trials=1), tmp_path)
    with pytest.raises(CheckpointError, match="does not fit the fields of this sweep"):
        Trials(Plan(base, {}, {"algo.clip": Range(0, 1)}, seeds=(1,), trials=1), tmp_path)
    (tmp_path / study.FILE).write_text('{"op_code": 99}\n[1]\n')
    with pytest.raises(CheckpointError, match="cannot be read"):
        Trials(Plan(base, {}, SEARCH, trials=1), tmp_path)


def test_the_extra_is_named_if_optuna_is_missing(monkeypatch):
    real = builtins.__import__

    def without(name, *more):
        if name == "optuna":
            raise ModuleNotFoundError(name)
        return real(name, *more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UsageError, match=r"rookery\[tune\]"):
        study.import_optuna()


def test_a_grid_begins_with_the_first_seed_of_every_setting(base):
    grid = Grid(Plan(base, {"algo.lr": [1e-3, 1e-4]}, seeds=(1, 2)))
    assert [(run.values["algo.lr"], run.seed) for run in grid.next()] == [(1e-3, 1), (1e-4, 1), (1e-3, 2), (1e-4, 2)]
    assert grid.next() == []


def test_a_trial_is_judged_by_all_of_its_runs():
    assert objective([1.0, 3.0]) == 2.0
    assert objective([1.0, None]) is None and objective([]) is None and objective([float("nan")]) is None
