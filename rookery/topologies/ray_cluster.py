"""A Ray cluster: `local.py` or `async_grads.py` with the actors as Ray actors, on any number of nodes.

The learner is in this process, on a node of the cluster (`crews/ray_session.py`). Data passes this process by where a
memory has parts, or aggregators put batches together (`by_reference.py`). Several learners are ranks that Ray places.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from rookery.core.config import RunConfig
from rookery.core.errors import UsageError
from rookery.core.reduce import ALONE, Reduce
from rookery.core.types import EnvSpec
from rookery.crews.ray import ray_crew
from rookery.crews.ray_rank import RayRanks
from rookery.crews.ray_session import joined
from rookery.processes.signals import Signals
from rookery.topologies import allreduce, async_grads, by_reference, local
from rookery.topologies.job import Job


def run(
    config: RunConfig, folder: Path, signals: Signals, open_job: Callable[[EnvSpec], Job], group: Reduce = ALONE
) -> Job:
    if group.size > 1:
        return _run_rank(config, folder, signals, open_job, group)
    gradients = config.gradients.by_workers
    with joined(config), ray_crew(config, folder, signals, "gradients" if gradients else "unrolls") as crew:
        job = open_job(crew.spec)
        if gradients:
            return async_grads.train(crew, job)
        if job.algorithm.plan().table.parts > 1:
            return by_reference.sharded(crew, job)
        return by_reference.aggregated(crew, job) if config.ray.aggregators else local.train(crew, job)


def _run_rank(
    config: RunConfig, folder: Path, signals: Signals, open_job: Callable[[EnvSpec], Job], group: Reduce
) -> Job:
    """One of several learners. Its actors are Ray actors too, unless it acts itself (`group.crew`)."""
    remote = config.group.crew == "processes"
    if config.ray.aggregators:
        raise UsageError("aggregators serve one learner: use ray.aggregators 0 with several ranks")
    with (
        joined(config) if remote else contextlib.nullcontext(),
        allreduce.crew_of(config, folder, signals, group, ray_crew) as crew,
    ):
        return allreduce.train(config, crew, open_job, group)


@contextlib.contextmanager
def ranks(config: RunConfig) -> Iterator[tuple[RunConfig, RayRanks]]:
    """What starts the ranks on the cluster, and the config for them: they join the same one."""
    with joined(config) as ray:
        address = ray.get_runtime_context().gcs_address
        launcher = RayRanks(config.ray.cpus_per_actor, config.supervisor.start_deadline)
        yield replace(config, ray=replace(config.ray, address=address)), launcher
