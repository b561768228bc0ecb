"""Samplers: the probabilities they declare are those of the formula, and those of the draws; any history, any size."""

from __future__ import annotations

import itertools
import math
from contextlib import nullcontext
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rookery.tables.fast import kernel
from rookery.tables.fast.power import Power
from rookery.tables.fast.sum_tree import LARGEST, TINY
from rookery.tables.sampler import Proportional, Rank, Uniform

MAKE = {
    "uniform": Uniform,
    "proportional": lambda capacity: Proportional(capacity, 0.6),
    "inverse": lambda capacity: Proportional(capacity, -0.4),
    "rank": lambda capacity: Rank(capacity, 0.7),
}
each = pytest.mark.parametrize("kind", MAKE)


def made(make, numba: bool = True):
    with nullcontext() if numba else mock.patch.object(kernel, "numba", lambda: None):
        return make()


def holding(make, priority: dict[int, float], numba: bool = True):
    sampler = made(make, numba)
    sampler.set(np.array(list(priority), np.int64), np.array(list(priority.values()), float))
    return sampler


class Fixed:
    """A generator that always answers with the same number."""

    def __init__(self, value: float):
        self.value = value

    def random(self, n: int) -> np.ndarray:
        return np.full(n, self.value)


def formula(kind: str, priority: dict[int, float]) -> dict[int, float]:
    """P(i) as in the paper, by brute force; ranks go by the priority as float32, then by slot."""
    if kind == "uniform":
        mass = dict.fromkeys(priority, 1.0)
    elif kind == "rank":
        order = sorted(priority, key=lambda slot: (-np.float32(priority[slot]), slot))
        mass = {slot: rank**-0.7 for rank, slot in enumerate(order, 1)}
    else:
        mass = {slot: p ** {"proportional": 0.6, "inverse": -0.4}[kind] for slot, p in priority.items()}
    total = math.fsum(mass.values())
    return {slot: m / total for slot, m in mass.items()}


def chi_square(count: np.ndarray, probability: np.ndarray) -> float:
    expected = count.sum() * probability
    return float(((count - expected) ** 2 / expected).sum())


def limit(cells: int) -> float:
    """Five deviations above the mean of chi-square."""
    return cells - 1 + 5 * math.sqrt(2 * (cells - 1))


@st.composite
def histories(draw):
    """Batches of changes: (slots, priorities), or (slots, None) where these are removed."""
    capacity, batches = draw(st.integers(1, 40)), []
    for _ in range(draw(st.integers(1, 6))):
        slot = draw(st.lists(st.integers(0, capacity - 1), max_size=12))
        priority = draw(st.lists(st.floats(1e-6, 1e6), min_size=len(slot), max_size=len(slot)))
        batches.append((slot, priority if draw(st.booleans()) or draw(st.booleans()) else None))
    return capacity, batches


