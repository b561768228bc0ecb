"""The sum tree against brute force: every mass finds its leaf, no leaf of 0 is ever found, nothing drifts."""

from __future__ import annotations

import math
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rookery.tables.fast import kernel
from rookery.tables.fast.sum_tree import LARGEST, TINY, SumTree

CAPACITIES = [1, 2, 5, 15, 16, 17, 255, 256, 257, 1000, 4096, 4097]


def without_numba():
    return mock.patch.object(kernel, "numba", lambda: None)


def tree_of(leaves, numba: bool = True) -> SumTree:
    with nullcontext() if numba else without_numba():
        tree = SumTree(len(leaves))
    tree.set(np.arange(len(leaves)), np.asarray(leaves, float))
    return tree


both = pytest.mark.parametrize("numba", [True, False], ids=["numba", "numpy"])


def brute_find(leaves: np.ndarray, mass: np.ndarray) -> np.ndarray:
    """The first leaf whose prefix, itself included, is above the mass; beyond the total the last that is not 0."""
    found = np.searchsorted(np.cumsum(leaves), mass, side="right")
    return np.minimum(found, np.flatnonzero(leaves)[-1])


@st.composite
def histories(draw, values):
    """A capacity, and batches of (index, value) to be set one after the other; indices repeat, also within a batch."""
    capacity = draw(st.sampled_from(CAPACITIES) | st.integers(1, 600))
    batches = []
    for _ in range(draw(st.integers(1, 4))):
        index = draw(st.lists(st.integers(0, capacity - 1), max_size=30))
        batches.append((index, draw(st.lists(values, min_size=len(index), max_size=len(index)))))
    return capacity, batches


def replayed(capacity, batches, numba) -> SumTree:
    tree = tree_of(np.zeros(capacity), numba)
    for index, value in batches:
        tree.set(np.array(index, np.int64), np.array(value, float))
    return tree


small_whole = st.sampled_from([0, 0, 1, 1, 2, 3, 7, 1000]).map(float)
any_leaf = st.sampled_from([0.0, TINY, 5e-324, 1e290]) | st.floats(0, 1e9) | st.floats(1e-12, 1e-6)


