"""Sums, weighted means and decisions of several ranks, and of one."""

from __future__ import annotations

import math

import pytest
import torch
from support_ranks import agreed, ranks, together

from rookery.core.reduce import ALONE


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_a_mean_is_that_of_all_rows(size, in_place):
    """P20: 3 rows here and 1 there are 4 rows, not two halves."""
    rows = torch.randn(7, 2, 3, generator=torch.Generator().manual_seed(0))
    parts = rows.split([4, 1, 2] if size == 3 else [6, 1])
    group = ranks(size, in_place)
    means = agreed(together(group, lambda r: group[r].mean(parts[r].mean(0), len(parts[r]))))
    for mean in means:
        torch.testing.assert_close(mean, rows.mean(0))
        assert torch.equal(mean, means[0])


def test_what_has_no_weight_does_not_count_and_nothing_divides_by_0():
    group = ranks(2)
    x = [torch.tensor([math.nan, 1.0]), torch.tensor([3.0, 5.0])]
    for weights, expected in (((0, 2), [3.0, 5.0]), ((torch.tensor(0.0), torch.tensor(2.0)), [3.0, 5.0])):
        for mean in agreed(together(group, lambda r, w=weights: group[r].mean(x[r], w[r]))):
            assert mean.tolist() == expected
    for mean in agreed(together(group, lambda r: group[r].mean(x[r], 0))):
        assert mean.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("flags", [(False, False), (True, False), (False, True), (True, True)])
def test_decisions_are_the_same_on_all_ranks(flags):
    group = ranks(2)
    found = agreed(together(group, lambda r: (group[r].any(flags[r]), group[r].all(flags[r]))))
    assert found == [(any(flags), all(flags))] * 2


def test_alone_everything_is_its_own_sum_and_mean():
    x = torch.tensor([1.0, math.nan])
    assert ALONE.sum(x) is x and ALONE.mean(x, 3) is x and ALONE.mean(x, 0) is x
    assert [(ALONE.any(flag), ALONE.all(flag)) for flag in (True, False)] == [(True, True), (False, False)]
    assert (ALONE.rank, ALONE.size) == (0, 1)
