"""Several learners that stay the same (DD-PPO, Wijmans et al. 2020): `serial.py` or `local.py` on every rank, and a
`reduce` over all of them.

    theta <- ParamUpdate(theta, AllReduce(gradient of rank 1, …, gradient of rank N))

There is no server and no staleness between ranks. Each has its own actors and its own table, and the numbers of its
actors and environments follow those of the rank before it. With one rank this is `serial.py`, or `local.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from rookery.core.config import RunConfig
from rookery.core.errors import UsageError
from rookery.core.reduce import ALONE, Reduce
from rookery.core.types import EnvSpec
from rookery.crews.inline import InlineCrew
from rookery.crews.process import ProcessCrew
from rookery.crews.ready import ReadyCrew
from rookery.pipes.collective import Collective
from rookery.processes.signals import Signals
from rookery.topologies import loop
from rookery.topologies.job import Job
from rookery.topologies.preempt import Preemption


def run(
    config: RunConfig, folder: Path, signals: Signals, open_job: Callable[[EnvSpec], Job], group: Reduce = ALONE
) -> Job:
    with crew_of(config, folder, signals, group) as crew:
        return train(config, crew, open_job, group)


def crew_of(
    config: RunConfig, folder: Path, signals: Signals, group: Reduce, workers: Callable[..., Any] = ProcessCrew
) -> Any:
    """Who acts in this rank. `workers`: the crew of actors that are not in this process."""
    first = group.rank * config.actors
    if config.group.crew == "inline":
        return InlineCrew(config, signals, first)
    if config.group.crew == "ready":
        return ReadyCrew(config, folder, signals, first)
    return workers(config, folder, signals, first=first)


def train(config: RunConfig, crew: Any, open_job: Callable[[EnvSpec], Job], group: Reduce) -> Job:
    check_same(group, "environment", msgspec.to_builtins(crew.spec))
    job = open_job(crew.spec)
    learner, shapes, inline = job.learner, job.shapes(), config.group.crew == "inline"
    table = loop.table_of(job, shapes, alone=inline)
    preemption = None
    if config.group.preempt < 1 and (job.algorithm.plan().table.builds_items or not table.rounds):
        raise UsageError(
            f"recipe {config.recipe} does not wait for whole rollouts, so there are no stragglers to preempt: set "
            "group.preempt to 1"
        )
    if config.group.preempt < 1 and isinstance(group, Collective):
        preemption = Preemption(group, config.group.preempt)
        crew.cut = preemption.due
    setup = loop.prepare(job, table, shapes, learner.published.size)
    if isinstance(crew, InlineCrew):
        crew.open(setup, learner, job.threads, table.rounds)
    else:
        job.threads.share(synchronous=table.rounds)
        crew.open(setup)
    return loop.run(job, crew, table, learner, preemption)


def check_same(group: Reduce, what: str, own: dict[str, Any]) -> None:
    """UsageError on every rank if one of them has something else here than rank 0, naming the field and the rank."""
    if group.size == 1:
        return
    first, *others = (msgspec.json.decode(part) for part in group.gather(msgspec.json.encode(own)))
    for rank, other in enumerate(others, 1):
        if difference := _difference(first, other):
            path, here, there = difference
            raise UsageError(
                f"the {what} of rank {rank} is not that of rank 0: {path} is {there!r} on rank {rank}, and {here!r} on "
                "rank 0; start all ranks with the same command, code and packages"
            )


def _difference(one: Any, other: Any, path: str = "") -> tuple[str, Any, Any] | None:
    """The first place where two trees of JSON differ, and what is there."""
    if isinstance(one, dict) and isinstance(other, dict):
        for name in sorted(one.keys() | other.keys()):
            if found := _difference(one.get(name), other.get(name), f"{path}.{name}" if path else name):
                return found
        return None
    return None if one == other else (path, one, other)
