"""A shuffle over ranks: the parts of all ranks are the whole, in its order."""

from __future__ import annotations

import pytest
import torch

from rookery.ops.shuffle import own_pieces


@pytest.mark.parametrize(("per_lane", "lanes", "size", "minibatches"), [(5, 2, 3, 6), (1, 4, 2, 8), (4, 1, 2, 1)])
def test_the_parts_of_all_ranks_are_the_whole(per_lane, lanes, size, minibatches):
    whole = torch.arange(per_lane * lanes * size).view(per_lane, size * lanes)
    order = torch.randperm(whole.numel(), generator=torch.Generator().manual_seed(0))
    found = [[] for _ in range(minibatches)]
    for rank in range(size):
        part = whole[:, rank * lanes : (rank + 1) * lanes].flatten()
        own, counts = own_pieces(order, per_lane, minibatches, rank, size)
        assert len(counts) == minibatches and sorted(part[own].tolist()) == part.tolist()
        for pieces, mine in zip(order.view(minibatches, -1), part[own].split(counts)):
            assert mine.tolist() == [n for n in pieces.tolist() if n in part], "in the order of the whole"
        for pieces, mine in zip(found, part[own].split(counts)):
            pieces += mine.tolist()
    assert [sorted(x) for x in found] == [sorted(x) for x in order.view(minibatches, -1).tolist()]


def test_one_rank_keeps_the_permutation():
    order = torch.randperm(12)
    own, counts = own_pieces(order, 3, 4, 0, 1)
    assert own is order and counts == [3, 3, 3, 3]


def test_minibatches_that_cannot_be_equal_differ_by_one():
    own, counts = own_pieces(torch.arange(12), 3, 5, 0, 1)
    assert counts == [3, 3, 2, 2, 2] and len(own) == 12
    parts = [own_pieces(torch.arange(12), 3, 5, rank, 2)[1] for rank in range(2)]
    assert [sum(both) for both in zip(*parts)] == counts


@pytest.mark.parametrize(("count", "minibatches", "size"), [(12, 13, 1), (10, 5, 2)])
def test_parts_that_do_not_fit_are_refused(count, minibatches, size):
    with pytest.raises(AssertionError):
        own_pieces(torch.arange(count), 3, minibatches, 0, size)
