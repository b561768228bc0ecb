"""Actor processes on one machine, shared memory between them: `serial.py` with the actors moved out.

Slot numbers travel, data does not: an actor is given a free slot and the newest weights, fills the slot, and says so.

Synchronous (`_in_turns`): a barrier both ways. The learner waits for every actor, the actors wait for new weights; the
learner uses every core while the actors wait, and none while they act. The results are those of `serial.py`, bit for
bit. Asynchronous (`_at_once`, a replay memory without an exact ratio): actors always have free slots to fill, loader
threads draw batches ahead, the learner takes what is there, and nobody waits for anybody.

A worker that dies, hangs or fails is replaced, its half-filled slot dropped and counted; too often, and the run ends
with the worker's own words.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import itemgetter
from pathlib import Path
from time import perf_counter

from rookery.core.config import RunConfig
from rookery.core.types import EnvSpec
from rookery.crews.process import POLL, Crew
from rookery.processes.signals import Signals
from rookery.roles.producer import handover_shapes
from rookery.tables.loader import Loader
from rookery.tables.replay import Sample
from rookery.topologies.feed import Feed, ReplayFeed, make_feed
from rookery.topologies.job import Job

AHEAD = 3  # slots per asynchronous actor: it goes on filling while the learner is busy with an update
PUBLISH = 0.1  # seconds between two publications of weights, asynchronously


def run(config: RunConfig, folder: Path, signals: Signals, open_job: Callable[[EnvSpec], Job]) -> Job:
    with Crew(config, folder, signals) as crew:  # starts the processes; ends them, whatever happens
        job = open_job(crew.spec())
        state = job.algorithm.initial_state(job.learner.nets, 1)
        shapes = handover_shapes(job.spec, job.algorithm.plan(), config.envs_per_actor, state)
        feed = make_feed(job, shapes)
        crew.open(job, feed, shapes, count=config.actors * (1 if feed.synchronous else AHEAD))
        job.journal.begin()
        with job.reserve, job.rescuing(feed):
            if feed.synchronous:
                _in_turns(job, crew, feed)
            else:
                assert isinstance(feed, ReplayFeed)
                _at_once(job, crew, feed)
        return job


def _in_turns(job: Job, crew: Crew, feed: Feed) -> None:
    config, learner, journal = job.config, job.learner, job.journal
    while True:
        if feed.can_sample():
            feed.learn()
        elif job.checkpoint_due():
            job.save(feed, crew.snapshots)
        elif job.goes_on():
            with journal.split.stage("transfer"):
                crew.publish(learner.published.read(), learner.version)
            with journal.collecting(config.actors) as told:
                for actor, slot, report in sorted(crew.collect(), key=itemgetter(0)):  # whoever came first
                    feed.insert(crew.slots.arrays(slot), actor, report.pending, release=partial(crew.release, slot))
                    told(report)
        else:
            break
    job.close(feed, crew.snapshots)


def _at_once(job: Job, crew: Crew, feed: ReplayFeed) -> None:
    config, learner, journal = job.config, job.learner, job.journal
    job.threads.share(synchronous=False)

    def draw() -> Sample | None:
        with feed.lock:
            if not feed.table.can_sample():
                return None
            sample = feed.table.sample(journal.progress)
            feed.ahead += sample.fresh
            return sample

    def take(timeout: float) -> None:
        """Put what has arrived into the memory; adding never waits for an update, the slots ahead see to that."""
        for actor, slot, report in crew.arrived(timeout, again=False):
            with journal.split.stage("transfer"):
                feed.insert(crew.slots.arrays(slot), actor, report.pending, release=partial(crew.release, slot))
            journal.told(report, config.actors)

    def order() -> None:
        """Keep every actor supplied with slots, as long as what they will fill is still wanted."""
        unroll = job.algorithm.plan().unroll * config.envs_per_actor
        for ahead in range(AHEAD):
            for actor in range(config.actors):
                coming = sum(crew.orders(each) for each in range(config.actors)) * unroll
                wanted = journal.env_steps + coming < config.env_steps
                if crew.orders(actor) <= ahead and wanted and feed.can_insert():
                    crew.order(actor)

    def no_snapshots() -> list[None]:
        return [None] * config.actors  # actors are in the middle of an unroll: resuming begins new episodes

    crew.publish(learner.published.read(), learner.version)
    published, loader = perf_counter(), Loader(draw, feed.memory.prefetch, feed.memory.loaders)
    try:
        while job.goes_on():
            if job.checkpoint_due():
                job.save(feed, no_snapshots)
            order()
            take(0.0)
            started = perf_counter()
            sample = loader.get(0.0)
            if sample is None:
                with journal.split.stage("wait"):
                    take(POLL / 100)
                    sample = loader.get(POLL / 100)
                feed.idle_s += perf_counter() - started
            if sample is None:
                journal.report()
                continue
            with feed.lock:
                feed.ahead -= sample.fresh
            feed.train(sample)
            if started - published > PUBLISH:
                with journal.split.stage("transfer"):
                    learner.check_finite()
                    crew.publish(learner.published.read(), learner.version)
                published = started
    finally:
        loader.close()
    loader.check()
    crew.finish()
    while crew.busy:
        take(POLL)
    job.close(feed, no_snapshots)
