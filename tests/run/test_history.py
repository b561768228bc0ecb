"""Every resume leaves a record, and what it changed is in config.json."""

from __future__ import annotations

import dataclasses
import json

import pytest

import rookery
from rookery.core.config import CHANGES
from rookery.core.errors import CheckpointError, UsageError
from rookery.metrics.sink import read_records
from rookery.run.configured import asked
from rookery.run.history import changed, with_history
from rookery.storage.stored import read_config

SMALL = {"quiet": True, "topology": "serial", "actors": 1, "envs_per_actor": 2, "env_steps": 64, "seed": 1}
SMALL |= {"algo": {"unroll": 8, "epochs": 1, "minibatches": 1}}


@pytest.fixture
def run(tmp_path):
    return rookery.train("ppo", env="CartPole-v1", out=str(tmp_path / "run"), **SMALL)


def resumes(run):
    return [record for record in read_records(run.path / "metrics.jsonl") if record["kind"] == "resume"]


def test_each_change_of_a_field_is_in_both_files(run):
    rookery.resume(run.path, env_steps=128, algo={"lr": 0.5})
    rookery.resume(run.path, env_steps=192)
    first, second = read_config(run.path).history
    assert (
        first.env_steps == run.summary["env_steps"]
        and first.version == rookery.__version__
        and first.time.endswith("Z")
    )
    assert first.changed == {"env_steps": (64, 128), "algo.lr": (run.config.algo.lr, 0.5)}
    assert second.changed == {"env_steps": (128, 192)} and second.env_steps >= 128
    records = resumes(run)
    assert [record["changed"] for record in records] == [
        {name: list(pair) for name, pair in each.changed.items()} for each in (first, second)
    ]
    assert [record["env_steps"] for record in records] == [first.env_steps, second.env_steps]
    assert all(record["wall_s"] > 0 and record["version"] == rookery.__version__ for record in records)


def test_a_new_run_with_the_config_of_another_one_has_no_history(run):
    rookery.resume(run.path, env_steps=128)
    config = rookery.load(run.path).config
    assert config.history and asked(config, "", "", {"env_steps": 64}).history == []


def test_a_resume_without_changes_leaves_a_record_only(run):
    rookery.resume(run.path)
    assert [record["changed"] for record in resumes(run)] == [{}]
    assert read_config(run.path).history == []


def test_a_resume_that_is_refused_leaves_nothing(run):
    with pytest.raises(CheckpointError, match="other networks"):
        rookery.resume(run.path, env_steps=128, net={"hidden": (3,)})
    assert read_config(run.path).history == [] and resumes(run) == []


@pytest.mark.parametrize(
    "history, why",
    [
        ([{"env_steps": 1, "time": "t", "version": "v"}], "history"),
        ([{"env_steps": -1, "time": "t", "version": "v", "changed": {}}], "history"),
        ([{"env_steps": 1, "time": "t", "version": "v", "changed": {"a": [1, 2, 3]}}], "history"),
        ([{"env_steps": 1, "time": "t", "version": "v", "changed": {}, "more": 1}], "unknown fields: history.0.more"),
        ("yesterday", "history"),
        ([{"env_steps": 1, "time": "t", "version": "v", "changed": {}}] * (CHANGES + 1), "history"),
    ],
)
def test_a_history_of_another_form_is_refused(run, history, why):
    config = json.loads((run.path / "config.json").read_text()) | {"history": history}
    (run.path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=why):
        rookery.resume(run.path, env_steps=128)


def test_a_run_of_an_older_version_has_none_and_gets_one(run):
    config = json.loads((run.path / "config.json").read_text())
    del config["history"], config["init_from"]
    (run.path / "config.json").write_text(json.dumps(config))
    rookery.resume(run.path, env_steps=128)
    assert [each.changed for each in read_config(run.path).history] == [{"env_steps": (64, 128)}]


def test_the_newest_changes_are_kept():
    config = rookery.configure("ppo", "CartPole-v1")
    for step in range(CHANGES + 5):
        config = with_history(config, step, {"seed": (step, step + 1)})
    assert len(config.history) == CHANGES and config.history[-1].env_steps == CHANGES + 4
    assert with_history(config, 10**6, {}) is config


def test_groups_that_are_absent_on_one_side_are_changes_too():
    config = rookery.configure("ppo", "CartPole-v1")
    other = dataclasses.replace(config, target_return=100.0, net=dataclasses.replace(config.net, core="gru"))
    assert changed(config, other) == {"target_return": (None, 100.0), "net.core": ("none", "gru")}


def test_an_environment_that_is_given_again_is_a_change_if_it_is_another(tmp_path):
    import gymnasium

    def make():
        return gymnasium.make("CartPole-v1")

    run = rookery.train("ppo", env=make, out=str(tmp_path / "run"), preset="vector", **SMALL)
    rookery.resume(run.path, env=make)
    rookery.resume(run.path, env="CartPole-v1", env_steps=128)
    (only,) = read_config(run.path).history
    assert only.changed["env"] == (run.config.env, "CartPole-v1")


def test_fields_that_make_the_run_what_it_is_cannot_change(run):
    for name in ("history", "recipe", "algorithm", "preset"):
        with pytest.raises(UsageError, match=f"{name} belongs to the run and cannot change"):
            rookery.resume(run.path, **{name: "other"})
