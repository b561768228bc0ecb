"""Moments: parts merge to the whole, whatever the split, the weights, the poison or the offset."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rookery.ops.moments import Moments, from_sums, merge, moments, normalized, pooled, to_sums, variance

F64 = torch.float64


def same(a, b, rtol=1e-12):
    for x, y in zip(a, b):
        torch.testing.assert_close(x, y, rtol=rtol, atol=1e-12)


def test_rk1_ranks_of_unequal_size():
    first, second = moments(torch.tensor([1.0, 2.0, 3.0])), moments(torch.tensor([10.0]))
    reduced = from_sums(to_sums(first) + to_sums(second))
    for both in (merge(first, second), merge(second, first), reduced):
        assert both.count == 4 and both.mean.item() == pytest.approx(4)
        assert variance(both).item() == pytest.approx(12.5)


def test_pooled_is_what_every_rank_gets_from_one_sum():
    ranks = [(torch.tensor([1.0, 2.0, 3.0]), torch.ones(3)), (torch.tensor([10.0, math.nan]), torch.tensor([1.0, 0]))]
    others = sum(to_sums(moments(x, weight)) for x, weight in ranks[1:])
    result = pooled(*ranks[0], lambda mine: mine + others)
    assert result.count == 4 and result.mean.item() == pytest.approx(4)
    assert variance(result).item() == pytest.approx(12.5)
    same(pooled(*ranks[0], lambda mine: mine), moments(*ranks[0]))


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.lists(st.integers(0, 7), min_size=1, max_size=5), st.integers(0, 2**32 - 1), st.sampled_from([0, 1e3, 1e8]))
def test_any_split_merges_to_the_whole(sizes, seed, offset):
    rng = np.random.default_rng(seed)
    parts = [torch.tensor(offset + rng.normal(size=(size, 3))) for size in sizes]
    whole, merged = moments(torch.cat(parts), leading=1), moments(parts[0], leading=1)
    for part in parts[1:]:
        merged = merge(merged, moments(part, leading=1))
    same(merged, whole, rtol=1e-7)  # at 1e8 the inputs themselves carry 1e-8
    pivot = torch.full((3,), float(offset), dtype=F64)
    reduced = from_sums(sum(to_sums(moments(part, leading=1), pivot) for part in parts), pivot)
    same(reduced, whole, rtol=1e-7)


def test_agrees_with_numpy_per_feature_and_over_everything():
    x = np.random.default_rng(0).normal(3, 2, size=(5, 4, 3)).astype(np.float32)
    scalar, features = moments(torch.tensor(x)), moments(torch.tensor(x), leading=2)
    assert scalar.mean.shape == () and features.mean.shape == features.m2.shape == (3,)
    assert scalar.count == 60 and features.count == 20 and scalar.mean.dtype == F64
    np.testing.assert_allclose(variance(scalar), x.astype(np.float64).var())
    np.testing.assert_allclose(features.mean, x.astype(np.float64).mean((0, 1)))
    np.testing.assert_allclose(variance(features, unbiased=True), x.astype(np.float64).var((0, 1), ddof=1))


def test_weights_count_as_repetitions_and_their_shape_says_what_is_a_feature():
    x = torch.tensor([[[1.0, 2.0], [5.0, 6.0]], [[9.0, 0.0], [7.0, 7.0]]])  # [T=2, B=2, 2]
    weight = torch.tensor([[2.0, 0.0], [1.0, 1.0]])
    rows = torch.tensor([[1.0, 2.0], [1.0, 2.0], [9.0, 0.0], [7.0, 7.0]])
    same(moments(x, weight), moments(rows, leading=1))
    halves = moments(x, weight / 2)
    assert halves.count == 2
    same([variance(halves)], [variance(moments(rows, leading=1))])


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_poison_without_weight_is_invisible(poison):
    x, weight = torch.tensor([1.0, poison, 3.0]), torch.tensor([True, False, True])
    same(moments(x, weight), moments(torch.tensor([1.0, 3.0])))
    assert normalized(x, weight, torch.tensor(2.0, dtype=F64), torch.tensor(1.0, dtype=F64), 0).tolist() == [-1, 0, 1]


def test_merging_with_nothing_changes_nothing():
    some, none = moments(torch.tensor([1.0, 2.0])), moments(torch.zeros(0))
    assert none == Moments(torch.tensor(0.0, dtype=F64), torch.tensor(0.0, dtype=F64), torch.tensor(0.0, dtype=F64))
    same(merge(some, none), some)
    same(merge(none, some), some)
    same(merge(none, none), none)
    same(from_sums(to_sums(none)), none)


def test_a_single_value_has_no_spread_and_normalises_to_zero():
    x = torch.tensor([5.0])
    single = moments(x)
    assert variance(single) == 0 and variance(single, unbiased=True) == 0
    assert normalized(x, None, single.mean, variance(single)).tolist() == [0]
    halves = moments(torch.tensor([1.0, 3.0]), torch.tensor([0.5, 0.5]))  # one sample's worth of weight
    assert variance(halves) == 1 and variance(halves, unbiased=True) == 0


def test_nothing_normalises_to_nothing():
    x, weight = torch.tensor([5.0, 6.0]), torch.zeros(2)
    none = moments(x, weight)
    assert normalized(x, weight, none.mean, variance(none)).tolist() == [0, 0]


def test_normalized_has_mean_zero_and_deviation_one_and_leaves_its_input():
    x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0)) * 7 + 100
    before, stats = x.clone(), moments(x, leading=1)
    y = normalized(x, None, stats.mean, variance(stats))
    again = moments(y, leading=1)
    assert torch.equal(x, before) and y.dtype == x.dtype
    torch.testing.assert_close(again.mean, torch.zeros(3, dtype=F64), atol=1e-6, rtol=0)
    torch.testing.assert_close(variance(again), torch.ones(3, dtype=F64), atol=1e-5, rtol=0)


def test_a_pivot_saves_what_raw_sums_of_squares_lose():
    x = 1e9 + torch.randn(1000, dtype=F64, generator=torch.Generator().manual_seed(0))
    pivot, stats = x[0], moments(x)
    true = variance(stats)
    assert variance(from_sums(to_sums(stats, pivot), pivot)).item() == pytest.approx(true.item(), rel=1e-9)
    assert variance(from_sums(to_sums(stats))).item() != pytest.approx(true.item(), rel=0.1)


def test_sums_keep_the_shape_of_the_features():
    stats = moments(torch.randn(6, 4, 5, generator=torch.Generator().manual_seed(0)), leading=1)
    sums = to_sums(stats)
    assert sums.shape == (3, 4, 5) and sums.dtype == F64
    back = from_sums(sums)
    assert back.count.shape == ()
    same(back, stats)


def test_variance_from_sums_is_never_negative():
    stats = moments(torch.full((3,), 0.1, dtype=F64) * 1e8)
    assert variance(from_sums(7 * to_sums(stats) / 3)) >= 0


def test_statistics_carry_no_gradient():
    x = torch.ones(3, requires_grad=True)
    assert not any(part.requires_grad for part in moments(x))


def test_a_weight_of_another_shape_is_refused():
    with pytest.raises(AssertionError):
        moments(torch.zeros(3, 2), torch.ones(2))
    with pytest.raises(AssertionError):
        moments(torch.zeros(3, 2), torch.ones(3, 2), leading=1)
