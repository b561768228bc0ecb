"""The replay table: weights, priorities, removal, draws; the pitfalls P54 to P63."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support_memory import REMOVERS, SAMPLERS, alive, filled, keys_of, put, table_of
from support_parcels import SERIAL, STACKED, replay

from rookery.core.errors import NumericError, UsageError
from rookery.tables.memory import ReplayMemory


def fix_draw(table: ReplayMemory, ids: list[int]) -> None:
    """Have the next draws return these items, with their true probabilities."""
    slots = keys_of(table, *ids).slot
    mass = table._priority[slots].astype(np.float64) ** table.memory.alpha
    total = (table._priority[table.store.ids >= 0].astype(np.float64) ** table.memory.alpha).sum()
    table.sampler.draw = lambda n, rng: (slots, mass / total)


# Importance weights: P55, P56, P60


def per_table(batch: int = 4, **memory) -> ReplayMemory:
    """PER1: p = 1..4, alpha .6, beta .4; four items in a memory of eight."""
    settings = {"sampler": "proportional", "alpha": 0.6, "beta": 0.4, "beta_end": None, "start": "actor"}
    return filled(replay(capacity=8, batch=batch, **(settings | memory)), [1.0, 2.0, 3.0, 4.0])


PER1 = np.array([0.14823, 0.224674, 0.286555, 0.340542])


def test_weights_use_the_size_and_not_the_capacity():
    """P55, PER1."""
    for normal in ("batch", "memory"):
        sample = per_table(64, weights=normal).sample()
        wanted = np.array([1, 0.846745, 0.768229, 0.716978])
        np.testing.assert_allclose(sample.batch.weight, wanted[sample.keys.id], atol=2e-6)
        assert set(sample.keys.id.tolist()) == {0, 1, 2, 3}
    sample = per_table(64, weights="raw").sample()
    np.testing.assert_allclose(sample.batch.weight, ((4 * PER1) ** -0.4)[sample.keys.id], rtol=1e-5)


def test_weights_are_normalised_by_the_batch_or_by_the_memory():
    """P55, PER2."""
    for normal, wanted in [("batch", [1, 0.846745]), ("memory", [0.846745, 0.716978])]:
        table = per_table(2, weights=normal)
        fix_draw(table, [1, 3])
        np.testing.assert_allclose(table.sample().batch.weight, wanted, atol=2e-6)


def test_beta_goes_linearly_to_its_end_and_no_further():
    """P56."""
    table = per_table(2, weights="memory", beta_end=1.0)
    fix_draw(table, [0, 3])
    for progress, beta in [(-1, 0.4), (0, 0.4), (0.5, 0.7), (1, 1.0), (7, 1.0)]:
        assert table.sample(progress).batch.weight[1] == pytest.approx((PER1[3] / PER1[0]) ** -beta, rel=1e-5)
    table = per_table(2, weights="memory", beta_end=None)
    fix_draw(table, [0, 3])
    assert table.sample(1.0).batch.weight[1] == pytest.approx(0.716978, abs=2e-6), "constant, as in Ape-X"


def test_uniform_weights_are_one():
    sample = filled(replay(batch=64, beta=0.4), [1.0, 100.0, 3.0]).sample(0.3)
    assert sample.batch.weight.dtype == torch.float32 and sample.batch.weight.tolist() == [1.0] * 64


@pytest.mark.parametrize("batch", [4, 16])
def test_rank_weights_follow_the_probability_that_was_drawn_with(batch):
    """P60: strata of eight items; every weight is (N P)^-beta for the frequency it really has."""
    plan = replay(
        capacity=8, batch=batch, sampler="rank", alpha=0.7, beta=1.0, beta_end=None, weights="raw", start="actor"
    )
    table = filled(plan, [8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0])
    draws, rounds = np.zeros(8), 4000
    weight = np.zeros(8)
    for _ in range(rounds):
        sample = table.sample()
        np.add.at(draws, sample.keys.id, 1)
        weight[sample.keys.id] = sample.batch.weight
    frequency = draws / (rounds * batch)
    np.testing.assert_allclose(frequency, 1 / (8 * weight), atol=5 * (0.25 / (rounds * batch)) ** 0.5)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_importance_weights_undo_the_priorities(sampler):
    """With beta 1, the weighted mean over draws is the mean over the memory."""
    plan = replay(capacity=8, batch=50, sampler=sampler, beta=1.0, beta_end=None, weights="raw", start="actor")
    table = filled(plan, [0.1, 5.0, 2.0, 0.5, 1.0])
    total = np.zeros(5)
    for _ in range(800):
        sample = table.sample()
        np.add.at(total, sample.keys.id, sample.batch.weight.numpy())
    np.testing.assert_allclose(total / 40_000, 0.2, rtol=0.06)


# Priorities: P54, P57, P58, P59


def test_alpha_is_applied_once():
    """P54, PER1."""
    given = []
    table = per_table(64)
    draw = table.sampler.draw
    table.sampler.draw = lambda n, rng: given.append(draw(n, rng)) or given[-1]
    sample = table.sample()
    np.testing.assert_allclose(given[0][1], PER1[sample.keys.id], atol=1e-6)


def test_new_items_get_the_largest_priority_there_ever_was():
    """P57."""
    plan = replay(capacity=8, batch=4, sampler="proportional")
    table = filled(plan, [float("nan")] * 2)
    assert table._priority[:2].tolist() == [1.0, 1.0]
    table.update(keys_of(table, 0, 1), np.array([50.0, 0.5]))
    table.update(keys_of(table, 0, 1), np.array([1e-3, 1e-3]))
    put(table, plan, [3.0])  # start "max": what the actor thinks does not matter
    assert table._priority[keys_of(table, 2).slot] == 50.0
    assert table.stats()["priority_max"] == 50.0


def test_an_actors_own_priority_counts_and_nan_asks_for_the_largest():
    plan = replay(capacity=8, start="actor", sampler="proportional")
    table = filled(plan, [0.25, float("nan")])
    assert table._priority[:2].tolist() == [0.25, 1.0]
    put(table, plan, [float("nan"), 7.0, 0.0])
    assert table._priority[2:5].tolist() == [7.0, 7.0, 0.0], "the largest so far, those of the same parcel included"


@pytest.mark.parametrize("given", [[1.0, float("inf")], [float("nan"), float("inf")]])
def test_an_infinite_start_priority_is_a_numeric_error_and_nothing_is_stored(given):
    plan = replay(capacity=8, start="actor", sampler="proportional")
    table = filled(plan, [0.25])
    with pytest.raises(NumericError, match="actor 0"):
        put(table, plan, given)
    assert len(table) == 1 and table._largest == 1.0


def test_a_priority_for_an_item_that_has_gone_is_ignored():
    """P58: the slot has another item now."""
    plan = replay(capacity=4, batch=4, sampler="proportional")
    table = filled(plan, [1.0] * 4, batches=1)
    old = keys_of(table, 0, 1)
    put(table, plan, [1.0])
    assert table.store.ids[old.slot].tolist() == [4, 1], "item 4 took the slot of item 0"
    table.update(old, np.array([99.0, 2.0]))
    assert table.gone == 1 and table._priority[old.slot].tolist() == [1.0, 2.0]
    assert table._largest == 2.0, "nor is it remembered as the largest"
    put(table, plan, [1.0] * 4)
    table.update(old, np.array([99.0, 99.0]))
    assert table.gone == 3 and table.stats()["gone"] == 3 and table.stats()["priority_max"] == 2.0


def test_of_an_item_drawn_twice_the_last_priority_counts():
    """P59."""
    table = filled(replay(capacity=4, sampler="proportional"), [1.0] * 3)
    table.update(keys_of(table, 2, 1, 2, 2), np.array([5.0, 4.0, 9.0, 0.5]))
    assert table._priority[:3].tolist() == [1.0, 4.0, 0.5]
    np.testing.assert_allclose(table.sampler.state()["leaf"][:3], np.array([1.0, 4.0, 0.5]) ** 0.6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_bad_priorities_are_refused_and_change_nothing(bad):
    plan = replay(capacity=4, sampler="proportional", start="actor")
    table = filled(plan, [1.0] * 3)
    with pytest.raises(ValueError, match="priorities"):
        table.update(keys_of(table, 0, 1), np.array([3.0, bad]))
    assert table._priority[:3].tolist() == [1.0] * 3 and table._largest == 1.0
    if bad < 0:
        with pytest.raises(ValueError, match="priorities"):
            put(table, plan, [2.0, bad])


def test_priorities_may_be_float32_and_of_torch():
    table = filled(replay(capacity=4, sampler="proportional"), [1.0] * 3)
    table.update(keys_of(table, 0, 1), torch.tensor([3.0, 4.0]).numpy())
    assert table._priority[:3].tolist() == [3.0, 4.0, 1.0]


# Removal: P61, P62


def test_a_soft_capacity_never_blocks_and_is_trimmed_to_the_newest():
    """P61: capacity 10, 25 items."""
    plan = replay(capacity=10, remover="soft", batch=4)
    table = table_of(plan, items=5)
    sample = looks = None
    for begin in range(0, 25, 5):
        assert table.can_insert()
        put(table, plan, [1.0] * 5)
        if begin == 10:
            sample = table.sample()
            looks = sample.batch.obs["obs"].clone()
    assert alive(table) == list(range(12, 25)), "room for 13"
    table.remove_to_fit()
    assert alive(table) == list(range(15, 25)) and len(table) == 10
    table.remove_to_fit()
    assert len(table) == 10
    assert torch.equal(sample.batch.obs["obs"], looks), "a batch drawn before is a copy"
    table.update(sample.keys, np.ones(4))


def test_a_soft_capacity_can_be_trimmed_in_pieces():
    plan = replay(capacity=10, remover="soft")
    table = filled(plan, [1.0] * 13)
    assert table.remove_to_fit(2) and alive(table) == list(range(2, 13))
    assert not table.remove_to_fit(2) and alive(table) == list(range(3, 13))
    assert not table.remove_to_fit(2) and len(table) == 10


def test_priorities_of_items_that_have_gone_are_in_no_mean():
    plan = replay(capacity=4, remover="soft", start="actor", sampler="proportional")
    table = filled(plan, [9.0, 9.0, 1.0, 2.0, 3.0])
    table.remove_to_fit()
    table._remove(np.array([1]))
    assert (table.stats()["priority_mean"], table.stats()["priority_max"]) == (2.0, 3.0)
    state = table.state()
    state["priority"][:2] = 50.0  # older files have what was there before
    table.load(state)
    assert (table.stats()["priority_mean"], table.stats()["priority_max"]) == (2.0, 3.0)


@pytest.mark.parametrize("remover", ["fifo", "soft"])
def test_a_parcel_larger_than_the_memory_leaves_its_last_items(remover):
    plan = replay(capacity=4, remover=remover)
    table = filled(plan, [1.0] * 3)
    put(table, plan, [1.0] * 11)
    table.remove_to_fit()
    assert alive(table) == [10, 11, 12, 13] and table.inserted == 14 and table.evicted == 10
    assert (table.steps_waiting, table.steps_evicted) == (4, 10)


def test_a_parcel_larger_than_a_memory_with_the_inverse_remover():
    plan = replay(capacity=4, remover="inverse")
    table = filled(plan, [1.0] * 3)
    put(table, plan, [1.0] * 11)
    assert len(table) == 4 and table.evicted == 10 and set(alive(table)) <= set(range(3, 14))


def test_the_inverse_remover_prefers_low_priorities():
    """P62: two items of priority 1 and 100; odds 1 to 100^-0.4 = 0.158."""
    rounds, low = 600, 0
    for seed in range(rounds):
        plan = replay(capacity=2, remover="inverse", remove_alpha=-0.4, start="actor")
        table = table_of(plan, items=2, seed=seed)
        put(table, plan, [1.0, 100.0])
        put(table, plan, [1.0])
        low += alive(table) == [1, 2]
    share = 1 / (1 + 100**-0.4)
    assert abs(low - rounds * share) < 4 * (rounds * share * (1 - share)) ** 0.5


def test_the_inverse_remover_follows_updates_and_copes_with_zero():
    plan = replay(capacity=3, remover="inverse", remove_alpha=-4.0, start="actor")
    table = filled(plan, [1.0, 1.0, 1.0])
    table.update(keys_of(table, 0, 1, 2), np.array([100.0, 0.0, 100.0]))
    put(table, plan, [100.0])
    assert alive(table) == [0, 2, 3]


def test_victims_of_one_parcel_are_different_items():
    plan = replay(capacity=6, remover="inverse", remove_alpha=-2.0, start="actor")
    table = filled(plan, [1e-3] + [10.0] * 5)  # nearly all the mass is on one item
    put(table, plan, [1.0] * 4)
    assert len(table) == 6 and table.evicted == 4 and set(alive(table)) >= {6, 7, 8, 9} and 0 not in alive(table)


def test_the_inverse_remover_is_refused_with_images():
    with pytest.raises(UsageError, match=r"inverse.*images? observations|inverse.*ring of frames"):
        table_of(replay(remover="inverse"), STACKED)


def test_a_min_size_that_can_never_be_reached_is_refused():
    with pytest.raises(UsageError, match=r"min_size is 9; it must be at most the capacity, 8"):
        table_of(replay(capacity=8, min_size=9))


# The limiter's answers: P63


def test_the_first_update_is_granted_exactly_at_min_size():
    """P63: counted in items."""
    plan = replay(capacity=60_000, min_size=50_000, batch=32, samples_per_insert=8.0)
    table = table_of(plan, items=7_142)
    for _ in range(7):
        put(table, plan, [1.0] * 7_142)
    put(table, plan, [1.0] * 5)
    assert len(table) == 49_999 and not table.can_sample() and table.can_insert()
    with pytest.raises(AssertionError):
        table.sample()
    put(table, plan, [1.0])
    assert len(table) == 50_000 and table.can_sample()
    table.sample()
    assert not table.can_sample() and table.can_insert()
    put(table, plan, [1.0] * 3)
    assert not table.can_sample()
    put(table, plan, [1.0])
    assert table.can_sample(), "32 draws at 8 per item: every 4 items"


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(REMOVERS), st.integers(1, 6), st.sampled_from([0.0, 0.5, 2.0, 8.0]), st.lists(st.booleans()))
def test_one_of_actor_and_learner_may_always_go_on(remover, min_size, ratio, choices):
    plan = replay(capacity=6, min_size=min_size, batch=3, samples_per_insert=ratio, remover=remover)
    table = table_of(plan)
    for choice in choices:
        assert table.can_insert() or table.can_sample()
        if table.can_sample() and (choice or not table.can_insert()):
            table.sample()
        else:
            put(table, plan, [1.0] * 2)
            table.remove_to_fit()


# Drawing


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_same_seed_draws_the_same(sampler):
    def run(seed: int) -> list[list[int]]:
        plan = replay(capacity=50, batch=8, sampler=sampler, remover="inverse")
        table, ids = table_of(plan, items=20, seed=seed), []
        for round in range(10):
            put(table, plan, [1.0] * 20)
            sample = table.sample(round / 10)
            table.update(sample.keys, 1.0 + sample.keys.id % 7)
            ids.append(sample.keys.id.tolist())
        return ids

    assert run(1) == run(1) != run(2)


def test_steps_count_once_however_often_an_item_is_drawn():
    table = filled(replay(capacity=8, batch=100), [1.0] * 3)
    assert table.steps_waiting == 3
    assert table.sample().fresh == 3 and table.steps_waiting == 0
    assert table.sample().fresh == 0


def test_ages_are_those_of_the_last_batch():
    plan = replay(capacity=8, batch=2)
    table = filled(plan, [1.0] * 6)
    assert (table.stats()["age_mean"], table.stats()["age_max"]) == (0.0, 0.0), "nothing was drawn yet"
    table.sampler.draw = lambda n, rng: (np.array([5, 2]), np.full(2, 1 / 6))
    table.sample()
    assert (table.stats()["age_mean"], table.stats()["age_max"]) == (1.5, 3.0), "0 and 3 came later"
    assert table.stats()["sample_insert_ratio"] == pytest.approx(2 / 6)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_removed_items_are_not_drawn(sampler):
    plan = replay(capacity=8, batch=32, sampler=sampler, remover="soft")
    table = filled(plan, [1.0] * 10)
    for _ in range(30):
        table.remove_to_fit()
        sample = table.sample()
        assert (
            set(sample.keys.id.tolist()) <= set(alive(table))
            and sample.batch.version.tolist() == sample.keys.id.tolist()
        )
        put(table, plan, [1.0] * 3)


def test_every_item_is_drawn_by_its_share():
    """Chi-squared over a table that was full, trimmed and updated."""
    plan = replay(capacity=6, batch=10, sampler="proportional", alpha=0.5, remover="soft", start="actor")
    table = filled(plan, [9.0] * 7)
    table.remove_to_fit()
    table.update(keys_of(table, 1, 2, 3), np.array([1.0, 4.0, 25.0]))
    share = np.array([1.0, 2.0, 5.0, 3.0, 3.0, 3.0]) / 17
    draws = np.zeros(6)
    for _ in range(400):
        np.add.at(draws, table.sample().keys.id - 1, 1)
    assert ((draws - 4000 * share) ** 2 / (4000 * share)).sum() < 25  # 5 degrees of freedom: p < 0.0002


def test_serial_numbers_are_the_version_column():
    """The tests above rely on it."""
    sample = filled(replay(capacity=8), [1.0] * 6).sample()
    assert SERIAL == "version" and sample.batch.version.tolist() == sample.keys.id.tolist()
