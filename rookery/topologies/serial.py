"""Everything in one process, deterministic: the debugger's friend, and the reference for every other topology.

Any number of virtual actors take turns. Read `local.py` beside this page: the difference is the lesson.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rookery.actor import Actor, ActorReport
from rookery.config import RunConfig
from rookery.envs.lanes import Lanes
from rookery.envs.make import make
from rookery.errors import EnvError
from rookery.producer import Arrays, Producer, empty_arrays, handover_shapes
from rookery.topologies.faults import FaultPlan, InjectedFault
from rookery.topologies.feed import Feed, make_feed
from rookery.topologies.job import Job
from rookery.topologies.signals import Signals
from rookery.topologies.supervise import Restarts
from rookery.topologies.threads import available_cores
from rookery.types import EnvSpec


def run(config: RunConfig, folder: Path, signals: Signals, open_job: Callable[[EnvSpec], Job]) -> Job:
    # Environments with threads of their own may use every core here; what they compute does not depend on it.
    cores = available_cores()
    lanes: list[Lanes] = []
    try:
        for _ in range(config.actors):
            lanes.append(make(config, config.envs_per_actor, threads=cores))
        job = open_job(lanes[0].spec)
        return _run(job, lanes)
    finally:
        for each in lanes:
            each.close()


def _run(job: Job, lanes: list[Lanes]) -> Job:
    config, journal = job.config, job.journal
    nets = job.acting_nets()
    producers = [Producer(job.algorithm, nets, each, config.seed, index) for index, each in enumerate(lanes)]
    state = job.algorithm.initial_state(nets, 1)
    shapes = handover_shapes(job.spec, job.algorithm.plan(), config.envs_per_actor, state)
    arrays = [empty_arrays(shapes) for _ in producers]
    feed = make_feed(job, shapes)
    keeper = Keeper(job, feed, lanes)

    def snapshots() -> list[dict[str, Any] | None]:
        return [producer.snapshot() for producer in producers]

    journal.begin()
    job.threads.acting()
    for producer in producers:
        keeper.begin(producer)
    while True:
        if feed.can_sample():
            feed.learn()
            job.refresh()
        elif job.checkpoint_due():
            job.save(feed, snapshots)
        elif job.goes_on():
            job.threads.acting()
            with journal.collecting(1) as told:
                for producer, each in zip(producers, arrays):
                    report = keeper.fill(producer, each)
                    told(report)
                    feed.insert(each, producer.index, report.pending)
        else:
            break
    job.close(feed, snapshots)
    return job


class Keeper:
    """Starts actors, and replaces the environments of one that fails: what `supervise` does for processes."""

    def __init__(self, job: Job, feed: Feed, lanes: list[Lanes]):
        self.job, self.feed, self.lanes = job, feed, lanes
        limits = job.config.supervisor
        self.restarts = [Restarts(limits.restarts, limits.window) for _ in lanes]
        self.incarnation = [0] * len(lanes)
        self.plan = FaultPlan.parse(job.config.fault_plan)

    def begin(self, producer: Producer) -> None:
        self._try(producer, lambda: None, anew=True)

    def fill(self, producer: Producer, arrays: Arrays) -> ActorReport:
        return self._try(
            producer, lambda: producer.fill(arrays, self.job.learner.version, self._tick(producer.actor)), anew=False
        )

    def _start(self, producer: Producer) -> None:
        index, incarnation = producer.index, self.incarnation[producer.index]
        if incarnation:
            self.lanes[index].close()
            self.lanes[index] = producer.actor.lanes = make(self.job.config, self.job.config.envs_per_actor)
        sequence = self.job.sequences[index]
        resumed = self.job.snapshots and incarnation == 0
        producer.begin(sequence, f"{sequence}.{incarnation}", self.job.snapshots[index] if resumed else None)

    def _try(self, producer: Producer, work: Callable[[], Any], anew: bool) -> Any:
        """Work, on environments that start `anew` or go on; on new ones if these fail, or fail to start."""
        index = producer.index
        while True:
            try:
                if anew:
                    self._start(producer)
                return work()
            except (EnvError, InjectedFault) as cause:
                error = cause if isinstance(cause, EnvError) else EnvError(str(cause), "worker_error")
                delay = self.restarts[index].next(error)  # raises the error itself once there were too many
                self.job.journal.lost(error.steps, error.reason, f"replaced in {delay:.1f} s: {error}")
                self.feed.lost(index, error.reason)
                time.sleep(delay)
                self.incarnation[index] += 1
                anew = True

    def _tick(self, actor: Actor) -> Callable[[int], None] | None:
        if not self.plan:
            return None
        before = actor.sequence * actor.plan.unroll
        return lambda row: self.plan.fire(
            "actor", actor.index, before + row, actor.sequence, self.incarnation[actor.index]
        )
