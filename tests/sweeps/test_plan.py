"""What a sweep is asked to do: every combination, with names that follow from the values; mistakes are told before."""

from __future__ import annotations

import json

import pytest

from rookery.core.errors import CheckpointError, UsageError
from rookery.core.machine import Machine
from rookery.run.configured import configure
from rookery.run.env import spec_of
from rookery.storage.trust import Refused
from rookery.sweeps import plan as plans
from rookery.sweeps.budget import cores_of, jobs_for, memory_note, with_threads
from rookery.sweeps.plan import Plan, Range, checked, seeds_of, setting_name


@pytest.fixture(scope="module")
def base():
    return configure("ppo", "CartPole-v1", env_steps=500, topology="serial")


@pytest.fixture(scope="module")
def look():
    spec = spec_of("CartPole-v1", {})
    return lambda env, kwargs: spec


def test_a_grid_is_every_combination_and_each_is_trained_with_every_seed(base, look, tmp_path):
    plan = checked(Plan(base, {"algo.lr": [1e-4, 3e-4], "net.hidden": [(64, 64), [32]]}, seeds=(3, 7)), look)
    settings = list(plan.settings())
    assert [each.name for each in settings] == [
        "lr-0.0001-hidden-64x64", "lr-0.0001-hidden-32", "lr-0.0003-hidden-64x64", "lr-0.0003-hidden-32",
    ]  # fmt: skip
    assert plan.total == 8
    run = settings[1].runs(plan.seeds)[1]
    config = plan.config(run, tmp_path)
    assert (config.algo.lr, tuple(config.net.hidden), config.seed) == (1e-4, (32,), 7)
    assert config.out == str(tmp_path / "runs" / "lr-0.0001-hidden-32-seed-7")


def test_the_name_of_a_setting_follows_from_its_values_alone():
    titles = {"fault_plan": "fault_plan", "algo.lr": "lr"}
    one, other = (setting_name({"fault_plan": plan}, titles) for plan in ("a@b", "a:b"))
    assert one != other and one.startswith("fault_plan-a_b-") and "/" not in setting_name({"algo.lr": "../x"}, titles)
    assert len(setting_name({"fault_plan": "x" * 500}, titles)) < 120
    assert setting_name({}, {}) == "base"
    kwargs = [setting_name({"env_kwargs": {"limit": limit}}, {"env_kwargs": "env_kwargs"}) for limit in (1, "1")]
    assert kwargs[0] != kwargs[1] and all(name.startswith("env_kwargs-limit-1-") for name in kwargs)


def test_fields_with_the_same_last_part_keep_their_path(base):
    plan = Plan(base, {"algo.lr": [1], "algo.replay.alpha": [1], "net.alpha": [1]})
    assert plan.titles() == {"algo.lr": "lr", "algo.replay.alpha": "algo.replay.alpha", "net.alpha": "net.alpha"}


@pytest.mark.parametrize(
    "grid, why",
    [
        ({"algo.lrr": [1]}, "no field 'algo.lrr' to vary; did you mean algo.lr"),
        ({"lr": [1]}, "did you mean algo.lr"),
        ({"algo": {"lr": [1]}}, r"write fields of a group by their dotted path, {'algo.lr': \[...\]}"),
        ({"algo": [1]}, "algo is a group of fields; vary one of them, such as algo.unroll"),
        ({"seed": [1, 2]}, "seed cannot be varied: give the seeds of the sweep"),
        ({"env": ["A", "B"]}, "env cannot be varied: a sweep has one environment"),
        ({"algo.lr": 1e-3}, "algo.lr: give a list of the values to try, and not 0.001"),
        ({"algo.lr": []}, "give a list of the values"),
        ({"algo.lr": ["much"]}, "algo.lr is 'much'; it must be"),
        ({"algo.gamma": [0.9, 1.5]}, "algo.gamma is 1.5; it must be from 0 to 1"),
        ({"topology": ["serial", "auto"]}, "topology auto cannot be a value in a sweep"),
        ({"algo.minibatches": [1, 7]}, "7"),  # of a batch that cannot be divided by it
    ],
)
def test_a_wrong_field_or_value_is_told(base, look, grid, why):
    with pytest.raises(UsageError, match=why):
        checked(Plan(base, grid), look)


def test_a_wrong_combination_is_named(base, look):
    with pytest.raises(UsageError) as caught:
        checked(Plan(base, {"algo.unroll": [32, 35], "algo.minibatches": [16]}), look)
    assert caught.value.__notes__ == ["with algo.unroll 35, algo.minibatches 16"]


@pytest.mark.parametrize(
    "search, why",
    [
        ({"algo.lr": Range(1e-2, 1e-4)}, "the first must be lower"),
        ({"algo.lr": Range(0.0, 1e-4, log=True)}, "lower and above 0"),
        ({"net.activation": Range(0, 1)}, "net.activation is no number"),
        ({"algo.gamma": Range(0.5, 2.0)}, "algo.gamma is 2.0; it must be from 0 to 1"),
    ],
)
def test_a_wrong_range_is_told(base, look, search, why):
    with pytest.raises(UsageError, match=why):
        checked(Plan(base, search=search, trials=2), look)
    with pytest.raises(UsageError, match="values and a range"):
        checked(Plan(base, {"algo.lr": [1e-3]}, {"algo.lr": Range(0, 1)}, trials=2), look)
    with pytest.raises(UsageError, match="trials need something to sample"):
        checked(Plan(base, trials=2), look)


def test_seeds_are_a_number_or_a_list():
    assert seeds_of(3) == (1, 2, 3) and seeds_of([7]) == (7,)
    for wrong in (0, [], [1, 1], [-1], ["a"]):
        with pytest.raises(UsageError, match="it must be how many"):
            seeds_of(wrong)


def test_a_stored_plan_is_read_back_and_may_name_no_code(base, look, tmp_path):
    plan = checked(Plan(base, {"net.hidden": [(8,), (4, 4)]}, seeds=(2,), recipe="ppo"), look)
    plans.store(plan, tmp_path)
    found = plans.stored(tmp_path)
    assert plans.planned(found, ()) == plan and plans.differences(found, plan) == []
    other = checked(Plan(configure("ppo", "CartPole-v1", env_steps=600, topology="serial"), plan.grid), look)
    assert plans.differences(found, other) == ["env_steps 500"]

    record = json.loads((tmp_path / plans.FILE).read_text())
    for change in ({"base": record["base"] | {"env": "os:system"}}, {"set": {"net.module": ["os:system"]}}):
        (tmp_path / plans.FILE).write_text(json.dumps(record | change))
        with pytest.raises(Refused, match="os:system"):
            plans.planned(plans.stored(tmp_path), ())
    (tmp_path / plans.FILE).write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        plans.stored(tmp_path)


class Small(Machine):
    def cores(self) -> int:
        return 8

    def memory(self, shared=False, processes=1):
        return 2 << 30, "a test"


def test_cores_and_memory_are_divided_among_the_runs(base):
    assert jobs_for(base, Small()) == 5  # of 400 MiB each
    local = configure("ppo", "CartPole-v1", topology="local", actors=4)
    assert cores_of(local) == 4 and jobs_for(local, Small()) == 1
    assert memory_note(base, 5, Small()) == "" and "take fewer at a time" in memory_note(base, 6, Small())
    assert with_threads(base, 1).threads >= with_threads(base, 64).threads == 1
    assert with_threads(configure("ppo", "CartPole-v1", threads=3), 64).threads == 3
