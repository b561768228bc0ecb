"""Which replay memory a run goes on with when its newest checkpoint, or the memory itself, is damaged."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import rookery
from rookery.core.errors import CheckpointError
from rookery.storage import checkpoint

REPLAY = {"min_size": 50, "batch": 8, "capacity": 300, "samples_per_insert": 1.0}
FIELDS = {
    "quiet": True,
    "topology": "serial",
    "actors": 2,
    "envs_per_actor": 2,
    "algo": {"replay": REPLAY, "n_step": 3, "unroll": 8},
}
FIELDS |= {"topology": "serial", "checkpoint": {"every": 200}, "env_steps": 500}


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Several checkpoints, one memory, and environments that can be restored."""
    return rookery.train(
        "dqn", env="rookery/TMaze-v0", out=str(tmp_path_factory.mktemp("memory") / "run"), **FIELDS
    ).path


@pytest.fixture
def run(trained, tmp_path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def damage_newest(run: Path) -> None:
    newest = max((run / "checkpoints").iterdir())
    (newest / "meta.json").write_text("{}")


def check(resumed: rookery.Run, steps: int) -> None:
    assert resumed.summary["exit_reason"] == "env_steps" and resumed.summary["env_steps"] >= steps
    ledger = resumed.summary["ledger"]
    kept = ledger["trained"] + ledger["evicted"] + sum(ledger["dropped"].values()) + ledger["in_flight"]
    assert ledger["collected"] == kept and all(count >= 0 for count in ledger["dropped"].values())
    saved = checkpoint.newest(resumed.path / "checkpoints")[0]
    assert min(saved.meta["journal"]["lag"]) >= 0


def test_one_checkpoint_back_the_newer_memory_is_used_and_said(run):
    damage_newest(run)
    heard: list[str] = []
    resumed = rookery.resume(run, tell=heard.append, env_steps=700)
    check(resumed, 700)
    (said,) = [text for text in heard if "replay memory" in text]
    assert "newer than the checkpoint" in said and said in (run / "metrics.jsonl").read_text().replace("\\/", "/")
    assert resumed.summary["replay"]["size"] == 300, "no need to fill it again"


def test_a_memory_that_is_gone_is_missed_aloud(run):
    shutil.rmtree(run / "replay")
    with pytest.warns(
        UserWarning, match="no replay memory was saved with this checkpoint: it is filled again from empty"
    ):
        check(rookery.resume(run, env_steps=700), 700)


def test_a_memory_that_nobody_wanted_saved_is_not_missed(tmp_path):
    algo = {"algo": {"replay": REPLAY | {"save": False}, "unroll": 8}}
    run = rookery.train("dqn", env="rookery/TMaze-v0", out=str(tmp_path / "run"), **(FIELDS | algo))
    heard: list[str] = []
    check(rookery.resume(run.path, tell=heard.append, env_steps=600), 600)
    assert heard == []


def test_a_damaged_memory_is_refused_with_the_command_that_goes_on_without(run):
    (memory,) = (run / "replay").iterdir()
    (memory / "meta.json").write_text("{}")
    with pytest.raises(CheckpointError, match=f"rm -r {memory}") as caught:
        rookery.resume(run, env_steps=700)
    assert caught.value.exit_code == 6
    shutil.rmtree(memory)
    with pytest.warns(UserWarning, match="filled again from empty"):
        check(rookery.resume(run, env_steps=700), 700)
