"""A Ray cluster of several nodes on this machine, what its actors are doing, and environments that trouble it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium

import rookery
from rookery.envs.scripted import Counter
from rookery.topologies.ray_cluster import HEALTH

LONG = 120.0  # seconds: never reached unless something is broken
SMALL: dict[str, Any] = {"quiet": True, "seed": 3, "actors": 2, "envs_per_actor": 2, "topology": "ray_cluster"}


@contextlib.contextmanager
def cluster_of(nodes: int = 3, cpus: int = 2, **system: Any) -> Iterator[Any]:
    """So many nodes; this process has joined the first one. Yields the `Cluster`."""
    import ray
    from ray._private import worker
    from ray.cluster_utils import Cluster

    worker.print_worker_logs = lambda *args, **more: None
    head = {"num_cpus": cpus, "include_dashboard": False, "_system_config": HEALTH | system}
    before = os.environ.get("RAY_ADDRESS")
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(nodes - 1):
            cluster.add_node(num_cpus=cpus, wait=False)
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
        if before is None:
            os.environ.pop("RAY_ADDRESS", None)


def node_ids() -> set[str]:
    import ray

    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def until(condition: Callable[[], Any], what: str, seconds: float = LONG) -> Any:
    """What the condition gives, once that is true."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.005)
    return found


def ledger_balances(summary: dict[str, Any]) -> bool:
    ledger = summary["ledger"]
    gone = ledger["trained"] + ledger.get("evicted", 0) + sum(ledger["dropped"].values()) + ledger["in_flight"]
    return ledger["collected"] == gone == summary["env_steps"]


def messages(folder: Path) -> list[str]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["text"] for line in lines if line["kind"] == "message"]


class Run(threading.Thread):
    """A training run in a thread, so that the test may trouble it meanwhile."""

    def __init__(self, recipe: str, **fields: Any):
        super().__init__(daemon=True)
        self.recipe, self.fields = recipe, fields
        self.run_: rookery.Run | None = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.run_ = rookery.train(self.recipe, **self.fields)
        except BaseException as error:
            self.error = error

    def result(self) -> rookery.Run:
        self.join(LONG)
        assert not self.is_alive(), "the run does not end"
        if self.error is not None:
            raise self.error
        assert self.run_ is not None
        return self.run_


# Environments


class Gate(Counter):
    """An episode's step waits as long as a file exists: the test decides when a run goes on."""

    def __init__(self, file: str):
        super().__init__(lengths=(20,))
        self.file = Path(file)

    def step(self, action: Any) -> Any:
        while self.file.exists():
            time.sleep(0.01)
        return super().step(action)


def gate(file: str) -> gymnasium.Env:
    return Gate(file)


def slow(seconds: float = 0.002) -> gymnasium.Env:
    """A run of it takes long enough to be troubled in the middle."""
    env = Counter(lengths=(20,))
    step = env.step

    def step_slowly(action: Any) -> Any:
        time.sleep(seconds)
        return step(action)

    env.step = step_slowly  # type: ignore[method-assign]
    return env


def missing_there(pid: int) -> gymnasium.Env:
    """An environment that exists in the process of the test, and nowhere else."""
    if os.getpid() != pid:
        import a_library_that_is_not_installed_on_this_node  # noqa: F401
    return Counter()


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
