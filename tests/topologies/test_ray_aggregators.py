"""Aggregators on a Ray cluster: the bits of a run without them, earlier unrolls in rings, and what is lost with one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support_ray import SMALL, Run, cluster_of, kill, ledger_balances, messages, until
from support_services import SLOW, trains

import rookery
from rookery.core.errors import UsageError
from rookery.crews.ray_service import RayService
from rookery.storage import checkpoint

LIGHT = {"net": {"hidden": (8,)}, "ray": {"aggregators": 2, "cpus_per_aggregator": 0.5}}
ALGOS: dict[str, dict[str, Any]] = {
    "ppo": {"unroll": 16, "epochs": 1, "minibatches": 2},
    "appo": {"unroll": 8, "queue": {"lag": 2, "replayed": 1.0, "ring": 8}},
    "impact": {"unroll": 8},
}


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[Any]:
    with cluster_of(3) as cluster:
        yield cluster


@pytest.fixture
def pids(monkeypatch) -> list[int]:
    """Of the aggregators, in the order in which they start."""
    seen: list[int] = []
    placed = RayService._placed

    def watched(service: RayService, about: Any) -> None:
        placed(service, about)
        seen.append(service.where["pid"])

    monkeypatch.setattr(RayService, "_placed", watched)
    return seen


def settings_of(recipe: str, **fields: Any) -> dict[str, Any]:
    return SMALL | {"env": "CartPole-v1", "env_steps": 1200, "algo": ALGOS[recipe]} | LIGHT | fields


def train(recipe: str, folder: Path, **fields: Any) -> rookery.Run:
    return rookery.train(recipe, out=str(folder), **settings_of(recipe, **fields))


@pytest.mark.parametrize(
    "recipe", ["appo", pytest.param("impact", marks=pytest.mark.attack)]
)  # the others train below, and in test_aggregated.py
def test_recipes_train_on_batches_that_aggregators_made(tmp_path, pids, recipe):
    run = train(recipe, tmp_path / "run")
    ledger, table = run.summary["ledger"], run.summary["replay"]
    assert run.exit_code == 0 and ledger_balances(run.summary), ledger
    assert run.summary["updates"] > 10 and ledger["trained"] > 600 and set(ledger["dropped"]) <= {"too_old", "end"}
    assert len(pids) == 2 and table["aggregators"] == 2.0
    assert table.get("ring", 0.0) == (8.0 if recipe == "appo" else 0.0)


def test_the_bits_are_those_of_a_run_without_them(tmp_path):
    fields = {"actors": 3, "net": {"core": "gru", "core_size": 8, "normalize_obs": True}}
    fields |= {"algo": ALGOS["ppo"] | {"chunk": 8}}
    one = train("ppo", tmp_path / "serial", **fields, topology="serial", ray={})
    other = train("ppo", tmp_path / "ray", **fields)
    weights = [checkpoint.newest(run.path / "checkpoints")[0].tensors for run in (one, other)]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    assert (
        one.summary["ledger"] == other.summary["ledger"] and one.summary["return_mean"] == other.summary["return_mean"]
    )


def test_a_killed_aggregator_costs_no_step_and_is_replaced(tmp_path, pids):
    folder = tmp_path / "run"
    run = Run("ppo", folder, **settings_of("ppo", **SLOW, env_steps=10**6))
    until(lambda: run.running() and trains(folder), "updates")
    kill(pids[0])
    until(lambda: run.running() and any("aggregator" in text for text in messages(folder)), "the news", seconds=5.0)
    until(lambda: run.running() and len(pids) == 3, "another one")
    run.end()
    done = run.result()
    assert done.exit_code == 75 and ledger_balances(done.summary)
    assert done.summary["restarts"] == 1 and done.summary["ledger"]["dropped"] == {}
    assert done.summary["ledger"]["trained"] == done.summary["env_steps"]


def test_what_aggregators_cannot_do_is_refused(tmp_path):
    with pytest.raises(UsageError, match="replay memory"):
        rookery.train("dqn", **settings_of("ppo", out=str(tmp_path / "a"), algo={}))
    with pytest.raises(UsageError, match="CPUs"):
        train("ppo", tmp_path / "b", ray={"aggregators": 2, "cpus_per_aggregator": 40.0})