@each
@given(history=histories(), n=st.integers(1, 50), seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_any_history(kind, history, n, seed):
    capacity, batches = history
    pair, model = [made(lambda: MAKE[kind](capacity), numba) for numba in (True, False)], {}
    for slot, priority in batches:
        for sampler in pair:
            if priority is None:
                sampler.remove(np.array(slot, np.int64))
            else:
                sampler.set(np.array(slot, np.int64), np.array(priority))
        model = {s: p for s, p in model.items() if priority is not None or s not in slot}
        model.update(zip(slot, priority or []))
        assert [len(sampler) for sampler in pair] == [len(model)] * 2
    if not model:
        for sampler in pair:
            with pytest.raises(ValueError, match="nothing to"):
                sampler.draw(n, np.random.default_rng(seed))
            with pytest.raises(ValueError, match="nothing to"):
                sampler.lowest()
        return
    expected = formula(kind, model)
    (slot, probability), other = (sampler.draw(n, np.random.default_rng(seed)) for sampler in pair)
    assert slot.dtype == np.int64 and probability.dtype == np.float64 and slot.shape == probability.shape == (n,)
    np.testing.assert_allclose(probability, [expected[s] for s in slot.tolist()], rtol=1e-10)
    np.testing.assert_array_equal(slot, other[0])
    np.testing.assert_array_equal(probability, other[1])
    for sampler in pair:
        assert sampler.lowest() == pytest.approx(min(expected.values()), rel=1e-10)


@each
@pytest.mark.parametrize("numba", [True, False], ids=["numba", "numpy"])
def test_a_loaded_state_draws_the_same(kind, numba):
    rng = np.random.default_rng(0)
    old, new = (made(lambda: MAKE[kind](300), numba) for _ in range(2))
    new.set(np.arange(300), rng.random(300))  # to be forgotten
    for _ in range(20):
        old.set(rng.integers(0, 300, 30), rng.random(30) + 0.01)
        old.remove(rng.integers(0, 300, 10))
    state = old.state()
    new.load(state)
    old_draws, new_draws = (sampler.draw(64, np.random.default_rng(1)) for sampler in (old, new))
    np.testing.assert_array_equal(new_draws, old_draws)
    assert len(new) == len(old) and new.lowest() == old.lowest()
    kept = {name: array.copy() for name, array in state.items()}
    for sampler in (old, new):  # and goes on the same; the state is a copy of its own
        sampler.set(np.arange(0, 300, 7), np.linspace(1, 2, 43))
        sampler.remove(np.arange(0, 300, 11))
    np.testing.assert_array_equal(*(sampler.draw(64, np.random.default_rng(2)) for sampler in (old, new)))
    for name in kept:
        np.testing.assert_array_equal(state[name], kept[name])


@each
def test_a_state_of_another_size_or_a_damaged_one_is_refused(kind):
    sampler = holding(lambda: MAKE[kind](20), dict.fromkeys(range(20), 1.0))
    ((name, array),) = sampler.state().items()
    wrong = [np.append(array, array[0])]
    wrong += {"leaf": [-array, array * np.nan], "key": [array[::-1], array - 10], "item": [array + 1, array * 0]}[name]
    for bad in wrong:
        with pytest.raises(ValueError):
            sampler.load({name: bad})


@each
@pytest.mark.parametrize("numba", [True, False], ids=["numba", "numpy"])
def test_slots_and_priorities_of_other_types_read_only_or_strided_are_taken(kind, numba):
    slot, priority = np.arange(12, dtype=np.int32)[::3], np.linspace(1, 2, 4, dtype=np.float32)
    slot.flags.writeable = priority.flags.writeable = False
    sampler = made(lambda: MAKE[kind](12), numba)
    sampler.set(slot, priority)
    sampler.remove(slot[:1])
    fixed = np.arange(3, 12, 3)
    fixed.flags.writeable = False
    sampler.set(fixed, priority[1:])
    assert set(sampler.draw(50, np.random.default_rng(0))[0].tolist()) == {3, 6, 9}
    assert len(sampler) == 3


@each
@pytest.mark.parametrize("slot", [-1, 5])
def test_slots_outside_are_refused(kind, slot):
    sampler = MAKE[kind](5)
    with pytest.raises(ValueError, match=r"0\.\.4"):
        sampler.set(np.array([0, slot]), np.ones(2))
    with pytest.raises(ValueError, match=r"0\.\.4"):
        sampler.remove(np.array([0, slot]))
    assert len(sampler) == 0


@pytest.mark.parametrize("kind", ["proportional", "inverse", "rank"])
@pytest.mark.parametrize("priority", [-1.0, -1e-30, math.nan, math.inf])
@pytest.mark.parametrize("numba", [True, False], ids=["numba", "numpy"])
def test_bad_priorities_are_refused_and_change_nothing(kind, priority, numba):
    sampler = holding(lambda: MAKE[kind](5), {0: 1.0, 1: 2.0}, numba)
    before = sampler.state()
    with pytest.raises(ValueError, match="priority"):
        sampler.set(np.array([0, 2, 3]), np.array([3.0, priority, 1.0]))
    for name, array in sampler.state().items():
        np.testing.assert_array_equal(array, before[name])


@each
def test_of_a_slot_that_stands_twice_the_last_counts(kind):
    """P59."""
    sampler = holding(lambda: MAKE[kind](5), {0: 1.0, 1: 2.0, 2: 3.0})
    sampler.set(np.array([4, 1, 4, 1]), np.array([1.0, 1.0, 9.0, 5.0]))
    once = holding(lambda: MAKE[kind](5), {0: 1.0, 1: 5.0, 2: 3.0, 4: 9.0})
    for u in np.linspace(0, 0.99, 7):
        if kind != "uniform":
            np.testing.assert_array_equal(sampler.draw(9, Fixed(u)), once.draw(9, Fixed(u)))
    assert len(sampler) == len(once) == 4


@each
@pytest.mark.parametrize("size, n", list(itertools.product([1, 8, 100], [1, 4, 16, 300])))
def test_frequencies_are_the_declared_probabilities(kind, size, n):
    """Chi-square, fixed seeds. Fewer items than draws, and the other way round."""
    rng = np.random.default_rng(size + n)
    priority = dict(enumerate((rng.random(size) * 3 + 0.01).tolist()))
    sampler, expected = holding(lambda: MAKE[kind](size + 5), priority), formula(kind, priority)
    count, rounds = np.zeros(size), 20_000 // n
    for _ in range(rounds):
        count += np.bincount(sampler.draw(n, rng)[0], minlength=size)
    if size > 1:
        assert chi_square(count, np.array([expected[i] for i in range(size)])) < limit(size)
    assert count.sum() == rounds * n


@pytest.mark.parametrize("kind", ["proportional", "inverse", "rank"])
@given(st.integers(1, 60), st.integers(1, 80), st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_every_item_is_expected_exactly_n_times_its_probability(kind, size, n, seed):
    """P60 without chance: averaged over a grid of the random number, counts are n P(i), up to the grid's two ends.

    So it holds when a range covers less than an item and when it covers many, and no range is ever empty.
    """
    rng, grid = np.random.default_rng(seed), 250
    priority = dict(enumerate((rng.random(size) + 1e-3).tolist()))
    sampler, expected = holding(lambda: MAKE[kind](size), priority), formula(kind, priority)
    count = np.zeros(size)
    for g in range(grid):
        slot, _ = sampler.draw(n, Fixed((g + 0.5) / grid))
        assert len(slot) == n
        count += np.bincount(slot, minlength=size)
    assert np.abs(count / grid - n * np.array([expected[i] for i in range(size)])).max() <= 2 / grid + 1e-9


@pytest.mark.parametrize("kind", ["proportional", "rank"])
def test_the_largest_random_number_there_is_stays_inside(kind):
    """(n - 1 + u) / n rounds up to 1 here."""
    for size, n in itertools.product([1, 3, 17, 1000], [1, 7, 512, 4096]):
        priority = dict.fromkeys(range(size), 0.1)
        sampler, expected = holding(lambda: MAKE[kind](2000), priority), formula(kind, priority)
        slot, probability = sampler.draw(n, Fixed(np.nextafter(1.0, 0)))
        assert slot.max() == size - 1
        np.testing.assert_allclose(probability, [expected[s] for s in slot])


def test_proportional_golden():
    """PER1, PER2 and P54, P55: alpha once, N is the size and not the capacity, both ways to normalise."""
    sampler, beta = holding(lambda: Proportional(8, 0.6), {0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0}), 0.4
    slot, probability = sampler.draw(400, np.random.default_rng(0))
    found = [probability[slot == i][0] for i in range(4)]
    np.testing.assert_allclose(found, [0.14823, 0.224674, 0.286555, 0.340542], atol=1e-6)
    weight = (len(sampler) * np.array(found)) ** -beta
    np.testing.assert_allclose(weight / weight.max(), [1, 0.846745, 0.768229, 0.716978], atol=1e-6)
    over_memory = (len(sampler) * sampler.lowest()) ** -beta
    batch = weight[[1, 3]]
    np.testing.assert_allclose(batch / batch.max(), [1, 0.846745], atol=1e-6)
    np.testing.assert_allclose(batch / over_memory, [0.846745, 0.716978], atol=1e-6)


def test_rank_golden():
    """RNK: slots are given in a mixed order, ranks go by priority."""
    priority = {5: 8.0, 0: 7.0, 7: 6.0, 1: 5.0, 6: 4.0, 2: 3.0, 4: 2.0, 3: 1.0}
    sampler = holding(lambda: Rank(100, 0.7), priority)
    slot, probability = sampler.draw(400, np.random.default_rng(0))
    found = [probability[slot == i][0] for i in priority]
    golden = [0.281155, 0.173071, 0.130305, 0.106538, 0.091131, 0.080212, 0.072007, 0.065582]
    np.testing.assert_allclose(found, golden, atol=1e-6)
    assert sampler.lowest() == pytest.approx(0.065582, abs=1e-6)


@pytest.mark.parametrize("k", [4, 16])
def test_rank_strata_are_valid_and_unbiased(k):
    """P60: N = 8; with k = 16 the usual segments of whole ranks would be empty, with k = 4 not P(i)."""
    sampler, rng = holding(lambda: Rank(8, 0.7), {i: 8.0 - i for i in range(8)}), np.random.default_rng(0)
    count, declared = np.zeros(8), np.zeros(8)
    for _ in range(50_000 // k):
        slot, probability = sampler.draw(k, rng)
        count += np.bincount(slot, minlength=8)
        declared[slot] = probability
    assert declared.sum() == pytest.approx(1)
    assert chi_square(count, declared) < limit(8)
    segments = np.array([0.25, 0.25, 0.125, 0.125, 0.0625, 0.0625, 0.0625, 0.0625])
    assert chi_square(count, segments) > limit(8)


def test_rank_follows_every_change_at_once():
    sampler = holding(lambda: Rank(6, 0.7), {0: 1.0, 1: 2.0, 2: 3.0})
    first = Fixed(0.0)  # the largest priority stands at mass 0
    assert sampler.draw(1, first)[0] == [2]
    sampler.set(np.array([0]), np.array([4.0]))
    assert sampler.draw(1, first)[0] == [0]
    sampler.set(np.array([5]), np.array([4.0]))  # an equal one: lower slots first
    assert sampler.draw(1, first)[0] == [0]
    sampler.remove(np.array([0]))
    assert sampler.draw(1, first)[0] == [5]
    sampler.set(np.array([5]), np.array([0.0]))
    assert sampler.draw(1, first)[0] == [2]


def test_rank_orders_the_whole_range_of_priorities():
    priority = [1e300, 3e38, 1.0, np.nextafter(np.float32(1), np.float32(0)), 1e-20, 1e-45, 0.0, -0.0]
    sampler = holding(lambda: Rank(8, 0.0), dict(enumerate(priority)))
    np.testing.assert_array_equal(sampler.draw(8, Fixed(0.5))[0], np.arange(8))


def test_rank_wants_an_alpha_that_prefers_high_priorities():
    for alpha in (-0.1, math.nan, math.inf):
        with pytest.raises(ValueError, match="alpha"):
            Rank(4, alpha)
    with pytest.raises(ValueError, match="alpha"):
        Proportional(4, math.nan)


def test_rank_refuses_priorities_of_another_length():
    with pytest.raises(ValueError, match="one length"):
        Rank(4, 0.7).set(np.array([0, 1]), np.ones(3))


def test_inverse_odds():
    """P62: two items of priority 1 and 100 go at odds of 1 : 100^-0.4 = 1 : 0.158."""
    sampler = holding(lambda: Proportional(2, -0.4), {0: 1.0, 1: 100.0})
    slot, probability = sampler.draw(100, np.random.default_rng(0))
    odds = probability[slot == 1][0] / probability[slot == 0][0]
    assert odds == pytest.approx(100**-0.4) == pytest.approx(0.158, abs=1e-3)


@pytest.mark.parametrize("numba", [True, False], ids=["numba", "numpy"])
def test_priority_0(numba):
    """Never beside others, equally often among themselves, still an item, and not what weights are measured by."""
    sampler = holding(lambda: Proportional(6, 0.6), {0: 0.0, 1: 0.0, 2: 0.0}, numba)
    assert len(sampler) == 3
    slot, probability = sampler.draw(6, np.random.default_rng(0))
    np.testing.assert_array_equal(slot, [0, 0, 1, 1, 2, 2])
    np.testing.assert_allclose(probability, 1 / 3)
    assert sampler.lowest() == pytest.approx(1 / 3)
    sampler.set(np.array([1, 4]), np.array([1e-12, 2e-12]))
    slot, probability = sampler.draw(1000, np.random.default_rng(0))
    assert set(slot.tolist()) == {1, 4} and len(sampler) == 4
    assert sampler.lowest() == pytest.approx(1 / (1 + 2**0.6))
    inverse = holding(lambda: Proportional(6, -0.4), {0: 1e-30, 1: 0.0, 2: 1.0}, numba)
    assert (inverse.draw(100, np.random.default_rng(0))[0] == 1).all()
    even = holding(lambda: Proportional(6, 0.0), {0: 7.0, 1: 0.0}, numba)
    np.testing.assert_array_equal(even.draw(2, np.random.default_rng(0)), [[0, 1], [0.5, 0.5]])


def test_uniform_draws_are_independent():
    """Not stratified: of 100 batches of 2 out of 2 items, about half hold one item twice."""
    sampler, rng = holding(lambda: Uniform(2), {0: 1.0, 1: 1.0}), np.random.default_rng(0)
    twice = sum(len(set(sampler.draw(2, rng)[0].tolist())) == 1 for _ in range(1000))
    assert 420 < twice < 580


alphas = st.sampled_from([0.0, 0.5, 0.6, 1.0, 2.0, -0.4, -1.0]) | st.floats(-3, 3)
priorities = st.floats(0, 1e308) | st.floats(0, 10) | st.floats(0, 1e-30) | st.sampled_from([0.0, 5e-324, 1.0])


@given(st.lists(priorities, max_size=20), alphas)
@settings(max_examples=300, deadline=None)
def test_powers_are_exact_to_1e_13_and_the_same_bits_without_numba(priority, alpha):
    priority = np.array(priority, float)
    fast, plain = (made(lambda: Power(alpha), numba)(priority) for numba in (True, False))
    np.testing.assert_array_equal(fast, plain, strict=True)
    assert ((fast >= TINY) & (fast <= LARGEST)).all()
    tame = (priority > 1e-300) & np.array([p > 0 and -990 < alpha * math.log2(p) < 950 for p in priority], bool)
    np.testing.assert_allclose(fast[tame], priority[tame] ** alpha, rtol=1e-13 * max(1, abs(alpha)))


def test_powers_of_one_are_exact():
    priority = np.array([0.1, 1 / 3, 1.0, 2.0, 12345.678])
    np.testing.assert_allclose(Power(1.0)(priority), priority, rtol=1e-15)
    np.testing.assert_array_equal(Power(0.0)(priority), np.ones(5))
    np.testing.assert_array_equal(Power(0.6)(np.ones(3)), np.ones(3))
