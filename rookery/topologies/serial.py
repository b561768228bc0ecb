"""Everything in one process, deterministic: the debugger's friend, and the reference for every other topology.

Any number of virtual actors take turns. Read `local.py` beside this page: the difference is the lesson.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rookery.core.config import RunConfig
from rookery.core.types import EnvSpec
from rookery.crews.keeper import Keeper
from rookery.envs.lanes import Lanes
from rookery.envs.make import make
from rookery.processes.orphans import MarkedHere
from rookery.processes.signals import Signals
from rookery.processes.threads import available_cores
from rookery.roles.producer import Producer, empty_arrays, handover_shapes
from rookery.topologies.feed import make_feed
from rookery.topologies.job import Job


def run(config: RunConfig, folder: Path, signals: Signals, open_job: Callable[[EnvSpec], Job]) -> Job:
    # Environments with threads of their own may use every core here; what they compute does not depend on it.
    cores = available_cores()
    lanes: list[Lanes] = []
    with MarkedHere() as marked:  # what the environments start ends with them
        try:
            with signals.interruptible(config.supervisor.grace / 3):
                for _ in range(config.actors):
                    lanes.append(make(config, config.envs_per_actor, threads=cores))
            job = open_job(lanes[0].spec)
            return _run(job, lanes, marked)
        finally:
            for each in lanes:
                each.close()


def _run(job: Job, lanes: list[Lanes], marked: MarkedHere) -> Job:
    config, journal = job.config, job.journal
    nets = job.acting_nets()
    producers = [
        Producer(job.algorithm, nets, each, config.seed, index, journal.say) for index, each in enumerate(lanes)
    ]
    state = job.algorithm.initial_state(nets, 1)
    shapes = handover_shapes(job.spec, job.algorithm.plan(), config.envs_per_actor, state)
    arrays = [empty_arrays(shapes) for _ in producers]
    feed = make_feed(job, shapes)
    keeper = Keeper(job, feed, lanes)
    learn = marked.paused(feed.learn) if config.compile else feed.learn  # a compiler's processes are its own affair

    def snapshots() -> list[dict[str, Any] | None]:
        return [producer.snapshot() for producer in producers]

    journal.begin()
    job.threads.acting()
    for producer in producers:
        keeper.begin(producer)
    with job.reserve, job.rescuing(feed):
        while True:
            if feed.can_sample():
                learn()
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
