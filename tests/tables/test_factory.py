"""Plans that cannot work are refused with numbers and with what to change; those that can become the right table."""

from __future__ import annotations

import re
from functools import partial

import pytest

from rookery.core.errors import UsageError
from rookery.core.machine import Machine
from rookery.core.types import Circular, DataPlan, Mix, Queue
from rookery.tables import factory
from rookery.tables.circular import CircularTable
from rookery.tables.factory import bytes_of, check_workers, make_table, share_of
from rookery.tables.queue import LagQueue, RoundQueue

SHAPES = {
    "obs/frame": ((21, 8, 4, 84, 84), "uint8"), "reward": ((20, 8), "float32"), "live": ((20, 8), "bool"),
}  # fmt: skip
SIZE = 21 * 8 * 4 * 84 * 84 + 20 * 8 * 4 + 20 * 8


def made(table: Queue | Circular | Mix, actors: int = 4, alone: bool = False):
    return make_table(DataPlan(20, 20, table), SHAPES, None, actors, 1, alone)


@pytest.fixture
def have(tmp_path, monkeypatch):
    """Says how many bytes the machine has."""
    monkeypatch.setattr(factory, "Machine", partial(Machine, tmp_path, tmp_path / "none"))

    def tell(count: float) -> None:
        (tmp_path / "meminfo").write_text(f"MemAvailable: {-(-int(count) // 1024)} kB")

    return tell


def test_an_unroll_is_as_large_as_its_arrays():
    assert bytes_of(SHAPES) == SIZE


# Queues


def test_a_lag_bound_that_leaves_actors_without_work_is_refused_with_one_that_does_not():
    with pytest.raises(UsageError, match=r"keep 4 of 9 actors at work, .* algo\.queue\.lag 4 or more") as caught:
        made(Queue(max_lag=1, batch=2), actors=9)
    lag = int(re.search(r"algo\.queue\.lag (\d+)", str(caught.value))[1])
    assert made(Queue(lag, batch=2), actors=9).bound >= 9
    with pytest.raises(UsageError):
        made(Queue(lag - 1, batch=2), actors=9)


@pytest.mark.parametrize("wrap", [lambda q: q, lambda q: Circular(q, 2, 2), lambda q: Mix(q, 1.0, 64)])
def test_without_lag_a_batch_is_one_unroll_of_each_actor(wrap):
    with pytest.raises(UsageError, match=r"each of the 4 actors, not 3; leave algo\.queue\.batch out, or allow a lag"):
        made(wrap(Queue(max_lag=0, batch=3)))
    for batch in (0, 4):
        table = made(wrap(Queue(max_lag=0, batch=batch)))
        assert table.rounds and isinstance(getattr(table, "queue", table), RoundQueue)


def test_a_queue_with_lag_is_as_long_as_the_plan_says():
    table = made(Queue(max_lag=2, batch=3))
    assert isinstance(table, LagQueue) and (table.batch, table.max_lag, table.bound) == (3, 2, 9)
    assert made(Queue(max_lag=2)).batch == 4, "as many as there are actors"
    assert made(Queue(max_lag=1), actors=1).bound == 2, "one actor only"


def test_loaders_work_ahead_only_where_the_learner_has_its_process_for_itself():
    """In one process what is trained on must not depend on a thread's speed."""
    assert made(Queue(max_lag=1, loaders=2))._batcher.room and not made(Queue(max_lag=1, loaders=0))._batcher.room
    assert not made(Queue(max_lag=1, loaders=2), alone=True)._batcher.room


def test_each_worker_that_learns_by_itself_has_a_queue_of_its_own():
    for table in (Queue(3, 7), Circular(Queue(3, 7), 2, 2), Mix(Queue(3, 7), 0.5, 9)):
        shared = share_of(DataPlan(20, 20, table), 4).table
        queue = getattr(shared, "queue", shared)
        assert type(shared) is type(table) and (queue.max_lag, queue.batch) == (0, 0)
        assert made(shared, actors=1, alone=True).rounds


# A ring


def test_a_ring_that_cannot_hold_what_a_batch_asks_for_is_refused():
    with pytest.raises(
        UsageError, match=r"1\.5 .* each of 5 new ones need a ring of 8 unrolls, and it has 7"
    ) as caught:
        made(Mix(Queue(1, batch=5), 1.5, ring=7))
    assert "algo.queue.ring 8" in str(caught.value)
    assert made(Mix(Queue(1, batch=5), 1.5, ring=8))._ring.proportion == 1.5


@pytest.mark.parametrize(("ring", "shards", "actors"), [(5, 2, 4), (8, 4, 2), (2, 3, 4)])
def test_room_in_shards_counts_as_far_as_actors_fill_them(ring, shards, actors):
    """Two shards of 2 have no room for 5; four shards of 2 have no room for 5 if two actors fill two of them."""
    with pytest.raises(UsageError, match=rf"has {ring};") as caught:
        made(Mix(Queue(1, batch=5), 1.0, ring, shards), actors)
    enough = int(re.search(r"algo\.queue\.ring (\d+)", str(caught.value))[1])
    table = made(Mix(Queue(1, batch=5), 1.0, enough, shards), actors)
    assert enough // shards * min(shards, actors) >= 5 and table is not None
    with pytest.raises(UsageError):
        made(Mix(Queue(1, batch=5), 1.0, enough - 1, shards), actors)


def test_a_ring_larger_than_the_memory_is_refused_with_both_sizes(have):
    have(100 * SIZE / 0.9)
    made(Mix(Queue(1), 1.0, ring=100))
    with pytest.raises(
        UsageError, match=r"a ring of 101 unrolls needs 456\.8 MiB, and there are 502\.5 MiB \(avail"
    ) as e:
        made(Mix(Queue(1), 1.0, ring=101))
    assert "use algo.queue.ring 100 or less" in str(e.value)
    have(SIZE / 2)
    with pytest.raises(UsageError, match="; free some"):
        made(Mix(Queue(1), 1.0, ring=101))


def test_rings_of_workers_must_fit_together(have):
    plan = DataPlan(20, 20, Mix(Queue(1), 1.0, ring=50))
    have(100 * SIZE / 0.9)
    check_workers(plan, SHAPES, None, workers=2)
    with pytest.raises(UsageError, match=r"a ring of 150 unrolls needs .*use algo\.queue\.ring 33 or less"):
        check_workers(plan, SHAPES, None, workers=3)


# A circular buffer


def test_a_circular_buffer_allows_the_lag_of_what_it_may_use_up():
    table = made(Circular(Queue(max_lag=1, batch=4, loaders=2, buffers=3), batches=5, uses=6))
    assert isinstance(table, CircularTable) and (table.batches, table.uses) == (5, 6)
    assert (table.queue.max_lag, table.queue.bound) == ((1 + 5) * 6, 8)
    assert len(table.queue._batcher._idle) == 3 + 5, "what is kept is not free to be filled"


def test_a_circular_buffer_larger_than_the_memory_is_refused(have):
    plan = partial(Circular, Queue(max_lag=1, batch=4), uses=2)
    have((10 + 2) * 4 * SIZE / 0.9)
    made(plan(batches=10))
    with pytest.raises(UsageError, match=r"of 11 batches of 4 unrolls needs 235\.2 MiB, and there are 241\.2 MiB") as e:
        made(plan(batches=11))
    assert "use algo.circular.batches 10 or less" in str(e.value)
    have(8 * SIZE)
    with pytest.raises(UsageError, match="; free some"):
        made(plan(batches=1))
