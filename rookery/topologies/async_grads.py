"""Workers that learn by themselves and send gradients; one applier that takes them (Gorila, Nair et al. 2015; A3C).

Each worker has environments, a table (a replay memory, or its last unroll) and a copy of the nets of its own; it acts,
and fills a slot of shared memory with a gradient. The applier owns the weights and the one optimiser state: it applies
what comes, in the order of arrival, and publishes. A gradient that is too old, or whose loss is an outlier, is dropped
and counted.

With one worker that waits for its gradient to be applied this is `serial.py`, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rookery.core.config import RunConfig
from rookery.core.errors import UsageError
from rookery.core.types import EnvSpec
from rookery.core.wording import setting
from rookery.crews.process import ProcessCrew
from rookery.processes.signals import Signals
from rookery.roles.applier import Applier
from rookery.tables.factory import check_workers
from rookery.tables.gradients import GradientTable
from rookery.topologies import loop
from rookery.topologies.job import Job
from rookery.topologies.resume import restore_table


def run(config: RunConfig, folder: Path, signals: Signals, open_job: Callable[[EnvSpec], Job]) -> Job:
    with ProcessCrew(config, folder, signals, role="gradients") as crew:
        return train(crew, open_job(crew.spec))


def train(crew: ProcessCrew, job: Job) -> Job:
    check(job)
    config = job.config
    table = GradientTable(config.actors, config.gradients, job.algorithm.plan().table.builds_items)
    applier = Applier(job.learner)
    restore_table(job, table)
    job.threads.share(synchronous=config.actors == 1)
    crew.open(loop.prepare(job, table, {"gradient": ((applier.size,), "float32")}, applier.floats))
    return loop.run(job, crew, table, applier)


def check(job: Job) -> None:
    """UsageError for what cannot be trained like this, or would not fit into memory."""
    config, plan = job.config, job.algorithm.plan()
    if why := job.algorithm.not_remote:
        raise UsageError(f"recipe {config.recipe} cannot compute gradients in workers: {why}")
    if config.net.normalize_obs:
        off = setting("net.normalize_obs", False)
        raise UsageError(f"the applier sees no observations to normalise by; use {off}")
    check_workers(plan, job.shapes(), job.spec, config.actors)
    if job.resumed_at is not None and plan.table.builds_items:
        job.journal.say("the workers' replay memories are not part of checkpoints: they are filled again from empty")
