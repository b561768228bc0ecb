"""What is true in every topology: the same seed gives the same weights, however the actors are spread."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import rookery
from rookery.storage import checkpoint

SMALL = {"env_steps": 1500, "quiet": True, "algo": {"unroll": 16, "epochs": 2, "minibatches": 2, "chunk": 8}}


def weights(path: Path) -> dict[str, torch.Tensor]:
    return checkpoint.newest(path / "checkpoints")[0].tensors


def train(tmp_path: Path, name: str, env: str = "CartPole-v1", **fields) -> rookery.Run:
    return rookery.train("ppo", env=env, out=str(tmp_path / name), **(SMALL | fields))


def assert_same(a: Path, b: Path) -> None:
    one, other = weights(a), weights(b)
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), f"{name} differs"


@pytest.mark.parametrize("core", [pytest.param("none", marks=pytest.mark.attack), "lstm"])
def test_serial_and_local_end_with_the_same_bits(tmp_path, core):
    fields = {"actors": 2, "envs_per_actor": 4, "net": {"core": core, "normalize_obs": True}, "seed": 3}
    serial = train(tmp_path, "serial", topology="serial", **fields)
    local = train(tmp_path, "local", topology="local", **fields)
    assert_same(serial.path, local.path)
    assert serial.summary["env_steps"] == local.summary["env_steps"]
    assert serial.summary["return_mean"] == local.summary["return_mean"]


def test_another_seed_gives_other_bits(tmp_path):
    a, b = (train(tmp_path, str(seed), seed=seed) for seed in (1, 2))
    assert any(not torch.equal(t, weights(b.path)[name]) for name, t in weights(a.path).items())


@pytest.mark.parametrize("topology", ["serial", "local"])
def test_a_resumed_run_equals_one_that_was_never_interrupted(tmp_path, topology):
    """The environments of this task can be restored, so that nothing at all differs."""
    env, fields = "rookery/TMaze-v0", {"actors": 2, "envs_per_actor": 4, "topology": topology, "net": {"core": "gru"}}
    fields |= {
        "algo": SMALL["algo"] | {"lr": 1e-3, "lr_end": 1e-3}
    }  # a schedule's end depends on the length of the run
    whole = train(tmp_path, "whole", env, **fields, env_steps=2000)
    half = train(tmp_path, "half", env, **fields, env_steps=1000)
    assert half.summary["env_steps"] < whole.summary["env_steps"]
    resumed = rookery.resume(half.path, env_steps=2000)
    assert resumed.summary["env_steps"] == whole.summary["env_steps"]
    assert resumed.summary["return_mean"] == whole.summary["return_mean"]
    assert_same(resumed.path, whole.path)


def test_environments_that_cannot_be_restored_begin_new_episodes_and_say_so(tmp_path):
    run = train(tmp_path, "a", "Acrobot-v1", envs_per_actor=2)
    rookery.resume(run.path, env_steps=2500)
    assert "new episodes begin" in (run.path / "metrics.jsonl").read_text()


def test_the_ledger_balances_and_the_lag_is_zero(tmp_path):
    run = train(tmp_path, "a", topology="local", actors=2, envs_per_actor=4)
    ledger = run.summary["ledger"]
    assert ledger["collected"] == run.summary["env_steps"] >= SMALL["env_steps"]
    assert ledger["collected"] == ledger["trained"] and not ledger["dropped"] and ledger["in_flight"] == 0
    assert run.summary["policy_lag"] == {"mean": 0.0, "max": 0}
    assert abs(sum(run.summary["time_split"].values()) - 1) < 1e-6
