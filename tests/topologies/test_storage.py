"""A disk that is full: training goes on without a checkpoint, and only the last one is worth an error."""

from __future__ import annotations

import pytest

import rookery
from rookery import checkpoint
from rookery.errors import StorageError

SMALL = {"env_steps": 600, "quiet": True, "algo": {"unroll": 16, "epochs": 1, "minibatches": 1}}


def full(*_: object, **__: object) -> None:
    raise StorageError("no space left on device")


def test_a_full_disk_in_the_middle_is_told_and_survived(tmp_path, monkeypatch):
    real, calls = checkpoint.save, []

    def first_fails(*args, **kwargs):
        calls.append(1)
        return full() if len(calls) == 1 else real(*args, **kwargs)

    monkeypatch.setattr(checkpoint, "save", first_fails)
    run = rookery.train("ppo", env="CartPole-v1", out=str(tmp_path / "run"), checkpoint={"every": 200}, **SMALL)
    assert run.summary["exit_reason"] == "env_steps" and len(calls) >= 2
    assert "checkpoint failed" in (run.path / "metrics.jsonl").read_text()
    assert checkpoint.newest(run.path / "checkpoints")[0].env_steps == run.summary["env_steps"]


def test_the_last_checkpoint_must_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "save", full)
    with pytest.raises(StorageError) as caught:
        rookery.train("ppo", env="CartPole-v1", out=str(tmp_path / "run"), **SMALL)
    assert caught.value.exit_code == 7
