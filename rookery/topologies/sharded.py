"""A replay memory in parts: `local.py` with a table whose items are in Ray actors, near the learner.

What actors fill goes from their node to that of a shard; here, only references pass, and the items that are drawn.
"""

from __future__ import annotations

from rookery.core.types import Replay
from rookery.crews.ray import RayCrew
from rookery.crews.ray_shards import RayShards
from rookery.pipes.bell import Alarm
from rookery.roles.shard import ShardSetup
from rookery.tables.shards import ShardedReplay
from rookery.topologies import loop
from rookery.topologies.job import Job
from rookery.topologies.resume import restore_table
from rookery.topologies.shard_saver import ShardSaver


def train(crew: RayCrew, job: Job) -> Job:
    config, shapes, plan = job.config, job.shapes(), job.algorithm.plan().table
    assert isinstance(plan, Replay)  # no other has parts
    setups = [ShardSetup(plan, shapes, job.spec, config.actors, config.seed, index) for index in range(plan.parts)]
    with RayShards(config, setups, job.journal.failed, job.signals) as shards:
        table = ShardedReplay(shards.handles, plan, config.actors, config.seed, config.supervisor.step_deadline)
        restore_table(job, table, ShardSaver(job.own_folder, table, job.journal.say))
        alarm = Alarm()
        table.wake, table.woken = alarm.ring, alarm.hush
        crew.pool.wake_on(alarm.fileno())
        crew.deliver_references()
        job.threads.share(synchronous=False)
        try:
            crew.open(loop.prepare(job, table, shapes, job.learner.published.size))
            return loop.run(job, crew, table, job.learner)
        finally:
            table.wake = table.woken = None
            alarm.close()
