"""Ranks that Ray places, as close together as there is room. Rank 0 is a process beside the caller, with its terminal.

The Ray actor of a rank starts the process that `run/ranks.py` starts on one machine, passes messages to it, and answers
with its last one. When the actor or its node is lost, the process is too, and the supervisor starts the group again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rookery.core.errors import LearnerError
from rookery.crews.ray import (
    RayWorker,
    Resident,
    add_paths,
    check_versions,
    own_paths,
    remote_actor,
    stop_all,
    versions,
)
from rookery.pipes.channel import ChannelClosed, ChannelTimeout
from rookery.pipes.ray_store import LIFE, WATCH, WORK, RayChannel
from rookery.processes import worker as processes
from rookery.processes.child import failure_message
from rookery.processes.worker import Worker

GROUPS = {WORK: 3, WATCH: 1, LIFE: 1}  # one thread waits for the rank's last message, others pass messages on
LOOK = 1.0  # seconds between two looks at a rank that says nothing
STOP = 5.0  # seconds for a rank to end when asked to
STEP = 0.02  # seconds between two looks at actors that are to be placed


class RankHost(Resident):
    def __init__(self) -> None:
        super().__init__()
        self._worker: Worker | None = None

    def hear(self, message: dict[str, Any], weights: Any = None) -> list[dict[str, Any]]:
        if message["op"] == "start":
            try:
                return [self._run(message)]
            except Exception as error:
                return [failure_message(error)]
        if self._worker is not None:
            if message["op"] == "stop":
                self._worker.stop(STOP)
            else:
                self._worker.channel.send(message, timeout=1.0)
        if message["op"] == "stop":
            self._ended.set()
        return []

    def _run(self, start: dict[str, Any]) -> dict[str, Any]:
        """Start the process of the rank; its last message, or how it ended."""
        check_versions(start["versions"])
        add_paths(start["sys_path"])
        log = Path(start["log"])
        seen = log if log.parent.is_dir() else None  # the run folder may not be visible from here
        self._worker = Worker.start(start["module"], start["name"], start["message"], {}, seen)
        while True:
            try:
                return self._worker.channel.recv(LOOK)
            except ChannelTimeout:
                continue
            except ChannelClosed:
                self._worker.stop(STOP)
                return {"op": "lost", "how": self._worker.describe_exit(), "log": self._worker.log_tail(20)}


class RayRanks:
    """Starts the processes of all ranks: the first here, the others where Ray places them."""

    def __init__(self, cpus: float, deadline: float):
        import ray

        self.address = ray.util.get_node_ip_address()  # that the others find this process at
        self._cpus, self._deadline = cpus, deadline

    def start(self, module: str, messages: Sequence[dict[str, Any]], logs: Path) -> list[Any]:
        import ray

        channels = self._placed(len(messages) - 1)
        nodes = [ray.get_runtime_context().get_node_id(), *(channel.where["id"] for channel in channels)]
        here, seen = Counter(nodes), Counter[str]()
        workers: list[Any] = []
        for rank, (message, node) in enumerate(zip(messages, nodes, strict=True)):
            message, name = message | {"here": here[node], "local": seen[node]}, f"rank {rank}"
            seen[node] += 1
            if rank == 0:
                workers.append(Worker.start(module, name, message, {}, None))
                continue
            channel = channels[rank - 1]
            order = {"op": "start", "module": module, "name": name, "message": message, "sys_path": own_paths()}
            channel.send(order | {"log": str(logs / f"rank-{rank}.log"), "versions": versions()}, 0.0)
            workers.append(RayWorker(name, channel))
        return workers

    def _placed(self, count: int) -> list[RayChannel]:
        """Ray actors for so many ranks, once all of them run."""
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._group = placement_group([{"CPU": self._cpus}] * count, strategy="PACK")
        channels = []
        for index in range(count):
            where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
            channels.append(RayChannel(remote_actor(RankHost, self._cpus, where, GROUPS)))
        until = time.monotonic() + self._deadline
        while not all(channel.where for channel in channels):
            if time.monotonic() > until or any(channel.ended for channel in channels):
                why = next((channel.why for channel in channels if channel.ended), "no node has room for all of them")
                self._free(channels)
                raise LearnerError(f"{count} ranks were not placed on the cluster in {self._deadline:g} s: {why}")
            time.sleep(STEP)
        return channels

    def stop(self, workers: Sequence[Any], timeout: float) -> None:
        processes.stop_all([worker for worker in workers if isinstance(worker, Worker)], timeout)
        remote = [worker for worker in workers if isinstance(worker, RayWorker)]
        stop_all(remote, timeout)
        self._free([worker.channel for worker in remote])

    def _free(self, channels: Sequence[RayChannel]) -> None:
        from ray.util.placement_group import remove_placement_group

        for channel in channels:
            channel.close()
        remove_placement_group(self._group)
