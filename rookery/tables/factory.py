"""From an algorithm's plan to a table: the only place that asks what kind a plan is."""

from __future__ import annotations

from dataclasses import replace

from rookery.core.errors import UsageError
from rookery.core.machine import Machine, amount
from rookery.core.types import DataPlan, EnvSpec, Queue, Replay, Shapes
from rookery.tables.memory import ReplayMemory
from rookery.tables.queue import LagQueue, RoundQueue
from rookery.tables.replay import FreeReplayTable, ReplayTable
from rookery.tables.snapshot import BUFFERS
from rookery.tables.table import Table

SPARE = 0.9  # share of the free memory that a replay memory may take


def make_table(plan: DataPlan, shapes: Shapes, spec: EnvSpec, actors: int, seed: int, alone: bool) -> Table:
    """`shapes`: of what actors hand over. `alone`: actors and learner share one process, and take turns with replay."""
    if isinstance(plan.table, Queue):
        if plan.table.max_lag == 0:
            return RoundQueue(actors)
        return LagQueue(actors, plan.table.batch or actors, plan.table.max_lag)
    check_room(plan.table, shapes, spec, actors)
    kind = ReplayTable if alone or plan.table.in_turns else FreeReplayTable
    return kind(ReplayMemory(plan.table, shapes, spec, actors, seed), plan.table, actors)


def share_of(plan: DataPlan, workers: int) -> Replay:
    """The plan of the part of a replay memory that each of several workers keeps; UsageError if there is none."""
    if isinstance(plan.table, Queue):
        raise UsageError("an algorithm with no replay memory cannot run here: workers make gradients from one")
    memory = plan.table.memory
    capacity, min_size = max(memory.batch, memory.capacity // workers), max(1, memory.min_size // workers)
    return replace(plan.table, memory=replace(memory, capacity=capacity, min_size=min_size))


def check_room(
    plan: Replay, shapes: Shapes, spec: EnvSpec, actors: int = 1, memories: int = 1, saved: bool = True
) -> None:
    """Refuse a memory (or several like it) that would not fit, before it is filled and the machine dies of it.

    A memory that is `saved` with checkpoints needs more than itself: what a snapshot copies, and what it holds aside.
    """

    def needs(capacity: int) -> tuple[int, int]:
        """Bytes of the memories, and on top of that bytes to save them."""
        smaller = replace(plan, memory=replace(plan.memory, capacity=capacity))
        extra = ReplayMemory.bytes_to_save(smaller, shapes, spec, actors) + BUFFERS if saved else 0
        return memories * ReplayMemory.bytes_needed(smaller, shapes, spec, actors), memories * extra

    saved = saved and plan.memory.save
    capacity, (have, source) = plan.memory.capacity, Machine().memory(processes=memories)
    need, extra = needs(capacity)
    if need + extra <= SPARE * have:
        return
    fits, too_many = 0, capacity
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        fits, too_many = (middle, too_many) if sum(needs(middle)) <= SPARE * have else (fits, middle)
    share = f" ({amount(extra)} of it to save it with checkpoints)" if extra else ""
    advice = f"use --algo.replay.capacity {memories * fits} or less" if fits else "free some"
    if extra and need <= SPARE * have:
        advice += ", or leave it out of checkpoints (--no-algo.replay.save)"
    raise UsageError(
        f"a replay memory of {memories * capacity:,} items needs {amount(need + extra)}{share}, and there are "
        f"{amount(have)} ({source}); {advice}"
    )
