"""What fails on a cluster is noticed in time, replaced where there is room, and counted; training goes on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support_ray import Run, cluster_of, ledger_balances, messages, node_ids, until

from rookery.core.errors import EnvError
from rookery.crews.pool import State
from rookery.crews.process import ProcessCrew

NOTICE = 5.0  # seconds for the end of a process or a node to be noticed
PPO = {"algo": {"unroll": 16, "epochs": 1, "minibatches": 1}, "preset": "vector"}
UNROLLS = {"algo": {"unroll": 16}, "preset": "vector"}
QUEUE = {"lag": 1, "batch": 4}  # no actor may take all the room in the queue while others stand still
REPLAY = {"min_size": 100, "batch": 16, "capacity": 600, "samples_per_insert": 2.0, "slack": 64.0, "save": False}
CASES: dict[str, dict[str, Any]] = {
    "ppo": PPO, "impala": {"algo": {"unroll": 16, "queue": QUEUE}, "preset": "vector"}, "a3c": UNROLLS,
    "apex_dqn": {"algo": {"unroll": 16, "replay": REPLAY}, "preset": "vector"},
    "gorila": {"algo": {"unroll": 16, "replay": REPLAY | {"slack": 0.0}}, "preset": "vector"},
}  # fmt: skip
MORE = ("impala", "apex_dqn", "a3c", "gorila")  # of the same crew


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[Any]:
    with cluster_of(3) as cluster:
        yield cluster


@pytest.fixture
def crews(monkeypatch) -> list[ProcessCrew]:
    began: list[ProcessCrew] = []
    enter = ProcessCrew.__enter__

    def enter_seen(crew: ProcessCrew) -> ProcessCrew:
        began.append(crew)
        return enter(crew)

    monkeypatch.setattr(ProcessCrew, "__enter__", enter_seen)
    return began


class Halted:
    """A run whose actors stand still in the middle of an unroll, until `go`."""

    def __init__(self, tmp_path: Path, crews: list[ProcessCrew], recipe: str, **fields: Any):
        self.file = tmp_path / "gate"
        settings = CASES[recipe] | {"env": "support_ray:gate", "env_kwargs": {"file": str(self.file)}} | fields
        self.run = Run(recipe, tmp_path / "run", **settings)
        until(lambda: self.run.running() and crews, "the crew")
        self.crew = crews[0]
        until(lambda: self.run.running() and any(self.crew.sequences), "the first unroll")
        self.file.touch()

    def filling(self, index: int) -> bool:
        """Whether an actor stands still in the middle of an unroll, and we have heard of it."""
        channel, slots = self.crew._buffers.channels[index], self.crew._slots[index]
        return bool(slots) and channel.filling == slots[0] and channel.rows > 0

    def victim(self, candidates: Iterable[int]) -> int:
        """One of these that stands still in the middle of an unroll: another may wait for its unrolls to be taken."""
        until(lambda: self.run.running() and any(map(self.filling, candidates)), "a half filled unroll")
        return next(index for index in candidates if self.filling(index))

    def pid(self, index: int) -> int:
        return self.crew._buffers.channels[index].where["pid"]

    def node(self, index: int) -> str:
        return self.crew._buffers.channels[index].where["id"]

    def up(self, index: int) -> bool:
        return self.crew.pool.places[index].state is State.UP

    def go(self) -> None:
        self.file.unlink()


def noticed(halted: Halted, index: int, since: float) -> float:
    """Seconds until the pool knew."""
    until(lambda: not halted.up(index), "the notice of its end", NOTICE)
    return time.monotonic() - since


@pytest.mark.parametrize("recipe", ["ppo", *(pytest.param(name, marks=pytest.mark.attack) for name in MORE)])
def test_an_actor_that_is_killed_in_the_middle_of_an_unroll(tmp_path, crews, recipe):
    halted = Halted(tmp_path, crews, recipe, env_steps=900)
    index = halted.victim((1, 0))
    rows, began = halted.crew._buffers.channels[index].rows, time.monotonic()
    os.kill(halted.pid(index), signal.SIGKILL)
    assert noticed(halted, index, began) < NOTICE
    halted.go()
    summary = halted.run.result().summary
    assert summary["exit_reason"] == "env_steps" and summary["restarts"] == 1
    assert ledger_balances(summary), summary["ledger"]
    assert 0 < rows * 2 <= summary["ledger"]["dropped"]["actor_died"]
    assert halted.crew.pool.places[index].incarnation == 1
    told = [text for text in messages(tmp_path / "run") if f"actor {index} is gone on node" in text]
    assert len(told) == 1 and "replaced in" in told[0] and "support_ray:gate" in told[0]


def test_a_node_that_is_lost_takes_its_actors_along_and_they_are_replaced_elsewhere(tmp_path, crews, cluster):
    halted = Halted(tmp_path, crews, "impala", env_steps=10**7, actors=4)
    head = cluster.head_node.node_id
    victim = halted.victim([index for index in range(4) if halted.node(index) != head])
    node = next(node for node in cluster.worker_nodes if node.node_id == halted.node(victim))
    theirs = [index for index in range(4) if halted.node(index) == node.node_id]
    before, began = halted.crew.sequences[victim], time.monotonic()
    cluster.remove_node(node, allow_graceful=False)
    for index in theirs:
        assert noticed(halted, index, began) < NOTICE
    halted.go()
    try:
        until(lambda: halted.run.running() and halted.crew.sequences[victim] > before + 1, "its successor's unrolls")
        assert halted.node(victim) != node.node_id
        halted.run.end()
        run = halted.run.result()
    finally:
        cluster.add_node(num_cpus=2)
    assert run.exit_code == 75 and run.summary["restarts"] == len(theirs), "no successor was placed on the lost node"
    assert ledger_balances(run.summary) and sum(run.summary["ledger"]["dropped"].values()) > 0
    until(lambda: node.node_id not in node_ids(), "the cluster to notice")


def test_an_environment_that_hangs_is_ended_at_its_deadline_and_its_stack_told(tmp_path):
    fault = {"fault": "hang", "at_episode": 2, "at_step": 3, "marker": str(tmp_path / "struck")}
    run = Run(
        "ppo", tmp_path / "run", env="rookery/Faulty-v0", env_kwargs=fault, env_steps=600, **PPO,
        supervisor={"step_deadline": 2.5},
    )  # fmt: skip
    summary = run.result().summary
    assert summary["exit_reason"] == "env_steps" and summary["restarts"] == 1
    assert ledger_balances(summary) and summary["ledger"]["dropped"].keys() == {"actor_hung"}
    told = [text for text in messages(tmp_path / "run") if "hung" in text]
    assert len(told) == 1 and "rookery/Faulty-v0" in told[0] and "scripted.py" in told[0], told


@pytest.mark.attack  # test_user_errors.py has such an error on a node, test_faults_local.py the words
def test_an_environment_that_raises_is_named_first_with_episode_and_step(tmp_path):
    fault = {"fault": "raise_step", "at_episode": 1, "at_step": 3}
    run = Run(
        "ppo", tmp_path / "run", env="rookery/Faulty-v0", env_kwargs=fault, **PPO, supervisor={"restarts": 1}
    )  # fmt: skip
    with pytest.raises(EnvError) as caught:
        run.result()
    first = str(caught.value).splitlines()[0]
    assert "rookery/Faulty-v0" in first and "episode 1" in first and "step 3" in first and "scripted fault" in first


def test_an_environment_that_raises_once_is_made_again_and_its_steps_are_counted(tmp_path):
    fault = {"fault": "raise_step", "at_episode": 1, "at_step": 3, "marker": str(tmp_path / "struck")}
    run = Run("ppo", tmp_path / "run", env="rookery/Faulty-v0", env_kwargs=fault, env_steps=600, **PPO)
    summary = run.result().summary
    assert summary["exit_reason"] == "env_steps" and summary["restarts"] == 1
    assert ledger_balances(summary) and sum(summary["ledger"]["dropped"].values()) > 0


@pytest.mark.attack  # a worker that hangs is ended at the same deadline, and one that is killed is as gone as this
@pytest.mark.parametrize("fault", ["sigstop", "exit"])
def test_a_worker_that_exits_or_is_stopped_is_replaced(tmp_path, fault):
    run = Run(
        "impala", tmp_path / "run", env="support_ray:gate", env_kwargs={"file": str(tmp_path / "none")}, **UNROLLS,
        env_steps=900, fault_plan=f"actor[1]@env_step=100:{fault}", supervisor={"step_deadline": 3.0},
    )  # fmt: skip
    summary = run.result().summary
    assert summary["exit_reason"] == "env_steps" and summary["restarts"] == 1
    assert ledger_balances(summary), summary["ledger"]


@pytest.mark.attack  # the message is that of the worker that is killed above, the end that of test_faults_local.py
def test_a_worker_that_dies_every_time_ends_the_run_with_what_is_known_of_its_end(tmp_path):
    run = Run(
        "ppo", tmp_path / "run", **PPO, fault_plan="actor[1]@unroll=2:sigkill:always", supervisor={"restarts": 1}
    )  # fmt: skip
    with pytest.raises(EnvError, match=r"^actor 1 is gone on node .* in environment CartPole-v1, unroll 2, row"):
        run.result()


# Nodes come and go


def test_a_node_that_joins_is_used_and_one_that_leaves_is_survived(tmp_path, crews, cluster):
    """Each actor takes a whole node, and there are nodes for three of four."""
    halted = Halted(
        tmp_path, crews, "impala", env_steps=10**7, actors=4, ray={"cpus_per_actor": 2.0, "least": 2}
    )  # fmt: skip
    crew = halted.crew
    halted.go()
    until(lambda: halted.run.running() and sum(map(halted.up, range(4))) == 3, "three actors")
    waiting = [index for index in range(4) if not halted.up(index)]
    assert crew.sequences[waiting[0]] == 0
    joined = cluster.add_node(num_cpus=2)
    until(lambda: halted.run.running() and crew.sequences[waiting[0]] > 2, "an unroll of the actor that has waited")
    assert halted.node(waiting[0]) == joined.node_id
    before = list(crew.sequences)
    cluster.remove_node(joined, allow_graceful=False)
    until(lambda: halted.run.running() and not halted.up(waiting[0]), "the notice of its end", NOTICE)
    others = [index for index in range(4) if index != waiting[0]]
    until(
        lambda: halted.run.running() and all(crew.sequences[index] > before[index] + 3 for index in others),
        "the other actors to go on",
    )
    halted.run.end()
    run = halted.run.result()
    assert run.exit_code == 75 and run.summary["exit_reason"] == "requeue" and run.summary["restarts"] == 1
    assert ledger_balances(run.summary), run.summary["ledger"]
    until(lambda: joined.node_id not in node_ids(), "the cluster to notice")
