"""The replay memory as a table: rounds in the order of the actors, and batches drawn ahead that are never torn."""

from __future__ import annotations

import copy
import threading

import numpy as np
import pytest
from support_parcels import SERIAL, STACKED, VECTOR, Maker, replay

from rookery.core.types import ActorReport, Delivery
from rookery.tables.memory import ReplayMemory
from rookery.tables.replay import FreeReplayTable, ReplayTable

ITEMS, FRAMES = 6, 8
SPECS = {"vector": VECTOR, "stacked": STACKED}


class Rig:
    def __init__(self, kind: type[ReplayTable], spec=VECTOR, actors: int = 2, **memory):
        plan = replay(**({"capacity": 20, "min_size": 5, "batch": 4} | memory))
        serials = [0]
        self.makers = [Maker(spec, plan, ITEMS, FRAMES, seed, serials, 9) for seed in range(actors)]
        self.memory = ReplayMemory(plan, self.makers[0].shapes, spec, actors, seed=3)
        self.table = kind(self.memory, plan, actors)
        self.released: list[int] = []
        self.items: dict[int, dict] = {}  # by serial number: what each must look like when it is drawn
        self.steps = 0  # environment steps in all of them

    def delivery(self, actor: int) -> Delivery:
        parcel, items = self.makers[actor].make(ITEMS, FRAMES, 1.0)
        self.items |= {int(item[SERIAL]): item for item in items}
        self.steps += sum(int(item["steps"]) for item in items)
        return Delivery(actor, 0, copy.deepcopy(parcel), ActorReport(ITEMS), lambda: self.released.append(actor))

    def check_whole(self, batch) -> None:
        """Every row of a batch is one item, in all its columns."""
        for row, serial in enumerate(batch.version.tolist()):
            item = self.items[serial]
            assert batch.reward[row] == item["reward"] and batch.discount[row] == item["discount"]
            for key, leaf in batch.obs.items():
                np.testing.assert_array_equal(leaf[row].numpy(), item[f"obs/{key}"])
                np.testing.assert_array_equal(batch.next_obs[key][row].numpy(), item[f"next_obs/{key}"])

    def put(self, *actors: int) -> None:
        for actor in actors:
            self.table.ordered(actor, 0)
            self.table.insert(self.delivery(actor))


def test_the_items_of_a_round_come_in_together_in_the_order_of_the_actors():
    rig, seen = Rig(ReplayTable, actors=3), []
    insert = rig.memory.insert
    rig.memory.insert = lambda parcel, actor: (seen.append(actor), insert(parcel, actor))
    rig.put(2, 0)
    assert not seen and not rig.released and len(rig.table) == 0 and not rig.table.settled
    assert rig.table.steps == rig.steps > 0, "what waits for the rest of the round is in flight"
    assert rig.table.next(0, 0.0) is None and rig.table.patience > 0
    rig.put(1)
    assert seen == rig.released == [0, 1, 2] and len(rig.table) == 3 * ITEMS and rig.table.steps == rig.steps


def test_as_many_updates_follow_as_the_ratio_asks_for():
    rig, updates = Rig(ReplayTable, capacity=100, samples_per_insert=2.0), 0
    for _ in range(5):
        assert rig.table.wants(0, True) and rig.table.wants(1, True) and rig.table.settled
        rig.put(0, 1)
        while rig.table.due:
            assert not rig.table.wants(0, True), "learning comes first"
            sample = rig.table.next(updates, 0.0)
            updates += 1
            rig.table.update(sample, np.ones(4), updates)
        assert abs(4 * updates - 2.0 * (rig.memory.inserted - 5)) <= 4
    assert updates > 20


def test_without_a_ratio_one_update_follows_a_round():
    rig = Rig(ReplayTable, samples_per_insert=0.0)
    for version in range(4):
        rig.put(1, 0)
        sample = rig.table.next(version, 0.0)
        assert sample is not None
        rig.table.update(sample, None, version + 1)
        assert rig.table.next(version + 1, 0.0) is None and not rig.table.due


def test_a_replaced_actor_counts_frames_from_0_and_is_ordered_again():
    rig = Rig(ReplayTable, STACKED, capacity=40, min_size=40)
    rig.put(0, 1)
    rig.table.ordered(0, 0)
    rig.table.lost(0)
    assert rig.table.wants(0, True)
    rig.makers[0] = Maker(STACKED, replay(capacity=40), ITEMS, FRAMES, 0, [1000], 9)
    rig.put(0, 1)  # numbers that start again would be refused otherwise
    assert rig.memory.inserted == 4 * ITEMS


