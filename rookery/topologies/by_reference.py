"""`local.py` on a cluster whose data passes the learner's process by: what actors fill stays on their node, and a table
hands references to it on, to parts of a replay memory or to aggregators near the learner."""

from __future__ import annotations

from rookery.core.errors import UsageError
from rookery.core.types import Replay
from rookery.crews.ray import RayCrew
from rookery.crews.ray_service import RayServices, Wanted
from rookery.pipes.bell import Alarm
from rookery.roles.aggregator import AggregatorSetup
from rookery.roles.shard import ShardSetup
from rookery.tables.aggregated import AggregatedBatches
from rookery.tables.factory import ring_share
from rookery.tables.shards import ShardedReplay
from rookery.tables.table import Table
from rookery.topologies import loop
from rookery.topologies.job import Job
from rookery.topologies.resume import restore_table
from rookery.topologies.shard_saver import ShardSaver


def sharded(crew: RayCrew, job: Job) -> Job:
    """A replay memory in parts."""
    config, shapes, plan = job.config, job.shapes(), job.algorithm.plan().table
    assert isinstance(plan, Replay)  # no other has parts
    setups = [ShardSetup(plan, shapes, job.spec, config.actors, config.seed, index) for index in range(plan.parts)]
    wanted = [
        Wanted(
            f"shard {setup.index} of the replay memory", "shard", setup.builtins(), config.ray.cpus_per_shard,
            setup.bytes_needed, "; its items are lost", "shard",
        )
        for setup in setups
    ]  # fmt: skip
    with RayServices(config, wanted, job.journal.failed, job.signals) as services:
        table = ShardedReplay(services, plan, config.actors, config.seed, config.supervisor.step_deadline)
        restore_table(job, table, ShardSaver(job.own_folder, table, job.journal.say))
        return _run(crew, job, table, table)


def aggregated(crew: RayCrew, job: Job) -> Job:
    """Batches of unrolls that aggregators put together."""
    config, count, plan = job.config, job.config.ray.aggregators, job.algorithm.plan()
    if plan.table.builds_items:
        raise UsageError(
            f"aggregators put batches of unrolls together, and recipe {config.recipe} has a replay memory instead: use "
            "ray.aggregators 0, and algo.replay.shards for a memory in parts"
        )
    ring, proportion = ring_share(plan, count)
    setups = [AggregatorSetup(ring, proportion, config.seed, index) for index in range(count)]
    kept = "; the unrolls it kept are lost" if ring else ""
    wanted = [
        Wanted(f"aggregator {setup.index}", "aggregator", setup.builtins(), config.ray.cpus_per_aggregator, cost=kept)
        for setup in setups
    ]
    with RayServices(config, wanted, job.journal.failed, job.signals) as services:
        batches = AggregatedBatches(services, config.supervisor.step_deadline, config.device)
        return _run(crew, job, loop.table_of(job, job.shapes(), alone=False, batches=batches), batches)


def _run(crew: RayCrew, job: Job, table: Table, asking: ShardedReplay | AggregatedBatches) -> Job:
    """`asking`: what asks the services, and is woken by their answers."""
    alarm = Alarm()
    asking.wake, asking.woken = alarm.ring, alarm.hush
    crew.pool.wake_on(alarm.fileno())
    crew.deliver_references()
    job.threads.share(synchronous=table.rounds)
    try:
        crew.open(loop.prepare(job, table, job.shapes(), job.learner.published.size))
        return loop.run(job, crew, table, job.learner)
    finally:
        asking.wake = asking.woken = None
        alarm.close()
