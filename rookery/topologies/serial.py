"""Everything in one process, deterministic: the debugger's friend, and the reference for every other topology.

Any number of virtual actors take turns. Read `local.py` beside this page: the difference is the lesson.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from rookery.actor import Actor, ActorReport, empty_unroll, unroll_shapes
from rookery.config import RunConfig
from rookery.envs.lanes import Lanes
from rookery.envs.make import make
from rookery.errors import EnvError
from rookery.replay.table import QueueTable
from rookery.topologies.faults import FaultPlan, InjectedFault
from rookery.topologies.job import Job
from rookery.topologies.signals import Signals
from rookery.topologies.supervise import Restarts
from rookery.topologies.threads import available_cores
from rookery.types import EnvSpec, Unroll


def run(config: RunConfig, folder: Path, signals: Signals, open_job: Callable[[EnvSpec], Job]) -> Job:
    # Environments with threads of their own may use every core here; what they compute does not depend on it.
    cores = available_cores()
    lanes = [make(config, config.envs_per_actor, threads=cores) for _ in range(config.actors)]
    try:
        job = open_job(lanes[0].spec)
        return _run(job, lanes)
    finally:
        for each in lanes:
            each.close()


def _run(job: Job, lanes: list[Lanes]) -> Job:
    config, journal = job.config, job.journal
    nets = job.acting_nets()
    actors = [Actor(job.algorithm, nets, each, config.seed, index) for index, each in enumerate(lanes)]
    state = job.algorithm.initial_state(nets, 1)
    shapes = unroll_shapes(job.spec, job.algorithm.plan(), config.envs_per_actor, state)
    buffers = [empty_unroll(shapes) for _ in actors]
    table = QueueTable(config.actors)
    keeper = Keeper(job, lanes)

    journal.begin()
    job.threads.acting()
    for actor in actors:
        keeper.start(actor)
    while True:
        if table.can_sample():
            job.learn(table)
            job.refresh()
            if job.checkpoint_due():
                job.save(lambda: [actor.snapshot() for actor in actors], table.steps)
        elif job.goes_on():
            job.threads.acting()
            with journal.collecting(1) as told:
                for actor, buffer in zip(actors, buffers):
                    told(keeper.unroll(actor, buffer))
                    table.insert(buffer, actor.index, job.sequence)
        else:
            break
    job.close(lambda: [actor.snapshot() for actor in actors], table.steps)
    return job


class Keeper:
    """Starts actors, and replaces the environments of one that fails: what `supervise` does for processes."""

    def __init__(self, job: Job, lanes: list[Lanes]):
        self.job, self.lanes = job, lanes
        limits = job.config.supervisor
        self.restarts = [Restarts(limits.restarts, limits.window) for _ in lanes]
        self.incarnation = [0] * len(lanes)
        self.plan = FaultPlan.parse(job.config.fault_plan)

    def start(self, actor: Actor) -> None:
        snapshots, index = self.job.snapshots, actor.index
        actor.sequence = self.job.sequence
        if snapshots and snapshots[index] is not None and self.incarnation[index] == 0:
            actor.restore(snapshots[index])
        else:
            actor.reset(f"{self.job.sequence}.{self.incarnation[index]}")

    def unroll(self, actor: Actor, buffer: Unroll) -> ActorReport:
        index = actor.index
        while True:
            try:
                return actor.unroll(buffer, self.job.learner.version, self._tick(actor))
            except (EnvError, InjectedFault) as cause:
                error = cause if isinstance(cause, EnvError) else EnvError(str(cause), "worker_error")
                delay = self.restarts[index].next(error)  # raises the error itself once there were too many
                self.job.journal.lost(error.steps, error.reason, f"replaced in {delay:.1f} s: {error}")
                time.sleep(delay)
                self.incarnation[index] += 1
                self.lanes[index].close()
                self.lanes[index] = actor.lanes = make(self.job.config, self.job.config.envs_per_actor)
                self.start(actor)

    def _tick(self, actor: Actor) -> Callable[[int], None] | None:
        if not self.plan:
            return None
        before = actor.sequence * actor.plan.unroll
        return lambda row: self.plan.fire(
            "actor", actor.index, before + row, actor.sequence, self.incarnation[actor.index]
        )