@given(histories(small_whole), st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_whole_numbers_are_found_exactly(history, seed):
    capacity, batches = history
    expected = np.zeros(capacity)
    for index, value in batches:
        for i, x in zip(index, value):
            expected[i] = x
    for numba in (True, False):
        tree = replayed(capacity, batches, numba)
        np.testing.assert_array_equal(tree.leaves, expected)
        assert tree.total == expected.sum()
        if not tree.total:
            with pytest.raises(ValueError, match="every leaf is 0"):
                tree.find(np.zeros(1))
            continue
        edges = np.concatenate([[0], np.cumsum(expected)])
        inside = np.random.default_rng(seed).random(50) * tree.total
        mass = np.concatenate([edges, np.nextafter(edges[1:], 0), edges + 0.5, inside])
        np.testing.assert_array_equal(tree.find(mass), brute_find(expected, mass))


@given(histories(any_leaf), st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_numba_and_numpy_agree_in_every_bit(history, seed):
    fast, plain = (replayed(*history, numba) for numba in (True, False))
    np.testing.assert_array_equal(fast._node, plain._node, strict=True)
    assert fast.smallest() == plain.smallest()
    np.testing.assert_array_equal(fast._low, plain._low)
    if fast.total:
        rng = np.random.default_rng(seed)
        mass, where = np.append(rng.random(40) * fast.total, [0, fast.total, np.inf]), rng.random(33)
        np.testing.assert_array_equal(fast.find(mass), plain.find(mass))
        for a, b in zip(fast.draw(where), plain.draw(where)):
            np.testing.assert_array_equal(a, b, strict=True)


@given(histories(any_leaf), st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_any_numbers_are_found_up_to_rounding_and_a_leaf_of_0_never(history, seed):
    tree = replayed(*history, True)
    if not tree.total:
        return
    leaves = tree.leaves
    mass = np.append(np.random.default_rng(seed).random(60) * tree.total, [0, tree.total, 2 * tree.total, np.inf])
    found = tree.find(mass)
    assert ((found >= 0) & (found < len(leaves))).all()
    assert (leaves[found] > 0).all()
    prefix = np.concatenate([[0], np.cumsum(leaves)])
    rounding = 1e-12 * tree.total
    assert (prefix[found] <= mass + rounding).all()
    assert (np.minimum(mass, tree.total) <= prefix[found + 1] + rounding).all()
    assert tree.total == pytest.approx(math.fsum(leaves), rel=1e-13)


@both
@pytest.mark.parametrize("capacity", CAPACITIES)
def test_any_capacity_in_prefix_order(capacity, numba):
    leaves = np.random.default_rng(capacity).integers(0, 5, capacity).astype(float)
    leaves[-1] = 2
    tree = tree_of(leaves, numba)
    mass = np.arange(0, tree.total, 0.25)
    np.testing.assert_array_equal(tree.find(mass), np.repeat(np.arange(capacity), (4 * leaves).astype(int)))


@both
def test_boundaries_and_leaves_of_0(numba):
    """P51."""
    tree = tree_of([0, 3, 0, 1], numba)
    np.testing.assert_array_equal(tree.find(np.array([0, 2.999, 3, 3.999])), [1, 1, 3, 3])
    assert tree.find(np.array([np.nextafter(tree.total, 0)])) == [3]
    assert not np.isin(tree.find(np.linspace(0, 4, 1001)), [0, 2]).any()


@both
@pytest.mark.parametrize("capacity", [4, 16, 100, 5000])
@pytest.mark.parametrize("beyond", [1.0, 1 + 1e-15, 2.0, np.inf])
def test_mass_beyond_the_total_finds_the_last_leaf_that_is_not_0(capacity, beyond, numba):
    for last in {0, 1, capacity // 2, capacity - 1}:
        leaves = np.zeros(capacity)
        leaves[: last + 1] = 0.1
        tree = tree_of(leaves, numba)
        assert tree.find(np.array([tree.total * beyond])) == [last]


@both
def test_the_newest_leaf_can_be_drawn(numba):
    """P52: a leaf of nearly 0 in front, and the newest behind it."""
    tree = tree_of([1e-12, 1], numba)
    rng = np.random.default_rng(0)
    for _ in range(100):
        np.testing.assert_array_equal(tree.draw(rng.random(10))[0], np.ones(10))


def test_no_drift_after_a_hundred_thousand_updates():
    """P53, and more: the tree is the same, bit for bit, as one that was made from the leaves at once."""
    rng = np.random.default_rng(0)
    tree = SumTree(1000)
    for _ in range(200):
        tree.set(rng.integers(0, 1000, 500), rng.random(500) * 10.0 ** rng.integers(-9, 9, 500))
    assert tree.total == pytest.approx(math.fsum(tree.leaves), rel=1e-14)
    np.testing.assert_array_equal(tree._node, tree_of(tree.leaves)._node)


@both
def test_a_huge_leaf_leaves_no_trace(numba):
    """Differences would have lost the small ones for good: 1 + 1e290 - 1e290 is 0."""
    tree = tree_of([1.0, 2.0, 3.0], numba)
    tree.set(np.array([1]), np.array([LARGEST]))
    tree.set(np.array([1]), np.array([2.0]))
    assert tree.total == 6


@both
def test_of_an_index_that_stands_twice_the_last_counts(numba):
    """P59."""
    tree = tree_of([1, 1, 1], numba)
    tree.set(np.array([2, 0, 2, 0, 2]), np.array([5.0, 7, 6, 0, 4]))
    np.testing.assert_array_equal(tree.leaves, [0, 1, 4])
    assert tree.total == 5


@both
@pytest.mark.parametrize("value", [-1e-9, np.nan, np.inf, -np.inf, 2 * LARGEST])
def test_a_bad_value_changes_nothing(value, numba):
    tree = tree_of([1, 2, 3], numba)
    with pytest.raises(ValueError, match="finite"):
        tree.set(np.array([0, 1]), np.array([9.0, value]))
    np.testing.assert_array_equal(tree.leaves, [1, 2, 3])
    assert tree.total == 6


@both
@pytest.mark.parametrize("index", [-1, 3, 16, 2**40])
def test_a_bad_index_changes_nothing(index, numba):
    tree = tree_of([1, 2, 3], numba)
    with pytest.raises(ValueError, match=r"0\.\.2"):
        tree.set(np.array([0, index]), np.array([9.0, 1.0]))
    assert tree.total == 6


@both
def test_bad_shapes_and_masses(numba):
    tree = tree_of([1, 2, 3], numba)
    with pytest.raises(ValueError, match="one length"):
        tree.set(np.array([0, 1]), np.array([1.0]))
    for mass in (-1e-300, np.nan):
        with pytest.raises(ValueError, match="mass"):
            tree.find(np.array([0.5, mass]))
    with pytest.raises(ValueError, match="at least 1"):
        SumTree(0)


@both
def test_nothing_asked_nothing_done(numba):
    tree = tree_of([1, 2, 3], numba)
    tree.set(np.empty(0, np.int64), np.empty(0))
    assert tree.total == 6
    assert tree.find(np.empty(0)).shape == (0,)


@both
def test_inputs_of_other_types_read_only_or_strided_are_taken(numba):
    tree = tree_of(np.zeros(4), numba)
    value = np.array([1, 9, 2, 9, 3], np.float32)
    value.flags.writeable = False
    tree.set(np.array([0, 1, 3], np.int32), value[::2])
    np.testing.assert_array_equal(tree.leaves, [1, 2, 0, 3])
    np.testing.assert_array_equal(tree.find([0, 1, 3]), [0, 1, 3])


def test_leaves_cannot_be_written_past_the_tree():
    with pytest.raises(ValueError, match="read-only"):
        SumTree(4).leaves[0] = 1


@pytest.mark.parametrize("capacity", [1, 17, 1000, 70_000])
def test_a_node_is_two_cache_lines(capacity):
    tree = SumTree(capacity)
    assert tree._leaf.ctypes.data % 128 == tree._node.ctypes.data % 128 == 0
    assert tree._leaf.strides == (128, 8) and tree._node.strides == (256, 8)


@both
def test_the_smallest_leaf(numba):
    rng = np.random.default_rng(1)
    tree = tree_of(np.zeros(700), numba)
    assert tree.smallest() == np.inf
    tree.set(np.array([3, 4]), np.array([TINY, TINY / 2]))
    assert tree.smallest() == np.inf
    for ask in range(60):
        for _ in range(ask % 4):
            index = rng.integers(0, 700, 20)
            tree.set(index, rng.random(20) * rng.integers(0, 2, 20))
            index[:] = 0  # the tree may not look at what is the caller's
        counted = tree.leaves[tree.leaves > TINY]
        assert tree.smallest() == counted.min(initial=np.inf)


def test_the_smallest_leaf_after_nobody_asked_for_long():
    tree = tree_of([1.0, 2.0, 3.0])
    assert tree.smallest() == 1
    for value in range(5000):
        tree.set(np.array([0]), np.array([100.0 + value]))
    assert len(tree._changed) <= 1000
    assert tree.smallest() == 2


@both
@pytest.mark.parametrize("n", [1, 3, 16, 200])
def test_a_draw_takes_one_leaf_of_each_of_n_equal_ranges(n, numba):
    rng = np.random.default_rng(n)
    leaves = rng.integers(0, 4, 50).astype(float)
    tree = tree_of(leaves, numba)
    where = rng.random(n)
    leaf, share = tree.draw(where)
    np.testing.assert_array_equal(leaf, brute_find(leaves, (np.arange(n) + where) * (tree.total / n)))
    np.testing.assert_array_equal(share, leaves[leaf] / tree.total)


def test_frequencies_are_shares():
    """Chi-square at 5 deviations; a distribution that is 5 % off does not pass."""
    leaves = np.random.default_rng(2).random(100) ** 3
    tree, rng, n = tree_of(leaves), np.random.default_rng(3), 64
    count = sum(np.bincount(tree.draw(rng.random(n))[0], minlength=100) for _ in range(4000))
    one = sum(np.bincount(tree.find(rng.random(n) * tree.total), minlength=100) for _ in range(4000))

    def chi_square(count, share):
        expected = count.sum() * share
        return (((count - expected) ** 2) / expected).sum()

    share, limit = leaves / leaves.sum(), 99 + 5 * math.sqrt(2 * 99)
    assert chi_square(count, share) < limit  # stratified: even less than independent draws would have
    assert chi_square(one, share) < limit
    wrong = leaves**1.05 / (leaves**1.05).sum()
    assert chi_square(count, wrong) > limit
    assert chi_square(one, wrong) > limit


def test_compiled_when_made_not_in_the_first_draw():
    tree = SumTree(10)
    assert kernel.numba() is not None, "the tests need the extra `fast`"
    kernels = (tree._find, tree._set, tree._minima)
    compiled = [list(f.overloads) for f in kernels]
    assert [len(c) for c in compiled] == [1, 1, 1]
    tree.set(np.arange(10), np.ones(10))
    tree.draw(np.zeros(3))
    tree.smallest()
    assert [list(f.overloads) for f in kernels] == compiled


def test_numba_is_not_imported_before_a_tree_is_made():
    code = (
        "import sys, rookery.tables.fast.sum_tree, rookery.tables.sampler; assert 'numba' not in sys.modules;"
        "rookery.tables.fast.sum_tree.SumTree(3); assert 'numba' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_a_place_to_keep_compiled_code_it_is_compiled_all_the_same(monkeypatch):
    tried = []

    class Numba:
        config = SimpleNamespace(CACHE_DIR="", CACHE_LOCATOR_CLASSES="")

        @staticmethod
        def njit(signature, cache=False, **options):
            tried.append(cache)
            if cache:
                raise RuntimeError("cannot cache function: no locator available")
            return lambda function: function

    monkeypatch.setattr(kernel, "numba", lambda: Numba)
    assert kernel.compiled.__wrapped__(abs, "int64(int64)") is abs
    assert tried == [True, False]
    assert Numba.config.CACHE_DIR == Numba.config.CACHE_LOCATOR_CLASSES == ""


def test_a_numba_that_cannot_be_imported_is_no_numba(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    assert kernel.numba.__wrapped__() is None
