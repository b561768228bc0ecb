"""From an algorithm's plan to a table: the only place that asks what kind a plan is."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from rookery.core.errors import UsageError
from rookery.core.machine import Machine, amount
from rookery.core.types import Circular, DataPlan, EnvSpec, Mix, Queue, Replay, Shapes
from rookery.core.wording import setting
from rookery.tables.batch import Batcher, Batches
from rookery.tables.circular import CircularTable
from rookery.tables.memory import ReplayMemory
from rookery.tables.queue import LagQueue, RoundQueue
from rookery.tables.replay import FreeReplayTable, ReplayTable
from rookery.tables.snapshot import BUFFERS
from rookery.tables.table import Table
from rookery.tables.unroll_ring import UnrollRing

SPARE = 0.9  # share of the free memory that a replay memory may take


def make_table(
    plan: DataPlan, shapes: Shapes, spec: EnvSpec, actors: int, seed: int, alone: bool, device: str = "cpu",
    ranks: int = 1, batches: Batches | None = None,
) -> Table:  # fmt: skip
    """`shapes`: of what actors hand over. `alone`: actors and learner share one process, and take turns with replay.
    `ranks`: processes on this machine that make a table like it. `batches`: who puts batches of unrolls together, and
    keeps earlier unrolls, if others do.
    """
    table = plan.table
    if isinstance(table, Replay):
        check_room(table, shapes, spec, actors, ranks=ranks)
        kind = ReplayTable if alone or table.in_turns else FreeReplayTable
        return kind(ReplayMemory(table, shapes, spec, actors, seed), table, actors)
    if isinstance(table, Queue):
        return _queue(table, actors, alone, device, batches=batches)
    if isinstance(table, Circular):
        check_batches(table, shapes, actors)
        queue = _queue(table.queue, actors, alone, device, table, batches=batches)
        return CircularTable(queue, table.batches, table.uses, seed)
    check_ring(table, shapes, actors)
    ring = UnrollRing(table.ring, table.proportion, seed, table.shards) if batches is None else None
    return _queue(table.queue, actors, alone, device, ring=ring, batches=batches)


def ring_share(plan: DataPlan, parts: int) -> tuple[int, float]:
    """Unrolls that each of several parts of a ring keeps, and those it adds for each new one; 0: there is no ring."""
    table = plan.table
    return (max(1, table.ring // parts), table.proportion) if isinstance(table, Mix) else (0, 0.0)


def _queue(
    plan: Queue,
    actors: int,
    alone: bool,
    device: str,
    circular: Circular | None = None,
    ring: UnrollRing | None = None,
    batches: Batches | None = None,
) -> RoundQueue | LagQueue:
    batch = plan.batch or actors
    if plan.max_lag == 0:
        if batch != actors:
            raise UsageError(
                f"without lag a batch is one unroll of each of the {actors} actors, not {batch}; leave "
                "algo.queue.batch out, or allow a lag (algo.queue.lag)"
            )
        return RoundQueue(actors, ring, batches)
    if (plan.max_lag + 1) * batch < actors:
        raise UsageError(
            f"a lag of {plan.max_lag} and batches of {batch} keep {(plan.max_lag + 1) * batch} of {actors} actors at "
            f"work, and the others would never act; use algo.queue.lag {-(-actors // batch) - 1} or more, or larger "
            "batches"
        )
    kept = 0 if circular is None else circular.batches
    batcher = batches or Batcher(0 if alone else plan.loaders, plan.buffers + kept, device)
    # While an unroll is on its way, all that is kept and the batches before it may be used up.
    max_lag = plan.max_lag if circular is None else (plan.max_lag + kept) * circular.uses
    return LagQueue(actors, batch, max_lag, plan.max_lag + 1, ring, batcher)


def share_of(plan: DataPlan, workers: int) -> DataPlan:
    """The plan of each of several workers that learn by themselves: a part of the memory, or a queue of its own."""
    table = plan.table
    if isinstance(table, Queue):
        return replace(plan, table=replace(table, max_lag=0, batch=0))
    if isinstance(table, Circular | Mix):
        return replace(plan, table=replace(table, queue=replace(table.queue, max_lag=0, batch=0)))
    memory = table.memory
    capacity, min_size = max(memory.batch, memory.capacity // workers), max(1, memory.min_size // workers)
    return replace(plan, table=replace(table, memory=replace(memory, capacity=capacity, min_size=min_size)))


def check_workers(plan: DataPlan, shapes: Shapes, spec: EnvSpec, workers: int) -> None:
    """Refuse tables of workers that would not fit into memory together."""
    table = share_of(plan, workers).table
    if isinstance(table, Replay):
        check_room(table, shapes, spec, memories=workers, saved=False)
    elif isinstance(table, Mix):
        check_ring(table, shapes, actors=1, workers=workers)


def bytes_of(shapes: Shapes) -> int:
    return sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in shapes.values())


def check_ring(plan: Mix, shapes: Shapes, actors: int, workers: int = 1) -> None:
    """Refuse a ring that cannot give what a batch asks for, or rings of workers that would not fit into memory."""
    batch, shards = plan.queue.batch or actors, min(plan.shards, actors)  # the shards that are filled
    need, have = math.ceil(plan.proportion * batch), plan.ring // plan.shards * shards
    if have < max(need, 1):
        enough = plan.shards * max(1, -(-need // shards))
        raise UsageError(
            f"{plan.proportion:g} replayed unrolls for each of {batch} new ones need a ring of {enough} unrolls, and "
            f"it has {plan.ring}; use a larger ring ({plan.config}.ring {enough}) or replay less "
            f"({plan.config}.replayed)"
        )
    fits, trouble = _fitting(workers * plan.ring, shapes, workers)
    if trouble:
        advice = f"use {plan.config}.ring {fits // workers} or less" if fits >= workers else "free some"
        raise UsageError(f"a ring of {workers * plan.ring:,} unrolls {trouble}; {advice}")


def check_batches(plan: Circular, shapes: Shapes, actors: int) -> None:
    """Refuse a circular buffer that would not fit into memory."""
    batch, more = plan.queue.batch or actors, plan.queue.buffers  # those that are being filled
    fits, trouble = _fitting((plan.batches + more) * batch, shapes)
    if trouble:
        most = fits // batch - more
        advice = f"use algo.circular.batches {most} or less" if most > 0 else "free some"
        raise UsageError(f"a circular buffer of {plan.batches:,} batches of {batch} unrolls {trouble}; {advice}")


def _fitting(unrolls: int, shapes: Shapes, processes: int = 1) -> tuple[int, str]:
    """How many unrolls fit into memory; and what is wrong if that is not enough."""
    size, (have, source) = bytes_of(shapes), Machine().memory(processes=processes)
    fits = int(SPARE * have / size)
    if unrolls <= fits:
        return fits, ""
    return fits, f"needs {amount(unrolls * size)}, and there are {amount(have)} ({source})"


def check_room(
    plan: Replay, shapes: Shapes, spec: EnvSpec, actors: int = 1, memories: int = 1, saved: bool = True, ranks: int = 1
) -> None:
    """Refuse a memory (or several like it) that would not fit, before it is filled and the machine dies of it.

    With several `ranks` each has its own, and an equal part of the machine.

    A memory that is `saved` with checkpoints needs more than itself: what a snapshot copies, and what it holds aside.
    """
    if plan.parts > 1:
        raise UsageError(
            f"algo.replay.shards is {plan.parts}: a memory has several parts with topology ray_cluster only, where one "
            "learner trains from it; leave it at 1"
        )

    def needs(capacity: int) -> tuple[int, int]:
        """Bytes of the memories, and on top of that bytes to save them."""
        smaller = replace(plan, memory=replace(plan.memory, capacity=capacity))
        extra = ReplayMemory.bytes_to_save(smaller, shapes, spec, actors) + BUFFERS if saved else 0
        return memories * ReplayMemory.bytes_needed(smaller, shapes, spec, actors), memories * extra

    saved = saved and plan.memory.save
    capacity, (have, source) = plan.memory.capacity, Machine().memory(processes=memories * ranks)
    have, source = have // ranks, source if ranks == 1 else f"{source}, for each of {ranks} ranks"
    need, extra = needs(capacity)
    if need + extra <= SPARE * have:
        return
    fits, too_many = 0, capacity
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        fits, too_many = (middle, too_many) if sum(needs(middle)) <= SPARE * have else (fits, middle)
    share = f" ({amount(extra)} of it to save it with checkpoints)" if extra else ""
    advice = f"use {setting('algo.replay.capacity', memories * fits)} or less" if fits else "free some"
    if extra and need <= SPARE * have:
        advice += f", or leave it out of checkpoints ({setting('algo.replay.save', False)})"
    raise UsageError(
        f"a replay memory of {memories * capacity:,} items needs {amount(need + extra)}{share}, and there are "
        f"{amount(have)} ({source}); {advice}"
    )
