"""States of environments that are large: stored where they can be read again, else left out; never the run's end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import rookery
from rookery.envs.scripted import Counter
from rookery.roles import producer
from rookery.storage import checkpoint, codec

PPO = {"quiet": True, "preset": "vector", "algo": {"unroll": 16, "epochs": 1, "minibatches": 1}, "envs_per_actor": 2}
TRUST = ("test_large_states",)


class Full(Counter):
    """A Counter with a burden in its state, that must come back as it was."""

    def __init__(self, how: str):
        super().__init__()
        self.burden = {
            "json": lambda: {
                "cells": [[float(i), 0.5] for i in range(6_000)],
                "seen": list(range(10_000)),
                "map": "x" * 10**5,
            },
            "values": lambda: {str(i): {"at": i} for i in range(8_000)},
            "deep": lambda: deep(60),
            "bytes": lambda: bytes(257 << 20),
        }[how]()

    def get_state(self) -> dict[str, Any]:
        return super().get_state() | {"burden": self.burden}

    def set_state(self, state: dict[str, Any]) -> None:
        assert state["burden"] == self.burden and type(state["burden"]) is type(self.burden)
        super().set_state({key: value for key, value in state.items() if key != "burden"})


def deep(levels: int) -> list:
    return [deep(levels - 1)] if levels else []


def full(how: str) -> gymnasium.Env:
    return Full(how)


def train(tmp_path: Path, how: str, **fields: Any) -> rookery.Run:
    settings = PPO | {"out": str(tmp_path / "run"), "env_steps": 100, "checkpoint": {"every": 64}} | fields
    return rookery.train("ppo", env="test_large_states:full", env_kwargs={"how": how}, **settings)


def messages(folder: Path) -> list[str]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["text"] for line in lines if line["kind"] == "message"]


@pytest.mark.parametrize("topology", ["serial", "local"])
def test_large_json_is_stored_and_comes_back_equal(tmp_path, topology):
    run = train(tmp_path, "json", topology=topology, checkpoint={"every": 1000})
    saved = checkpoint.newest(run.path / "checkpoints")[0]
    assert saved.meta["exact"] and (saved.path / "meta.json").stat().st_size < 100_000
    assert rookery.resume(run.path, trust=TRUST, env_steps=200, topology="serial").summary["restarts"] == 0
    assert messages(run.path) == []


@pytest.mark.parametrize("how", ["values", "deep"])
def test_what_could_not_be_read_again_costs_new_episodes_and_is_said_once(tmp_path, monkeypatch, how):
    monkeypatch.setattr(codec, "MAX_ELEMENTS", 12_000)
    run = train(tmp_path, how, envs_per_actor=1)
    (said,) = [text for text in messages(run.path) if "new episodes" in text]
    assert ("values besides arrays" if how == "values" else "nested deeper") in said
    saved, skipped = checkpoint.newest(run.path / "checkpoints")
    assert not saved.meta["exact"] and skipped == [] and saved.env_steps == run.summary["env_steps"]
    again = rookery.resume(run.path, trust=TRUST, env_steps=200)
    assert again.summary["exit_reason"] == "env_steps" and again.summary["env_steps"] >= 200
    assert any("new episodes begin" in text for text in messages(run.path))


def test_a_state_larger_than_a_worker_can_send_costs_new_episodes_and_not_the_run(tmp_path):
    run = train(
        tmp_path, "bytes", topology="local", actors=1, envs_per_actor=1, env_steps=64, checkpoint={"every": 1000}
    )
    assert run.summary["exit_reason"] == "env_steps" and run.summary["restarts"] == 0
    (said,) = [text for text in messages(run.path) if "get_state" in text]
    assert "269,484,032 bytes, more than" in said
    assert not checkpoint.newest(run.path / "checkpoints")[0].meta["exact"]


def test_the_limit_is_the_same_in_one_process(tmp_path, monkeypatch):
    monkeypatch.setattr(producer, "MAX_STATE", 100_000)
    run = train(tmp_path, "json")
    assert any("more than 100,000" in text for text in messages(run.path))
    assert not checkpoint.newest(run.path / "checkpoints")[0].meta["exact"]


def test_checkpoints_as_they_used_to_be_are_resumed(tmp_path):
    """The actors' states used to be encoded on their own, with their tensors beside those of the networks."""
    run = rookery.train(
        "ppo", env="rookery/TMaze-v0", out=str(tmp_path / "run"), **(PPO | {"preset": ""}), env_steps=100
    )
    saved = checkpoint.newest(run.path / "checkpoints")[0]
    part, tensors = checkpoint.encode_tree(saved.meta["states"], "actors")
    meta = {key: value for key, value in saved.meta.items() if key != "states"} | {"actors": part}
    checkpoint.save(run.path / "checkpoints", saved.env_steps, saved.tensors | tensors, meta)
    assert any(isinstance(tensor, np.ndarray) or name.startswith("actors/") for name, tensor in tensors.items())
    resumed = rookery.resume(run.path, env_steps=200)
    assert resumed.summary["env_steps"] >= 200 and messages(run.path) == []
