"""Starts actors, and recreates environments that fail: in one process, what `crew.py` and `post.py` do for many."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from rookery.core.errors import EnvError
from rookery.core.types import ActorReport
from rookery.envs.lanes import Lanes
from rookery.envs.make import make
from rookery.processes.faults import FaultPlan, InjectedFault
from rookery.processes.worker import Restarts
from rookery.roles.actor import Actor
from rookery.roles.producer import Arrays, Producer
from rookery.topologies.feed import Feed
from rookery.topologies.job import Job


class Keeper:
    def __init__(self, job: Job, feed: Feed, lanes: list[Lanes]):
        self.job, self.feed, self.lanes = job, feed, lanes
        limits = job.config.supervisor
        self.restarts = [Restarts(limits.restarts, limits.window) for _ in lanes]
        self.incarnation = [0] * len(lanes)
        self.plan = FaultPlan.parse(job.config.fault_plan)

    def begin(self, producer: Producer) -> None:
        producer.recover = partial(self._recover, producer.index)
        self._try(producer, lambda: None, anew=True)

    def fill(self, producer: Producer, arrays: Arrays) -> ActorReport:
        version, tick = self.job.learner.version, self._tick(producer.actor)
        report = self._try(producer, lambda: producer.fill(arrays, version, tick), anew=False)
        self.restarts[producer.index].worked()
        return report

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

    def _recover(self, index: int, error: EnvError) -> None:
        """Single environments of an actor failed and will be recreated; too often, and it raises the error."""
        delay = self.restarts[index].next(error)
        self.job.journal.lost(error.steps, error.reason, f"recreated in {delay:.1f} s: {error}")
        self.feed.cut(index, error.reason)
        time.sleep(delay)

    def _tick(self, actor: Actor) -> Callable[[int], None] | None:
        if not self.plan:
            return None
        before = actor.sequence * actor.plan.unroll
        return lambda row: self.plan.fire(
            "actor", actor.index, before + row, actor.sequence, self.incarnation[actor.index]
        )
