"""How long an all-reduce takes on this machine: two processes, gloo, a few sizes.

`measure` is the parent's side; `python -m rookery.crews.allreduce_timing` the worker. The processes find each other by
a file in a temporary folder; gloo itself connects them over the loopback interface.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from rookery.core.errors import LearnerError
from rookery.pipes.channel import ChannelClosed, ChannelTimeout
from rookery.processes.child import serve
from rookery.processes.orphans import guarded
from rookery.processes.worker import Worker, abort_all, stop_all

MODULE = "rookery.crews.allreduce_timing"
SIZES = (1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22)  # floats
RANKS = 2
DEADLINE = 120.0  # seconds for everything


@guarded()
def measure(sizes: Sequence[int] = SIZES, repeats: int = 30) -> list[float]:
    """Seconds of an all-reduce of so many floats between two processes; the lower quartile, as other load disturbs."""
    with tempfile.TemporaryDirectory(prefix="rookery-allreduce-") as folder:
        workers: list[Worker] = []
        try:
            for rank in range(RANKS):
                task = {"rank": rank, "store": f"{folder}/store", "sizes": list(sizes), "repeats": repeats}
                log = Path(folder) / f"rank-{rank}.log"
                workers.append(Worker.start(MODULE, f"rank {rank}", task, {}, log))
            answers = [worker.channel.recv(DEADLINE) for worker in workers]
        except (ChannelClosed, ChannelTimeout) as error:
            raise LearnerError(f"the all-reduce could not be timed: {error}\n{workers[0].log_tail(20)}") from error
        finally:
            abort_all(workers)
            stop_all(workers, 0.0)
    for answer in answers:
        if answer["op"] == "failed":
            raise LearnerError(f"the all-reduce could not be timed: {answer['error']}")
    return answers[0]["seconds"]


def body(channel: Any, task: dict[str, Any], fds: dict[str, int]) -> None:
    import os

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # this machine only
    import torch
    import torch.distributed as dist

    store = dist.FileStore(task["store"], RANKS)
    dist.init_process_group(
        "gloo", store=store, rank=task["rank"], world_size=RANKS, timeout=timedelta(seconds=DEADLINE / 2)
    )
    quick = []
    for floats in task["sizes"]:
        vector = torch.zeros(floats)
        taken = []
        for _ in range(task["repeats"] + 2):
            dist.barrier()  # both start together: waiting for the other is not part of the time
            start = time.perf_counter()
            dist.all_reduce(vector)
            taken.append(time.perf_counter() - start)
        quick.append(sorted(taken[2:])[task["repeats"] // 4])
    dist.destroy_process_group()
    channel.send({"op": "answer", "seconds": quick}, timeout=DEADLINE)


if __name__ == "__main__":
    serve(body)
