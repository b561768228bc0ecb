"""Actor processes on one machine, shared memory between them: `serial.py` with the actors moved out.

Where the algorithm is synchronous, the results are those of `serial.py`, bit for bit. With a replay memory that has no
exact ratio of draws to insertions, or a queue with lag, actors run ahead of the learner.

A worker that dies, hangs or fails is replaced, what it was filling is counted as lost; too often, and the run ends with
the worker's error message.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rookery.core.config import RunConfig
from rookery.core.errors import UsageError
from rookery.core.types import EnvSpec
from rookery.crews.process import ProcessCrew
from rookery.processes.signals import Signals
from rookery.topologies import loop
from rookery.topologies.job import Job


def run(config: RunConfig, folder: Path, signals: Signals, open_job: Callable[[EnvSpec], Job]) -> Job:
    with ProcessCrew(config, folder, signals) as crew:  # starts the processes, and ends them
        return train(crew, open_job(crew.spec))


def train(crew: ProcessCrew, job: Job) -> Job:
    learner, shapes = job.learner, job.shapes()
    table = loop.table_of(job, shapes, alone=False)
    if table.rounds and job.config.ray.least:
        raise UsageError(
            f"recipe {job.config.recipe} trains on an unroll of every actor, and would wait for those that have no "
            "room: leave ray.least out, and use as many actors as there is room for"
        )
    job.threads.share(synchronous=table.rounds)
    crew.open(loop.prepare(job, table, shapes, learner.published.size))
    return loop.run(job, crew, table, learner)
