"""Actor-critics with lag in real runs: exact and repeatable in one process, bounded and accounted for with several."""

from __future__ import annotations

import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rookery
from rookery.core.errors import NumericError
from rookery.metrics.journal import Journal
from rookery.storage import checkpoint

SMALL: dict[str, Any] = {
    "quiet": True, "seed": 3, "actors": 2, "envs_per_actor": 2, "net": {"hidden": (8,)}, "env_steps": 400,
    "supervisor": {"spare": False},
}  # fmt: skip
PPO = {"epochs": 2, "minibatches": 2}
ALGO: dict[str, dict[str, Any]] = {"impala": {"unroll": 8}, "appo": {"unroll": 8} | PPO, "impact": {"unroll": 8}}
PATIENCE = 20.0  # seconds for a thread that was told to end


@pytest.fixture(autouse=True)
def no_loader_is_left():
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("loader-"):
            thread.join(PATIENCE)
            frame = sys._current_frames().get(thread.ident)
            assert not thread.is_alive(), "".join(traceback.format_stack(frame))


@pytest.fixture
def lags(monkeypatch) -> list[list[int]]:
    """The age of the new data of every update, in versions: one list per update."""
    told: list[list[int]] = []
    trained = Journal.trained

    def watched(journal, steps, ages, report, updates):
        told.append(np.asarray(ages).tolist())
        trained(journal, steps, ages, report, updates)

    monkeypatch.setattr(Journal, "trained", watched)
    return told


def train(folder: Path, recipe: str, topology: str, lag: int | None = None, **fields) -> rookery.Run:
    algo = ALGO.get(recipe, {}) | fields.pop("algo", {})
    if lag is not None:
        algo["queue"] = {"lag": lag} | algo.get("queue", {})
    settings = SMALL | {"env": "CartPole-v1", "topology": topology, "algo": algo} | fields
    return balanced(rookery.train(recipe, out=str(folder), **settings))


def balanced(run: rookery.Run) -> rookery.Run:
    ledger = run.summary["ledger"]
    gone = ledger["trained"] + ledger["evicted"] + sum(ledger["dropped"].values()) + ledger["in_flight"]
    assert ledger["collected"] == gone == run.summary["env_steps"], ledger
    assert ledger["trained"] > 0 and run.summary["exit_reason"] == "env_steps"
    return run


def tensors(run: rookery.Run) -> dict[str, torch.Tensor]:
    return checkpoint.newest(run.path / "checkpoints")[0].tensors


def differing(a: rookery.Run, b: rookery.Run) -> list[str]:
    one, other = tensors(a), tensors(b)
    assert one.keys() == other.keys()
    return [name for name, tensor in one.items() if not torch.equal(tensor, other[name])]


# One process


@pytest.mark.parametrize("lag", [1, 3])
@pytest.mark.parametrize("recipe", ["impala", "appo"])
def test_in_one_process_data_is_exactly_as_old_as_the_lag_and_a_run_repeats(tmp_path, lags, recipe, lag):
    """The first batches are younger, as there are no older weights; so may be the last, as few steps are missing."""
    run = train(tmp_path / "a", recipe, "serial", lag)
    assert [set(ages) for ages in lags[:lag]] == [{age} for age in range(lag)]
    settled = lags[lag : -lag - 1]
    assert len(settled) > 4 and all(set(ages) == {lag} for ages in settled), lags
    assert run.summary["policy_lag"]["max"] == lag and max(map(max, lags)) == lag
    assert lag - 1 < run.summary["policy_lag"]["mean"] <= lag
    assert run.summary["ledger"]["dropped"] == {}
    if (recipe, lag) in (("impala", 3), ("appo", 1)):
        again = train(tmp_path / "b", recipe, "serial", lag)
        assert differing(run, again) == [] and again.summary["ledger"] == run.summary["ledger"]
        assert differing(run, train(tmp_path / "c", recipe, "serial", lag, seed=4)) != []


def test_one_actor_only_with_lag(tmp_path, lags):
    run = train(tmp_path / "a", "impala", "serial", 2, actors=1)
    assert run.summary["policy_lag"]["max"] == 2 and all(ages == [2, 2] for ages in lags[2:-3])


def test_loaders_and_buffers_change_nothing_in_one_process(tmp_path):
    plain = train(tmp_path / "a", "impala", "serial", 1, algo={"queue": {"loaders": 0}})
    ahead = train(tmp_path / "b", "impala", "serial", 1, algo={"queue": {"loaders": 3, "buffers": 5}})
    assert differing(plain, ahead) == []


def test_a_circular_buffer_and_a_ring_repeat_too(tmp_path, lags):
    circular = {"circular": {"batches": 2, "uses": 2}, "target_period": 4}
    for recipe, algo in (("impact", circular), ("impala", {"queue": {"replayed": 1.5, "batch": 2}})):
        runs = [train(tmp_path / f"{recipe}{number}", recipe, "serial", 1, algo=algo) for number in range(2)]
        assert differing(*runs) == []
        told = runs[0].summary["replay"]
        assert 1.0 <= told["uses_per_batch"] <= 2.0 if recipe == "impact" else told["replayed"] == 3.0
        if recipe == "impala":
            assert told["replayed_lag_max"] >= told["replayed_lag_mean"] >= 1.0 and told["ring"] > 10
        assert max(map(max, lags)) <= (1 + 2 * 2) * 2, "on its way, then as long as the buffer holds it"
        lags.clear()


