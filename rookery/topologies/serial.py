"""Everything in one process, deterministic: for debugging, and the reference for every other topology.

Actors take turns. Read `local.py` beside this page: the difference between the two is what changes when actors move
out of the learner's process.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rookery.core.config import RunConfig
from rookery.core.types import EnvSpec
from rookery.crews.inline import InlineCrew
from rookery.processes.signals import Signals
from rookery.topologies import loop
from rookery.topologies.job import Job


def run(config: RunConfig, folder: Path, signals: Signals, open_job: Callable[[EnvSpec], Job]) -> Job:
    with InlineCrew(config, signals) as crew:  # makes the environments, and closes them
        job = open_job(crew.spec)
        learner, shapes = job.learner, job.shapes()
        table = loop.table_of(job, shapes, alone=True)
        crew.open(loop.prepare(job, table, shapes, learner.published.size), learner, job.threads, table.rounds)
        return loop.run(job, crew, table, crew.apart(learner) if config.compile else learner)
