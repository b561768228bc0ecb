"""Actors as Ray actors, on any number of nodes: the crew of `process.py`, with workers that Ray places and starts.

A Ray actor is asked to hear one message after the other, as a worker process reads its channel, and answers with the
messages that a worker process would have sent (`actor_process.py`). When it dies, Ray says so within a second, and the
pool replaces it (`pool.py`): Ray itself restarts nothing. Actors are spread over the nodes; one for which there is no
room waits until there is, and the others go on if they are enough (`ray.least`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from importlib import metadata
from pathlib import Path
from typing import Any

from rookery.core.config import RunConfig
from rookery.core.errors import UsageError
from rookery.crews.process import ProcessCrew
from rookery.pipes.ray_store import GROUPS, RayChannel, RayStore, RemoteBuffers
from rookery.processes.child import failure_message
from rookery.processes.signals import Signals
from rookery.processes.worker import ABORT_WAIT, KILL_WAIT

AVOID = 15.0  # seconds that replacements are placed on other nodes, if there is room
LOOK = 0.01  # seconds between two looks at actors that are to end


def ray_crew(config: RunConfig, folder: Path, signals: Signals, role: str = "unrolls", first: int = 0) -> RayCrew:
    store = RayStore()
    launcher = RayLauncher(store.channels, config.ray.cpus_per_actor, config.ray.least)
    return RayCrew(config, folder, signals, role, first=first, buffers=store, launcher=launcher)


class RayCrew(ProcessCrew):
    """A crew of Ray actors."""

    def deliver_references(self) -> None:
        """Before `open`: what actors fill stays on their node, and references to it are delivered."""
        store: Any = self._buffers
        store.by_reference = True


class Outbox:
    """What a worker sends while it carries out one order."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def send(self, message: dict[str, Any], timeout: float) -> None:
        self.messages.append(message)


class Resident:
    """What every Ray actor of ours has: it says where it is, and one call of it lasts as long as itself."""

    def __init__(self) -> None:
        self._ended = threading.Event()

    def about(self) -> dict[str, Any]:
        import ray

        node = ray.get_runtime_context().get_node_id()
        return {"node": ray.util.get_node_ip_address(), "id": node, "pid": os.getpid(), "versions": versions()}

    def life(self) -> None:
        self._ended.wait()


class Host(Resident):
    """The Ray actor of an actor. Orders are carried out by one thread, in their order; others answer heartbeats."""

    def __init__(self) -> None:
        super().__init__()
        self._outbox = Outbox()
        self._buffers = RemoteBuffers()
        self._actor: Any = None

    def hear(self, message: dict[str, Any], weights: Any = None) -> list[dict[str, Any]]:
        """Carry out one message, and answer with those of the worker."""
        try:
            self._carry_out(message, weights)
        except BaseException as error:
            self._outbox.messages.append(failure_message(error))
        messages, self._outbox.messages = self._outbox.messages, []
        return messages

    def _carry_out(self, message: dict[str, Any], weights: Any) -> None:
        if message["op"] == "start":
            from rookery.crews.actor_process import ActorProcess

            check_versions(message["versions"])
            add_paths(message["sys_path"])
            self._actor = ActorProcess(self._outbox, message["message"], self._buffers)
        elif message["op"] == "memory":
            self._actor.open(message)
        elif message["op"] == "stop":
            self._ended.set()
        else:
            self._buffers.offer(weights, message)
            self._actor.carry_out(message)

    def beat(self) -> tuple[int, int, int]:
        return self._buffers.beats, self._buffers.slot, self._buffers.row

    def cut(self, sequence: int) -> None:
        self._buffers.cut(sequence)

    def stacks(self) -> str:
        """The stacks of all threads, to see where one is stuck."""
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            return file.read()


def own_paths() -> list[str]:
    return [path or os.getcwd() for path in sys.path]


def add_paths(paths: list[str]) -> None:
    """Have imports of this process find what those of the driver find, as far as it is here."""
    sys.path += [path for path in paths if path not in sys.path and os.path.isdir(path)]


