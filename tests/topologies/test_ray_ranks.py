"""Several learners on a Ray cluster: placed by Ray, started again from the last checkpoint when one is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from support_ray import Run, cluster_of, ledger_balances, until

from rookery.core.errors import EnvError, LearnerError, UsageError
from rookery.crews import ray as crews_ray
from rookery.pipes.ray_store import RayChannel
from rookery.storage import checkpoint

NOTICE = 5.0  # seconds for the end of a process to be noticed
RANKS: dict[str, Any] = {
    "algo": {"unroll": 32, "chunk": 16, "epochs": 2, "minibatches": 2}, "net": {"hidden": (8,)}, "ranks": 2,
    "actors": 1, "preset": "vector", "env_steps": 600,
}  # fmt: skip
LONG_RUN = RANKS | {"env_steps": 10**8, "checkpoint": {"every": 500}}


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[Any]:
    with cluster_of(3) as cluster:
        yield cluster


@pytest.fixture
def hosts(monkeypatch) -> list[dict[str, Any]]:
    """What every Ray actor that this process has started says of itself."""
    seen: list[dict[str, Any]] = []
    placed = RayChannel._placed

    def watched(channel: RayChannel, about: Future) -> None:
        placed(channel, about)
        seen.append(channel.where)

    monkeypatch.setattr(RayChannel, "_placed", watched)
    return seen


def children(pid: int) -> list[int]:
    return [int(word) for path in Path(f"/proc/{pid}/task").glob("*/children") for word in path.read_text().split()]


def rank_of(parent: int, rank: int) -> int:
    """The process of a rank, a child of that one."""
    for pid in children(parent):
        if f"rank {rank}\0" in Path(f"/proc/{pid}/cmdline").read_text():
            return pid
    return 0


def steps(run: Run) -> int:
    return max(checkpoint.all_steps(run.folder / "checkpoints"), default=0)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return checkpoint.newest(folder / "checkpoints")[0].tensors


@pytest.mark.parametrize("crew", [pytest.param("inline", marks=pytest.mark.attack), "processes"])
def test_ranks_on_ray_end_with_the_bits_of_ranks_on_one_machine(tmp_path, hosts, crew):
    """`processes`: the actors of each rank are Ray actors too."""
    fields = RANKS | {"group": {"crew": crew, "preempt": 1.0}}
    here = Run("ddppo", tmp_path / "here", **fields, topology="allreduce")
    assert here.result().exit_code == 0 and hosts == []
    there = Run("ddppo", tmp_path / "there", **fields)
    run = there.result()
    assert run.exit_code == 0 and run.summary["ranks"]["size"] == 2 and len(hosts) == 1
    assert ledger_balances(run.summary), run.summary["ledger"]
    one, other = weights(tmp_path / "here"), weights(tmp_path / "there")
    assert one.keys() == other.keys()
    assert [name for name, tensor in one.items() if not torch.equal(tensor, other[name])] == []


def test_ranks_that_are_killed_cost_what_was_learnt_since_the_last_checkpoint(tmp_path, hosts):
    """A rank, and the Ray actor of one, in turn; then every rank ends at the same update.

    Rank 0 is a child of this process, as all ranks are in test_ranks.py, where it is killed.
    """
    run = Run("ddppo", tmp_path / "run", **LONG_RUN)
    until(lambda: run.running() and steps(run) > 0, "the first checkpoint")
    for attempt, victim in enumerate(("rank 1", "its Ray actor"), 1):
        host = hosts[-1]["pid"]
        pid = {"rank 1": rank_of(host, 1), "its Ray actor": host}[victim]
        assert pid and len(run.told) == attempt - 1
        os.kill(pid, signal.SIGKILL)
        until(lambda n=attempt: run.running() and len(run.told) == n, "the notice of its end", NOTICE)
        assert "rank 1 " in run.told[-1], run.told
        assert "all ranks are started again" in run.told[-1] and "from step " in run.told[-1]
        before = steps(run)
        until(lambda n=before: run.running() and steps(run) > n, "checkpoints of the new group")
        assert len(hosts) == attempt + 1
    run.end()
    result = run.result()
    assert result.exit_code == 75 and ledger_balances(result.summary), result.summary["ledger"]
    until(lambda: not any(Path(f"/proc/{where['pid']}").exists() for where in hosts), "the end of the Ray actors")


@pytest.mark.attack  # the same words in test_ranks.py
def test_the_error_of_a_rank_ends_the_run_with_its_own_message(tmp_path):
    run = Run(
        "ddppo", tmp_path / "run", **RANKS, fault_plan="actor[1]@env_step=70:raise:always", supervisor={"restarts": 0}
    )  # fmt: skip
    with pytest.raises(EnvError, match="rank 1") as caught:
        run.result()
    assert "fault plan" in str(caught.value).splitlines()[0]


def test_more_ranks_than_there_is_room_for_are_refused_with_what_there_is(tmp_path):
    run = Run("ddppo", tmp_path / "run", **(RANKS | {"ranks": 9}))
    with pytest.raises(UsageError, match=r"9 ranks need 8 CPUs beside the first one, and the cluster has 6"):
        run.result()
    assert not (tmp_path / "run").exists()


def test_ranks_that_no_node_has_room_for_are_given_up_in_time(tmp_path):
    """There are as many CPUs as they need, on nodes that are each too small."""
    fields = RANKS | {"ray": {"cpus_per_actor": 2.5}, "supervisor": {"start_deadline": 3.0}}
    with pytest.raises((LearnerError, UsageError), match=r"2\.5 CPUs|no node has room"):
        Run("ddppo", tmp_path / "run", **fields).result()


def test_another_version_on_the_node_of_a_rank_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(crews_ray, "versions", lambda: {"rookery": "0.0.1", "torch": str(torch.__version__)})
    monkeypatch.setattr("rookery.crews.ray_rank.versions", crews_ray.versions)
    with pytest.raises(UsageError, match=r"has rookery .*, and the one of the learner has 0\.0\.1: install the same"):
        Run("ddppo", tmp_path / "run", **RANKS).result()
