"""The rank order against sorting everything: splits, empty blocks and a spent pool included."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rookery.tables.fast import kernel
from rookery.tables.fast.order import NONE, Blocks, Flat, make_order


def check(order, key: np.ndarray) -> None:
    """`key` [capacity] is what the order should hold."""
    present = np.flatnonzero(key != NONE)
    expected = present[np.argsort(key[present])]
    assert len(order) == len(expected)
    np.testing.assert_array_equal(order.key, key)
    np.testing.assert_array_equal(order.at(np.arange(len(expected))), expected)


def keys(slot: np.ndarray, value: np.ndarray) -> np.ndarray:
    return np.where(value == NONE, NONE, (value << 32) | slot)


@st.composite
def changes(draw):
    capacity = draw(st.sampled_from([1, 2, 40, 127, 128, 129, 300]))
    batches = []
    for _ in range(draw(st.integers(1, 5))):
        n = draw(st.integers(0, 40))
        slot = draw(st.lists(st.integers(0, capacity - 1), min_size=n, max_size=n))
        value = draw(st.lists(st.integers(NONE, 5), min_size=n, max_size=n))
        batches.append((np.array(slot, np.int64), np.array(value, np.int64)))
    return capacity, batches


@given(changes())
@settings(max_examples=100, deadline=None)
def test_both_orders_are_sorted_after_any_changes(given):
    capacity, batches = given
    orders, expected = [Blocks(capacity), Flat(capacity)], np.full(capacity, NONE)
    for slot, value in batches:
        key = keys(slot, value)
        for s, k in zip(slot, key):  # the last one counts where a slot stands twice
            expected[s] = k
        for order in orders:
            order.set(slot, key)
            check(order, expected)


WHERE = {
    "anywhere": lambda rng, round: rng.integers(0, 1 << 30, 200),
    "ascending": lambda rng, round: np.arange(200) + 200 * round,
    "descending": lambda rng, round: (1 << 30) - np.arange(200) - 200 * round,
    "front": lambda rng, round: rng.integers(0, 3, 200),
    "moving": lambda rng, round: 1000 * round + rng.integers(0, 100, 200),
}


@pytest.mark.parametrize("where", WHERE)
def test_many_changes(where):
    """Enough for blocks to split and to run empty, wherever the new keys go."""
    capacity, rng = 3000, np.random.default_rng(0)
    order, expected = Blocks(capacity), np.full(capacity, NONE)
    for round in range(150):
        slot, value = rng.integers(0, capacity, 200), WHERE[where](rng, round)
        value = np.where(rng.random(200) < 0.2, NONE, value)
        key = keys(slot, value)
        order.set(slot, key)
        expected[slot] = key
        if round % 10 == 0:
            check(order, expected)
    check(order, expected)
    assert order._used[0] > 3
    taken, free = order._block[: order._used[0]], order._free[: len(order._free) - order._used[0]]
    assert sorted([*taken, *free]) == list(range(len(order._block))), "every block is either taken or free"


def test_a_spent_pool_is_spread_again():
    """Blocks of few keys each, then splits until none is free."""
    capacity, rng = 1000, np.random.default_rng(0)
    order, expected = Blocks(capacity), np.full(capacity, NONE)
    times = []
    with mock.patch.object(order, "_spread", side_effect=lambda: (times.append(1), Blocks._spread(order))):
        for round in range(400):
            slot = rng.integers(0, capacity, 100)  # all move to one place, and leave few behind in the old one
            key = keys(slot, 1000 * round + rng.integers(0, 1000, 100))
            order.set(slot, key)
            expected[slot] = key
            if len(times) == 3:
                break
            check(order, expected)
    assert 0 < len(times) <= (round + 1) * 100 / capacity, "at most once in `capacity` insertions"
    check(order, expected)


def test_ranks_in_any_order():
    order = Blocks(1000)
    slot = np.random.default_rng(0).permutation(1000)
    order.set(slot, keys(slot, np.arange(1000)))
    for rank in ([999, 0, 500, 500, 1], [0], [3, 2, 1]):
        np.testing.assert_array_equal(order.at(np.array(rank)), slot[rank])


def test_the_order_does_not_depend_on_the_history():
    rng = np.random.default_rng(0)
    busy, value = Blocks(500), rng.integers(0, 50, 500)
    for _ in range(50):
        slot = rng.integers(0, 500, 100)
        busy.set(slot, keys(slot, rng.integers(NONE, 50, 100)))
    busy.set(np.arange(500), keys(np.arange(500), value))
    fresh = Blocks(500)
    fresh.set(np.arange(500), keys(np.arange(500), value))
    np.testing.assert_array_equal(busy.at(np.arange(500)), fresh.at(np.arange(500)))


def test_empty_and_filled_again():
    order, slot = Blocks(400), np.arange(400)
    for _ in range(3):
        order.set(slot, keys(slot, slot[::-1].copy()))
        np.testing.assert_array_equal(order.at(slot), slot[::-1])
        order.set(slot, np.full(400, NONE))
        assert len(order) == 0
        assert order._used[0] == 1, "empty blocks are given back"


@pytest.mark.parametrize("order", [Blocks, Flat])
def test_ranks_that_are_not_there(order):
    order = order(300)
    order.set(np.arange(200), keys(np.arange(200), np.arange(200)))
    assert order.at(np.empty(0, np.int64)).shape == (0,)
    for rank in (-201, 200, 10**6):
        with pytest.raises(IndexError):
            order.at(np.array([0, rank]))


def test_which_one_is_made():
    assert isinstance(make_order(5), Blocks)
    with mock.patch.object(kernel, "numba", lambda: None):
        assert isinstance(make_order(5), Flat)
    for capacity in (0, 1 << 32):
        with pytest.raises(ValueError, match="slots"):
            make_order(capacity)
