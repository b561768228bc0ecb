"""Gradients that stay non-finite end a run: its sound weights are saved, and the batch that did it (F9)."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import rookery
from rookery.core.errors import NumericError, StorageError
from rookery.core.types import Transitions
from rookery.metrics.ledger import Ledger
from rookery.roles.learner import Learner
from rookery.storage import checkpoint
from rookery.topologies import numeric

REPLAY = {"min_size": 100, "batch": 16, "capacity": 600, "samples_per_insert": 2.0}
PPO = {"unroll": 16, "epochs": 1, "minibatches": 2}
CASES = {
    "ppo": ("ppo", "serial", PPO),
    "dqn": ("dqn", "serial", {"replay": REPLAY}),
    "gorila": ("gorila", "async_grads", {"replay": REPLAY}),
}


def diverges(folder: Path, case: str, **fields) -> NumericError:
    recipe, topology, algo = CASES[case]
    with pytest.raises(NumericError, match="3 times in a row") as caught:
        rookery.train(
            recipe, env="CartPole-v1", out=str(folder), algo=algo, topology=topology, actors=1, envs_per_actor=4,
            env_steps=800, quiet=True, fault_plan=";".join(["learner@update=9:nan"] * 3), **fields,
        )  # fmt: skip
    assert caught.value.exit_code == 5
    return caught.value


@pytest.mark.parametrize("case", CASES)
def test_sound_weights_are_saved_and_the_batch_that_did_it(tmp_path, case):
    run = tmp_path / "run"
    error = diverges(run, case)
    saved, skipped = checkpoint.newest(run / "checkpoints")
    assert saved.meta["learner"]["updates"] == 9 and saved.meta["learner"]["skipped"] == 3 and not skipped
    assert all(t.isfinite().all() for n, t in saved.tensors.items() if n.startswith(("nets/", "optimizer/")))
    assert any(f"rookery.resume('{run}')" in note for note in error.__notes__)
    (folder,) = (run / "numeric").iterdir()
    assert str(folder) in str(error)
    found = checkpoint.load(folder)
    assert [skip["value"] for skip in found.meta["skips"]] == pytest.approx([math.nan] * 3, nan_ok=True)
    assert found.meta["left_out"] == {}
    if case == "gorila":
        assert set(found.tensors) == {"gradient"} and found.tensors["gradient"].numel() > 100
    elif case == "ppo":
        assert found.tensors["batch/obs/obs"].shape == (17, 4, 4) and found.tensors["batch/logp"].shape == (16, 4)
        assert found.tensors["minibatch/advantage"].shape == (32,)
        assert all(math.isfinite(skip["losses"]["all"]) for skip in found.meta["skips"])
    else:
        assert found.tensors["batch/next_obs/obs"].shape == (16, 4) and "minibatch/items/action" not in found.tensors
    ledger = Ledger(**saved.meta["journal"]["ledger"])
    assert ledger.imbalance == 0 and ledger.dropped["numeric"] > 0
    if case == "gorila":
        return
    resumed = rookery.resume(run)
    assert resumed.summary["exit_reason"] == "env_steps" and resumed.summary["updates"] > 9
    assert resumed.summary["updates_skipped"] == 3


def test_weights_that_are_not_sound_are_not_saved(tmp_path, monkeypatch):
    monkeypatch.setattr(Learner, "finite", lambda learner: False)
    monkeypatch.setattr(Learner, "check_finite", lambda learner: None)
    diverges(tmp_path / "run", "ppo")
    assert not (tmp_path / "run" / "checkpoints").exists() and not (tmp_path / "run" / "numeric").exists()


def test_a_batch_that_cannot_be_stored_costs_no_weights(tmp_path, monkeypatch):
    def full(*_):
        raise StorageError("no space left")

    monkeypatch.setattr(numeric, "dump", full)
    error = diverges(tmp_path / "run", "ppo")
    assert any("could not be stored: no space left" in note for note in error.__notes__)
    assert checkpoint.all_steps(tmp_path / "run" / "checkpoints")


def test_a_dump_is_bounded_and_says_what_it_lacks(tmp_path, monkeypatch):
    monkeypatch.setattr(numeric, "LIMIT", 200)
    reward = torch.tensor([1.0, math.nan])
    image = torch.zeros(2, 300, dtype=torch.uint8)
    batch = Transitions({"obs": image}, torch.tensor([0, 1]), reward, reward, {"obs": image}, reward, reward)
    error = NumericError("the gradient was nan", [{"what": "the gradient", "value": math.nan}])
    error.evidence = {"batch": batch, "minibatch": {"items": batch, "noise": None}}
    found = checkpoint.load(numeric.dump(tmp_path, 7, error))
    assert found.meta["left_out"] == {"batch/obs/obs": [2, 300]}, "the successors are the same memory"
    assert set(found.tensors) == {"batch/action", "batch/reward"}
    assert found.tensors["batch/reward"].isnan().tolist() == [False, True]


def test_only_the_last_dumps_of_a_run_are_kept(tmp_path):
    for steps in range(5):
        error = NumericError("nan")
        error.evidence = {"gradient": torch.full((3,), math.nan)}
        numeric.dump(tmp_path, steps, error)
    assert checkpoint.all_steps(tmp_path / "numeric") == [2, 3, 4]
