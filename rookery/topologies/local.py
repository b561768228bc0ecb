"""Actor processes on one machine, shared memory between them: `serial.py` with the actors moved out.

Slot numbers travel, data does not: an actor is given a free slot and the newest weights, fills the slot, and says so.
With max_lag 0 this is a barrier both ways: the learner waits for every actor, the actors wait for the new weights.
The learner uses every core while the actors wait, and none while they act.

A worker that dies, hangs or fails is replaced, its half-filled slot dropped and counted; too often, and the run ends
with the worker's own words.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from rookery.actor import as_unroll, unroll_shapes
from rookery.config import RunConfig
from rookery.replay.table import QueueTable
from rookery.topologies.crew import Crew
from rookery.topologies.job import Job
from rookery.topologies.signals import Signals
from rookery.types import EnvSpec


def run(config: RunConfig, folder: Path, signals: Signals, open_job: Callable[[EnvSpec], Job]) -> Job:
    with Crew(config, folder, signals) as crew:  # starts the processes; ends them, whatever happens
        job = open_job(crew.spec())
        return _run(job, crew)


def _run(job: Job, crew: Crew) -> Job:
    config, learner, journal, split = job.config, job.learner, job.journal, job.journal.split
    state = job.algorithm.initial_state(learner.nets, 1)
    shapes = unroll_shapes(job.spec, job.algorithm.plan(), config.envs_per_actor, state)
    crew.open(job, shapes, count=config.actors)
    table = QueueTable(config.actors)

    journal.begin()
    while True:
        if table.can_sample():
            job.learn(table)
            if job.checkpoint_due():
                job.save(crew.snapshots, table.steps)
        elif job.goes_on():
            with split.stage("transfer"):
                crew.publish(learner.published.read(), learner.version)
            with journal.collecting(config.actors) as told:
                for actor, slot, report in crew.collect():
                    unroll = as_unroll(crew.slots.arrays(slot))
                    table.insert(unroll, actor, job.sequence, release=partial(crew.release, slot))
                    told(report)
        else:
            break
    job.close(crew.snapshots, table.steps)
    return job