def test_evictions_are_told_once_and_shutdown_leaves_what_is_due_for_later():
    rig = Rig(ReplayTable)
    for _ in range(4):
        rig.put(0, 1)
    lost = rig.table.losses()
    assert lost.evicted == rig.steps - rig.table.steps > 0 and rig.table.losses().evicted == 0
    assert rig.table.due
    rig.table.stop()
    assert not rig.table.due and rig.table.next(0, 0.0) is None and rig.table.settled
    rig.table.ordered(0, 0)
    rig.table.insert(rig.delivery(0))
    rig.table.close()
    assert rig.memory.inserted == 9 * ITEMS, "of a round that was not completed, nothing is thrown away"


# Drawn ahead


def taken(rig: Rig, version: int = 0):
    waiting = threading.Event()
    while (sample := rig.table.next(version, 0.0)) is None:
        waiting.wait(0.001)
    return sample


@pytest.fixture
def free(request):
    rig = Rig(FreeReplayTable, **getattr(request, "param", {}))
    yield rig
    rig.table.close()


def test_what_is_inserted_is_there_at_once_and_the_books_balance_while_threads_draw(free):
    trained = 0
    for version in range(30):
        free.put(version % 2)
        if len(free.table) >= 5:
            sample = taken(free, version)
            trained += sample.fresh
            free.table.update(sample, np.ones(4), version + 1)
        with free.table.lock:
            gone = trained + free.memory.steps_evicted
            assert gone + free.memory.steps_waiting + free.table._ahead == free.steps, version
    assert trained > 0 and free.released == [version % 2 for version in range(30)]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_items_that_are_overwritten_while_they_are_copied_are_replaced(spec, share):
    """An insertion comes between the pick and the end of the copy, and takes some of the slots, or all of them."""
    rig = Rig(FreeReplayTable, SPECS[spec], capacity=20, batch=12)
    for _ in range(3):
        rig.put(0, 1)
    table, read, calls = rig.table, rig.memory.store.read, []

    def disturbed(slots):
        columns = read(slots)
        calls.append(len(slots))
        if len(calls) == 1:  # the copy outside of the lock
            for _ in range(1 if share < 1 else 4):
                rig.put(0)
            columns = {path: np.zeros_like(column) for path, column in columns.items()}  # torn
        return columns

    rig.memory.store.read = disturbed
    drawn = table._draw()
    assert len(calls) == 2 and not rig.memory.lacks(drawn.keys).any(), "every item is one that is in the memory"
    rig.check_whole(drawn.batch)
    weight = rig.memory._weights(np.full(12, 1 / len(rig.memory)), 0.0)
    assert drawn.batch.weight.tolist() == weight.tolist()
    assert drawn.fresh + rig.memory.steps_waiting + rig.memory.steps_evicted == rig.steps
    assert rig.memory.sampled == 12, "a replaced item is no other draw"


def test_a_draw_copies_outside_of_the_lock():
    rig = Rig(FreeReplayTable)
    rig.put(0, 1)
    read, held = rig.memory.store.read, []
    rig.memory.store.read = lambda slots: (held.append(rig.table.lock.locked()), read(slots))[1]
    assert rig.table._draw() is not None
    assert held == [False]


@pytest.mark.parametrize("free", [{"loaders": 3, "prefetch": 6, "spec": STACKED}], indirect=True)
def test_several_threads_draw_whole_items_while_others_come_in(free):
    """The memory is as small as a few parcels: items are overwritten all the time."""
    for version in range(300):
        free.put(version % 2)
        sample = taken(free, version)
        free.check_whole(sample.batch)
        free.table.update(sample, np.ones(4), version + 1)


def test_with_a_ratio_what_is_due_is_known_and_without_one_nothing_is():
    rig = Rig(FreeReplayTable, samples_per_insert=2.0, slack=8.0)
    rig.put(0, 1)
    assert rig.table.due and rig.table.rounds is False and rig.table.settled
    drawn = 0
    while rig.table.due:
        if (sample := rig.table.next(drawn, 0.0)) is not None:
            drawn += 1
            rig.table.update(sample, None, drawn)
    rig.table.close()
    assert 4 * drawn >= 2.0 * (2 * ITEMS - 5)
    free = Rig(FreeReplayTable, samples_per_insert=0.0)
    free.put(0, 1)
    assert not free.table.due and free.table.wants(0, True) and not free.table.wants(0, False)


def test_without_loaders_the_learner_draws_its_batches_itself():
    """No thread is started, and a batch is there whenever the memory allows one."""
    before = threading.active_count()
    rig = Rig(FreeReplayTable, loaders=0, samples_per_insert=0.0)
    assert rig.table.next(0, 0.0) is None and rig.table.patience > 0
    rig.put(0)
    for _ in range(3):
        assert rig.table.patience == 0.0
        sample = rig.table.next(0, 0.0)
        rig.check_whole(sample.batch)
        rig.table.update(sample, None, 1)
    assert threading.active_count() == before
    rig.table.close()