class RayWorker:
    """One Ray actor, as `processes.worker.Worker` is one process."""

    log = None

    def __init__(self, name: str, channel: RayChannel):
        self.name, self.channel = name, channel
        self._abort_at: float | None = None
        self._stacks: Future | None = None

    @property
    def placed(self) -> bool:
        """Whether Ray has found a node for it and it runs."""
        return bool(self.channel.where)

    def alive(self) -> bool:
        return not self.channel.ended

    def describe_exit(self) -> str:
        where = f" on node {self.channel.where['node']}" if self.channel.where else ""
        return f"is gone{where}: {self.channel.why}" if self.channel.ended else f"is running{where}"

    def log_tail(self, lines: int = 20) -> str:
        """The stack of a stuck one. What it has printed is in Ray's logs on its node."""
        if self._stacks is None or not self._stacks.done() or self._stacks.exception() is not None:
            return ""
        return "\n".join(self._stacks.result().splitlines()[-lines:])

    def abort(self, patience: float = 0.0) -> None:
        """Have it ended, if it has not ended by itself in `patience` seconds. Does not wait: `gone` carries it on."""
        at = time.monotonic() + patience
        self._abort_at = at if self._abort_at is None else min(at, self._abort_at)

    def gone(self) -> bool:
        """Whether it has ended. An abort that is due asks for its stacks first, and kills it ABORT_WAIT later."""
        if self.channel.ended:
            return True
        now = time.monotonic()
        if self._abort_at is not None and now >= self._abort_at:
            if self._stacks is None:
                self._stacks, self._abort_at = self.channel.ask_stacks(), now + ABORT_WAIT
            else:
                self.kill()
        return False

    def stop(self, timeout: float) -> None:
        stop_all([self], timeout)

    def kill(self) -> None:
        import ray

        with contextlib.suppress(Exception):  # it is gone, or the cluster is
            ray.kill(self.channel.actor)


class RayLauncher:
    """Starts Ray actors, spread over the nodes, each with its CPUs. `least`: as many are enough to go on."""

    spares = False

    def __init__(self, channels: dict[int, RayChannel], cpus: float, least: int):
        self._channels, self._cpus, self.least = channels, cpus, least
        self._ends: dict[str, float] = {}  # when an actor last ended on a node

    def start(self, name: str, message: dict[str, Any], log: Path) -> Any:
        channel = RayChannel(remote_actor(Host, self._cpus, self._node_for(message["index"]), GROUPS))
        self._channels[message["index"]] = channel
        order = {"op": "start", "message": message, "sys_path": own_paths(), "versions": versions()}
        channel.send(order, 0.0)
        return RayWorker(name, channel)

    def _node_for(self, index: int) -> Any:
        """Rather not where an actor has just ended: if the node is lost, the cluster may not know it yet."""
        from ray.util.scheduling_strategies import NodeLabelSchedulingStrategy, NotIn

        now, before = time.monotonic(), self._channels.get(index)
        if before is not None and before.where:
            self._ends[before.where["id"]] = now
        avoided = [node for node, at in self._ends.items() if now - at < AVOID]
        return NodeLabelSchedulingStrategy({}, soft={"ray.io/node-id": NotIn(*avoided)}) if avoided else "SPREAD"

    def stop(self, workers: Sequence[Any], timeout: float) -> None:
        stop_all(workers, timeout)


def remote_actor(
    kind: type, cpus: float, where: Any, groups: dict[str, int], *args: Any, memory: int = 0
) -> Any:  # fmt: skip
    """A Ray actor of this class. `where`: how Ray chooses its node. `memory`: bytes that Ray reserves for it there.

    It is not restarted by Ray.
    """
    import ray

    options = {"num_cpus": cpus, "max_restarts": 0, "max_task_retries": 0, "concurrency_groups": groups}
    remote: Any = ray.remote(**options)  # type: ignore[call-overload]
    return remote(kind).options(scheduling_strategy=where, memory=memory or None).remote(*args)


def stop_all(workers: Sequence[Any], timeout: float) -> None:
    """End them: asked first, killed after `timeout` seconds."""
    until = time.monotonic() + timeout
    for worker in workers:
        with contextlib.suppress(ConnectionError):
            worker.channel.send({"op": "stop"}, 0.0)
    _await(workers, until)
    for worker in workers:
        worker.kill()
    _await(workers, time.monotonic() + KILL_WAIT)
    for worker in workers:
        worker.channel.close()


def _await(workers: Sequence[RayWorker], until: float) -> None:
    while time.monotonic() < until and not all(worker.channel.ended for worker in workers):
        time.sleep(LOOK)


def versions() -> dict[str, str]:
    """What must be the same on all nodes: weights and shapes would not mean the same otherwise."""
    return {package: metadata.version(package) for package in ("rookery", "torch")}


def check_versions(drivers: dict[str, str]) -> None:
    """UsageError if the process that started this Ray actor has other versions."""
    import ray

    for package, own in versions().items():
        if own != drivers[package]:
            raise UsageError(
                f"node {ray.util.get_node_ip_address()} has {package} {own}, and the one of the learner has "
                f"{drivers[package]}: install the same on all nodes"
            )
