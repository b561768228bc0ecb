"""A Ray cluster of several nodes on this machine, runs on it, and environments that trouble it.

Actors import this file for its environments: what the tests need besides is imported where it is used.
"""

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
from typing import TYPE_CHECKING, Any

import gymnasium

from rookery.envs.scripted import Counter

if TYPE_CHECKING:
    import rookery

LONG = 120.0  # seconds: never reached unless something is broken
SMALL: dict[str, Any] = {"quiet": True, "seed": 3, "actors": 2, "envs_per_actor": 2, "topology": "ray_cluster"}


@contextlib.contextmanager
def cluster_of(nodes: int = 3, cpus: int = 2, **system: Any) -> Iterator[Any]:
    """So many nodes; this process has joined the first one. Yields the `Cluster`."""
    import ray
    from ray._private import worker
    from ray.cluster_utils import Cluster

    from rookery.crews.ray_session import HEALTH

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
    """A training run in a thread of this process, so that a test may trouble it meanwhile."""

    def __init__(self, recipe: str, out: Path, **fields: Any):
        from rookery.processes.signals import Signals
        from rookery.run.configured import configure
        from rookery.run.run import check

        super().__init__(daemon=True)
        env = fields.pop("env", "CartPole-v1")
        self.config = check(configure(recipe, env, out=str(out), **(SMALL | fields)))
        self.folder = out
        self.signals = Signals()
        self.told: list[str] = []
        self._run: rookery.Run | None = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        from rookery.run.run import start

        try:
            with self.signals:
                self._run = start(self.config, self.signals, self.told.append)
        except BaseException as error:
            self._error = error

    def running(self) -> bool:
        """Whether it has not ended; if an error ended it, that is raised."""
        if self._error is not None:
            raise self._error
        return self.is_alive()

    def end(self) -> None:
        """Ask it to write a checkpoint and end, as a signal would."""
        self.signals.request(signal.SIGTERM)

    def result(self) -> rookery.Run:
        self.join(LONG)
        assert not self.running(), "the run does not end"
        assert self._run is not None
        return self._run


# Environments


class Gate(Counter):
    """Episodes without end. At every 16th step, the tenth of them first, it waits as long as a file exists."""

    def __init__(self, file: str):
        super().__init__(lengths=(10**9,))
        self.file, self.steps = Path(file), 0

    def step(self, action: Any) -> Any:
        self.steps += 1
        while self.steps % 16 == 10 and self.file.exists():
            time.sleep(0.01)
        time.sleep(0.001)
        return super().step(action)


def gate(file: str) -> gymnasium.Env:
    return Gate(file)


def missing_there(pid: int) -> gymnasium.Env:
    """An environment that exists in the process of the test, and nowhere else."""
    if os.getpid() != pid:
        import a_library_that_is_not_installed_on_this_node  # noqa: F401
    return Counter()


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
