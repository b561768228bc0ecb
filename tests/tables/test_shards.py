"""Several memories that draw as one: frequencies, weights, priorities, the ratio, what is lost with a shard."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support_parcels import MIXED, STACKED, VECTOR, replay
from support_shards import ITEMS, ShardRig

from rookery.core.errors import LearnerError, NumericError, UsageError
from rookery.core.types import DataPlan
from rookery.roles.shard import Shard, ShardSetup
from rookery.tables import shards as shards_module
from rookery.tables.drawn import importance_weights
from rookery.tables.factory import make_table
from rookery.tables.service import LocalService, ServiceLost
from rookery.tables.shards import ShardedReplay

PRIORITIES = np.array([0.5, 1.0, 2.0, 4.0, 8.0, 3.0])


def uneven(**memory) -> ShardRig:
    """Shards whose masses differ a lot; `known`: the priority of each item."""
    rig = ShardRig(shards=3, actors=3, capacity=90, start="actor", **{"sampler": "proportional", "alpha": 0.7} | memory)
    rig.known = {}
    for actor, scale, times in ((0, 1.0, 3), (1, 20.0, 1), (2, 0.1, 2)):
        for _ in range(times):
            first = rig.serials[0]
            rig.put(actor, priority=PRIORITIES * scale)
            rig.known |= dict(zip(range(first, first + ITEMS), PRIORITIES * scale))
    rig.answer()
    return rig


def probabilities(rig: ShardRig) -> np.ndarray:
    """P(i) of every item in a single memory of them all, by serial number."""
    mass = np.array([rig.known[serial] for serial in sorted(rig.known)]) ** rig.plan.memory.alpha
    return mass / mass.sum()


def test_items_are_drawn_as_often_as_from_a_single_memory():
    rig = uneven()
    expected, counts, draws = probabilities(rig), np.zeros(36), 3000
    for _ in range(draws):
        np.add.at(counts, rig.take().batch.version.numpy(), 1)
    expected = expected * counts.sum()
    chi = ((counts - expected) ** 2 / expected).sum()
    # 35 degrees of freedom: 66.6 is exceeded once in a thousand, by independent draws; these are stratified.
    assert chi < 66.6
    wrong = np.repeat(1 / 3, 3)[[0] * 18 + [1] * 6 + [2] * 12] * counts.sum() / 8  # shards drawn from equally often
    assert ((counts - wrong) ** 2 / wrong).sum() > 1000


@pytest.mark.parametrize("weights", ["batch", "memory", "raw"])
def test_importance_weights_are_those_of_a_single_memory(weights):
    rig = uneven(weights=weights)
    probability = probabilities(rig)
    for _ in range(20):
        sample = rig.take()
        drawn = probability[sample.batch.version.numpy()]
        expected = importance_weights(rig.plan.memory, drawn, 0.0, 36, lambda: float(probability.min()))
        np.testing.assert_allclose(sample.batch.weight.numpy(), expected, rtol=1e-5)
    assert len(np.unique(expected)) > 1


def test_a_uniform_memory_is_drawn_evenly_however_its_items_are_spread():
    rig = ShardRig(shards=2, actors=2, capacity=60)
    rig.put(0)
    rig.put(1, 1, 1)
    rig.answer()
    counts = np.zeros(24)
    for _ in range(1500):
        np.add.at(counts, rig.take().batch.version.numpy(), 1)
    expected = counts.sum() / 24
    assert ((counts - expected) ** 2 / expected).sum() < 49.7  # 23 degrees of freedom, one in a thousand


@pytest.mark.parametrize("spec", [VECTOR, STACKED, MIXED], ids=["vector", "stacked", "mixed"])
@pytest.mark.parametrize("kind", [{"n_step": 2}, {"sequence": 3, "burn_in": 1, "overlap": 1}], ids=["steps", "rows"])
def test_items_come_out_as_they_went_in(spec, kind):
    rig = ShardRig(spec, plan=replay(capacity=80, min_size=5, batch=8, shards=2, **kind))
    for _ in range(3):
        rig.put(0, 1, 2, 3)
        sample = rig.take()
        rig.check_whole(sample.batch)
        assert len(sample.batch.weight) == 8
    assert rig.balanced()


def test_new_priorities_reach_the_items_they_are_of():
    rig = uneven(batch=20)
    sample = rig.take()
    serials = sample.batch.version.numpy()
    fresh = {int(serial): 0.001 * (1 + serial) for serial in serials}
    rig.table.update(sample, np.array([fresh[int(serial)] for serial in serials]), 1)
    rig.answer()
    found = {}
    for handle in rig.handles:
        memory = handle.shard.memory
        for slot in np.flatnonzero(memory.store.ids >= 0):
            found[int(memory.store.columns["version"][slot])] = float(memory._priority[slot])
    assert found == pytest.approx(rig.known | fresh)
    assert set(rig.known) - set(fresh), "items that were not drawn keep theirs"


def test_a_priority_for_an_item_that_has_gone_is_passed_over_and_counted():
    rig = ShardRig(shards=1, actors=1, capacity=6, batch=4)
    rig.put(0)
    sample = rig.take()
    rig.put(0)
    rig.answer()
    rig.table.update(sample, np.full(4, 9.0), 1)
    rig.answer()
    assert rig.table.stats()["gone"] > 0
    assert (rig.handles[0].shard.memory._priority != 9.0).all()


def test_new_items_have_the_largest_priority_of_all_shards():
    rig = ShardRig(sampler="proportional", start="max")
    rig.put(0, 1)
    sample = rig.take()
    shard = sample.keys[0].shard
    rig.table.update(sample, np.full(8, 50.0), 1)
    rig.answer()
    rig.put(1 - shard)  # the other one
    rig.answer()
    assert rig.handles[1 - shard].shard.memory._priority.max() == 50.0


def test_the_ratio_holds_over_all_shards():
    rig = ShardRig(capacity=400, samples_per_insert=2.0, prefetch=2)
    updates = 0
    for turn in range(60):
        if rig.table.wants(0, True):
            rig.put(turn % 4)
        rig.answer()
        inserted = rig.serials[0]
        while (sample := rig.take()) is not None:
            updates += 1
            rig.table.update(sample, np.ones(8), updates)
        asked = rig.table.front.limiter.debt
        assert -8 - 1 <= asked <= 8 + ITEMS * 2, asked
    assert abs(8 * updates - 2.0 * (inserted - 5)) <= 3 * 8
    assert updates > 50


def test_what_waits_is_bounded_until_a_shard_has_taken_it_in():
    rig = ShardRig()
    rig.put(0, 1)
    assert rig.released == [] and rig.table.steps == rig.steps, "in flight"
    rig.handles[1].step()
    rig.table.hear()
    assert rig.released == [1] and rig.balanced()
    rig.answer()
    assert rig.released == [1, 0] and rig.table.steps == rig.steps


def test_a_lost_shard_costs_its_items_and_nothing_else():
    rig = ShardRig(capacity=100)
    rig.put(0, 1, 2, 3)
    rig.answer()
    rig.take()
    rig.put(0, 1)  # one of them is on its way to the shard that dies
    lost = rig.handles[0].shard.memory.steps_waiting
    rig.handles[0].kill("killed")
    rig.table.hear()
    assert (rig.released.count(0), rig.released.count(1)) == (2, 1), "the memory of what was lost is given back"
    assert rig.balanced() and rig.dropped >= lost > 0
    assert rig.table.wants(0, True)
    for _ in range(5):
        sample = rig.take()
        rig.check_whole(sample.batch)
        assert {piece.shard for piece in sample.keys} == {1} or sample.keys[0].life == 0
    rig.put(0)
    rig.answer()
    assert rig.handles[1].shard.memory.inserted == 4 * ITEMS, "items of its actors go to the other one"
    assert rig.table.stats()["shards"] == 1 and rig.table.stats()["shards_lost"] == 1


def test_a_batch_under_way_is_completed_by_the_other_shards():
    rig = ShardRig(capacity=100, prefetch=1)
    rig.put(0, 1, 2, 3)
    rig.answer()
    assert rig.table.next(0, 0.0) is None  # asks
    rig.handles[0].kill("killed")
    sample = rig.take()
    assert len(sample.batch.weight) == 8 and rig.balanced()
    rig.check_whole(sample.batch)
    rig.handles[1].kill("killed")
    assert rig.table.next(0, 0.0) is None and not rig.table.wants(0, True)
    assert rig.balanced()


def test_a_shard_that_takes_the_place_of_another_gets_its_actors_back():
    rig = ShardRig(STACKED, capacity=100, prefetch=1)
    rig.put(0, 1, 2, 3)
    rig.put(0, 1, 2, 3)
    rig.answer()
    rig.handles[0].kill("killed")
    rig.table.hear()
    rig.put(0, 2)
    rig.answer()
    rig.handles[0].revive()
    rig.table.hear()
    assert rig.table.front.homes.tolist() == [0, 1, 0, 1]
    for _ in range(4):
        rig.put(0, 1, 2, 3)
        sample = rig.take()
        rig.check_whole(sample.batch)
    assert rig.handles[0].shard.memory.inserted > 0 and rig.balanced()
    assert {piece.shard for piece in sample.keys} == {0, 1}


def test_a_draw_of_an_earlier_life_changes_no_priority_of_the_next():
    rig = ShardRig(shards=1, actors=1)
    rig.put(0, 0)
    sample = rig.take()
    rig.handles[0].kill("killed")
    rig.table.hear()
    rig.handles[0].revive()
    rig.put(0)
    rig.answer()
    rig.table.update(sample, np.full(8, 77.0), 1)
    rig.answer()
    assert rig.handles[0].shard.memory._priority.max() < 77.0


def test_a_replaced_actor_counts_frames_from_0():
    rig = ShardRig(STACKED, capacity=100)
    rig.put(0, 1, 2, 3)
    rig.put(0, 1, 2, 3)
    rig.answer()
    rig.table.lost(2)
    rig.makers[2].restart()
    rig.put(2)
    rig.put(2)
    rig.answer()
    rig.check_whole(rig.take().batch)


def test_a_shard_that_does_not_answer_is_killed(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(shards_module.time, "monotonic", lambda: clock[0])
    rig = ShardRig(deadline=5.0)
    rig.put(0)
    clock[0] += 4.0
    rig.table.hear()
    assert rig.handles[0].up
    clock[0] += 2.0
    rig.table.hear()
    assert not rig.handles[0].up and "5 s" in rig.handles[0].why
    rig.handles[1].kill("killed")
    rig.table.hear()
    clock[0] += 6.0
    with pytest.raises(LearnerError, match="no part of the replay memory"):
        rig.table.hear()


def test_a_shard_that_was_killed_is_not_killed_again_while_its_answers_are_awaited(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(shards_module.time, "monotonic", lambda: clock[0])
    rig = ShardRig(deadline=5.0)
    rig.put(0)
    handle = rig.handles[0]
    waiting, handle._asked = list(handle._asked), deque()  # their failure comes later than the kill
    clock[0] += 6.0
    rig.handles[1].step(100)
    for _ in range(3):
        rig.table.hear()
    assert handle.life == 1
    handle.revive()
    rig.table.hear()
    assert handle.life == 1 and handle.up, "nor is its successor"
    waiting[0][0].set_exception(ServiceLost("killed"))
    rig.table.hear()
    assert rig.balanced() and rig.released == [0]


def test_an_error_in_a_shard_is_raised():
    rig = ShardRig(start="actor")
    rig.put(0, priority=np.inf)
    handle = rig.handles[0]
    future, op, args = handle._asked.popleft()
    with pytest.raises(NumericError) as raised:
        getattr(handle.shard, op)(*args)
    future.set_exception(raised.value)
    with pytest.raises(NumericError, match="start priority"):
        rig.table.hear()


def test_a_soft_capacity_is_kept_by_every_shard():
    rig = ShardRig(remover="soft", remove_every=1, capacity=20)
    for _ in range(2):
        rig.put(0, 1, 2, 3)
    sample = rig.take()
    rig.table.update(sample, np.ones(8), 1)
    rig.answer()
    assert len(rig.table) == 20 and rig.balanced()


def test_at_the_end_what_was_asked_is_answered():
    rig = ShardRig()
    local = [LocalService(handle.shard) for handle in rig.handles]
    rig.table = ShardedReplay(local, rig.plan, 4, 7)
    woken = []
    rig.table.wake = lambda: woken.append(1)
    rig.put(0, 1, 2, 3)
    rig.table.close()
    assert len(rig.released) == 4 and len(rig.table) == 4 * ITEMS and rig.balanced() and woken
    for shard in local:
        shard.kill("over")
        with pytest.raises(ServiceLost):
            shard.ask("stats").result(60)
        shard.close()


def test_ranks_over_all_items_are_not_known_to_parts_of_a_memory():
    with pytest.raises(UsageError, match="proportional"):
        ShardRig(sampler="rank")


def test_one_process_has_no_parts():
    rig = ShardRig()
    plan = DataPlan(unroll=4, chunk=4, table=rig.plan)
    with pytest.raises(UsageError, match="ray_cluster"):
        make_table(plan, rig.makers[0].shapes, VECTOR, 4, 1, alone=False)


def test_capacity_is_divided_among_the_parts_and_the_ratio_is_not_theirs():
    plan = replay(capacity=10, min_size=9, samples_per_insert=4.0, shards=4)
    setup = ShardSetup(plan, ShardRig().makers[0].shapes, VECTOR, 6, 1, 2)
    own = setup.own_plan.memory
    assert (own.capacity, own.min_size, own.samples_per_insert, own.shards) == (3, 1, 0.0, 1)
    assert setup.own_actors == 2 and Shard(setup).memory.can_sample() is False
    seeds = {ShardSetup(plan, setup.shapes, VECTOR, 6, 1, index).own_seed for index in range(4)}
    assert len(seeds) == 4, "parts do not draw alike"


operation = st.one_of(
    st.tuples(st.just("put"), st.integers(0, 3), st.integers(0, ITEMS)),
    st.tuples(st.just("step"), st.integers(0, 1), st.integers(1, 3)),
    st.tuples(st.just("next"), st.booleans()),
    st.tuples(st.just("kill"), st.integers(0, 1)),
    st.tuples(st.just("revive"), st.integers(0, 1)),
)


@settings(max_examples=150, deadline=None)
@given(ops=st.lists(operation, max_size=40), spec=st.sampled_from([VECTOR, STACKED]), spi=st.sampled_from([0.0, 2.0]))
def test_the_books_balance_whatever_happens(ops, spec, spi):
    rig = ShardRig(spec, capacity=16, batch=4, min_size=4, samples_per_insert=spi, sampler="proportional")
    held: list = []
    for op, *args in ops:
        if op == "put":
            rig.put(args[0], items=args[1])
        elif op == "step":
            rig.handles[args[0]].step(args[1])
        elif op == "kill" and rig.handles[args[0]].up:
            rig.handles[args[0]].kill("killed")
        elif op == "revive" and not rig.handles[args[0]].up:
            rig.handles[args[0]].revive()
        elif op == "next" and (sample := rig.table.next(rig.version, 0.5)) is not None:
            rig.trained += sample.fresh
            rig.version += 1
            rig.check_whole(sample.batch)
            held.append(sample)
            if args[0]:
                rig.table.update(held.pop(0), np.ones(4), rig.version)
        rig.table.hear()
        assert rig.balanced() and rig.table.steps >= 0
    rig.answer()
    assert rig.balanced() and all(not place.asked for place in rig.table._places)
    assert len(rig.released) == sum(op == "put" for op, *_ in ops)