@pytest.mark.parametrize("recipe", ["appo", "impact"])
def test_a_resumed_run_without_lag_equals_one_that_was_never_interrupted(tmp_path, recipe):
    """The environments can be restored; target network and KL coefficient are in the checkpoint, and matter."""
    constant = {"lr": 3e-3, "lr_end": 3e-3, "target_period": 3, "kl": 0.5, "kl_target": 1e-6}
    fields = {"env": "rookery/TMaze-v0", "algo": constant}
    whole = train(tmp_path / "whole", recipe, "serial", 0, env_steps=600, **fields)
    half = train(tmp_path / "half", recipe, "serial", 0, env_steps=300, **fields)
    saved = tensors(half)
    assert saved["nets/kl.value"] != 0.5
    slow = {name.replace("nets/target.", "nets/"): tensor for name, tensor in saved.items() if "target." in name}
    assert slow and any(not torch.equal(tensor, saved[name]) for name, tensor in slow.items()), "it follows slowly"
    resumed = balanced(rookery.resume(half.path, env_steps=600))
    assert half.summary["env_steps"] < whole.summary["env_steps"] == resumed.summary["env_steps"]
    assert differing(resumed, whole) == [] and resumed.summary["ledger"] == whole.summary["ledger"]


def test_a_resumed_run_with_lag_counts_what_was_in_flight(tmp_path):
    """The last unrolls wait for others to make a batch with, and are not part of the checkpoint."""
    run = train(tmp_path / "run", "appo", "serial", 1, env_steps=200, algo={"queue": {"batch": 3}})
    waiting = run.summary["ledger"]["in_flight"]
    assert 0 < waiting <= 2 * 16
    resumed = balanced(rookery.resume(run.path, env_steps=400))
    assert resumed.summary["ledger"]["dropped"] == {"resumed": waiting}
    assert resumed.summary["updates"] > run.summary["updates"] and resumed.summary["policy_lag"]["max"] == 1


def test_a_batch_that_ends_the_run_is_counted_once_though_a_circular_buffer_keeps_it(tmp_path):
    spoilt = ";".join(["learner@update=7:nan"] * 3)
    with pytest.raises(NumericError):
        train(tmp_path / "run", "impact", "serial", 1, fault_plan=spoilt)
    run = rookery.resume(tmp_path / "run", env_steps=600, fault_plan="")
    assert balanced(run).summary["ledger"]["dropped"].keys() <= {"numeric", "resumed"}


# Several processes


def test_with_one_actor_and_no_lag_local_has_the_bits_of_serial(tmp_path):
    runs = [train(tmp_path / topology, "appo", topology, 0, actors=1) for topology in ("serial", "local")]
    assert differing(*runs) == [] and runs[0].summary["ledger"] == runs[1].summary["ledger"]
    assert runs[1].summary["policy_lag"] == {"mean": 0.0, "max": 0}


def test_one_worker_that_sends_gradients_has_the_bits_of_serial(tmp_path):
    """Schedules included: the learning rate falls with what was trained on, in both."""
    algo = {"unroll": 8, "entropy_end": 0.0}
    runs = [train(tmp_path / topology, "a3c", topology, actors=1, algo=algo) for topology in ("serial", "async_grads")]
    assert differing(*runs) == [] and runs[0].summary["ledger"] == runs[1].summary["ledger"]


def test_one_actor_that_runs_ahead_by_several_batches_with_replay_beside_them(tmp_path, lags):
    algo = {"queue": {"replayed": 1.0, "ring": 8, "loaders": 2}}
    run = train(tmp_path / "run", "impala", "local", 2, actors=1, algo=algo)
    assert max(map(max, lags)) <= 2 and run.summary["ledger"]["dropped"] == {}, "one actor delivers in order"
    told = run.summary["replay"]
    assert told["ring"] == 8.0 and told["replayed"] == 1.0 and told["replayed_lag_mean"] >= 1.0
    assert run.summary["ledger"]["trained"] <= run.summary["env_steps"], "what is replayed does not count again"


def test_a_circular_buffer_with_actors_that_run_ahead(tmp_path, lags):
    algo = {"circular": {"batches": 2, "uses": 2}, "queue": {"loaders": 2}}
    run = train(tmp_path / "run", "impact", "local", 1, algo=algo, env_steps=800)
    assert max(map(max, lags)) <= (1 + 2 * 2) * 2
    assert run.summary["replay"]["uses_per_batch"] <= 2.0 and run.summary["replay"]["kept_batches"] == 0.0
    assert run.summary["ledger"]["dropped"].keys() <= {"too_old"}


def test_an_actor_that_is_killed_in_the_middle_of_an_unroll(tmp_path, lags):
    """Its unroll is lost and counted; the other actor and the learner go on, and so does its successor."""
    run = train(
        tmp_path / "run", "impala", "local", 1, env_steps=1200, fault_plan="actor[1]@env_step=101:sigkill",
        algo={"queue": {"loaders": 1}},
    )  # fmt: skip
    assert run.summary["restarts"] == 1 and max(map(max, lags)) <= 1
    dropped = run.summary["ledger"]["dropped"]
    assert 0 < dropped["actor_died"] <= 3 * 16 and dropped.keys() <= {"actor_died", "too_old"}
