"""A disk that is full: training goes on without a checkpoint, and only the last one is worth an error."""

from __future__ import annotations

import pytest

import rookery
from rookery.core.errors import StorageError
from rookery.storage import checkpoint, replay_file

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


REPLAY = {"min_size": 50, "batch": 8, "capacity": 300, "samples_per_insert": 1.0}
DQN = {"env_steps": 600, "quiet": True, "algo": {"replay": REPLAY}, "checkpoint": {"every": 100}}


def test_a_replay_memory_that_cannot_be_saved_is_told_and_training_goes_on(tmp_path, monkeypatch):
    """The next one is tried again, and what a resume finds is the last that was written."""
    real, calls = replay_file._check_room, []

    def first_fails(*args):
        calls.append(1)
        return full() if len(calls) == 1 else real(*args)

    monkeypatch.setattr(replay_file, "_check_room", first_fails)
    run = rookery.train("dqn", env="CartPole-v1", out=str(tmp_path / "run"), **DQN)
    assert run.summary["exit_reason"] == "env_steps" and len(calls) >= 2
    told = (run.path / "metrics.jsonl").read_text()
    assert "the replay memory was not saved, training goes on: no space left on device" in told
    assert rookery.resume(run.path, env_steps=800).summary["replay"]["size"] > 250, "the memory came along"


def test_the_last_replay_memory_must_be_saved(tmp_path, monkeypatch):
    monkeypatch.setattr(replay_file, "_check_room", full)
    with pytest.raises(StorageError, match="no space left") as caught:
        rookery.train("dqn", env="CartPole-v1", out=str(tmp_path / "run"), **DQN)
    assert caught.value.exit_code == 7
    assert checkpoint.newest(tmp_path / "run" / "checkpoints")[0].env_steps >= 600, "the weights are safe"
