"""Learners of several ranks decide from the same sums: what is applied, skipped or stopped is so on all of them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from support_lanes import ScriptedLanes
from support_ranks import agreed, ranks, together
from torch import nn

from rookery.algorithms.base import Algorithm
from rookery.core.config import NetConfig
from rookery.core.types import ActOutput, DataPlan, LossOutput, Queue
from rookery.roles.learner import Learner


class Toy(Algorithm):
    """Batches are lists of minibatches: None, or what the loss shall be of each group, the weight and the criterion.

    The gradient of a group's only weight is the number given for it.
    """

    Config = dict
    published = ("a",)
    groups = {"a": ("a",), "b": ("b",)}  # noqa: RUF012 - constant

    def __init__(self, stop_above: float = math.inf, max_grad_norm: float = math.inf):
        super().__init__({}, NetConfig(), ScriptedLanes().spec, 4)
        self.stop_above, self.max_grad_norm = stop_above, max_grad_norm

    def nets(self) -> nn.ModuleDict:
        return nn.ModuleDict({name: nn.Linear(1, 1, bias=False) for name in "ab"})

    def plan(self) -> DataPlan:
        return DataPlan(4, 4, Queue())

    def initial_state(self, nets, lanes):
        return {}

    def act(self, nets, obs, state, explore) -> ActOutput:
        raise NotImplementedError

    def minibatches(self, batch, rng, reduce) -> Iterator[dict | None]:
        yield from batch

    def losses(self, nets, batch) -> LossOutput:
        found = {name: nets[name].weight.sum() * batch[name] for name in "ab" if name in batch}
        return LossOutput(found, {"x": torch.tensor(1.0)}, None, batch.get("stop"), batch["weight"])

    def optimizers(self, parameters):
        return {name: torch.optim.SGD([p], 1.0) for name, p in parameters.items()}


class Run:
    def __init__(self, size: int = 2, in_place: bool = False, **kwargs):
        self.group = ranks(size, in_place)
        self.learners = [Learner(Toy(**kwargs), 1, reduce=rank) for rank in self.group]
        self.start = {name: float(self.learners[0].nets[name].weight.detach()) for name in "ab"}

    def step(self, *batches) -> list:
        return agreed(together(self.group, lambda r: self.learners[r].step(batches[r], 0.0)))

    def moved(self) -> list[tuple[float, float]]:
        """How far the weights of each group went, on each rank; equal to the sum of the gradients applied."""
        moved = [tuple(self.start[n] - float(each.nets[n].weight.detach()) for n in "ab") for each in self.learners]
        assert len(set(moved)) == 1, "all ranks alike"
        return moved

    def counts(self) -> tuple[int, int]:
        """Updates and skips; the same on all ranks."""
        (found,) = {(learner.updates, learner.skipped) for learner in self.learners}
        return found


def piece(a: float | None, b: float | None, weight: float = 1, stop: float | None = None) -> dict:
    found = {
        "a": a,
        "b": b,
        "weight": torch.tensor(float(weight)),
        "stop": None if stop is None else torch.tensor(stop),
    }
    return {name: x for name, x in found.items() if x is not None}


@pytest.mark.parametrize("in_place", [False, True])
def test_gradients_are_means_over_rows_and_clipped_after_that(in_place):
    """P20, P22: clip(mean), whether the reduction returns a new tensor or works in place."""
    run = Run(3, in_place)
    run.step([piece(4.0, 1.0, 1)], [piece(1.0, 1.0, 2)], [piece(0.0, 6.0, 2)])
    assert run.moved()[0] == pytest.approx((1.2, 3.0), abs=1e-6)
    run = Run(2, in_place, max_grad_norm=1.0)
    reports = run.step([piece(4.0, 0.1)], [piece(-3.0, 0.2)])
    assert run.moved()[0] == pytest.approx((0.5, 0.15), abs=1e-6), "a mean of 0.5 needs no clip"
    for report in reports:
        assert report.metrics["grad_norm_a"] == pytest.approx(0.5) and report.metrics["minibatches"] == 1


def test_a_rank_without_rows_joins_and_its_gradient_of_before_is_not_sent_again():
    run = Run()
    reports = run.step([piece(1.0, 1.0, 3), None, piece(2.0, 2.0)], [piece(1.0, 1.0, 5), piece(7.0, 8.0, 2), None])
    assert run.moved()[0] == pytest.approx((1 + 7 + 2, 1 + 8 + 2), abs=1e-5)
    assert [len(rank.calls) for rank in run.group] == [3, 3]
    assert all(report.metrics["minibatches"] == 3 for report in reports)


def test_a_group_is_stepped_where_some_rank_has_a_loss_for_it():
    """The rank without rows does not know which losses the others have: it learns that from the sums."""
    run = Run()
    run.step([piece(None, 1.0), piece(None, 3.0)], [piece(None, 3.0), None])
    assert run.moved()[0] == pytest.approx((0.0, 5.0), abs=1e-5)
    run.step([piece(5.0, None)], [piece(5.0, None)])
    assert run.moved()[0] == pytest.approx((5.0, 5.0), abs=1e-5), "the gradient of the other group is an old one"


@pytest.mark.parametrize(("limit", "updates"), [(0.8, 2), (0.7, 0)])
def test_an_update_ends_where_the_mean_of_all_rows_is_beyond_the_limit(limit, updates):
    """One rank is beyond both limits and the other one below: 3 rows at 1 and 1 row at 0 are 0.75."""
    run = Run(stop_above=limit)
    run.step([piece(1.0, 1.0, 3, 1.0)] * 2, [piece(1.0, 1.0, 1, 0.0)] * 2)
    assert run.counts() == (updates, 0)
    assert [len(rank.calls) for rank in run.group] == [updates or 1] * 2


def test_the_criterion_of_a_rank_without_rows_does_not_count():
    run = Run(stop_above=0.5)
    run.step([piece(1.0, 1.0, 4, 0.6)], [None])
    assert run.counts() == (0, 0)
    run.step([piece(1.0, 1.0, 4, 0.4)], [None])
    assert run.counts() == (1, 0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_gradient_of_one_rank_is_skipped_by_all(bad):
    run = Run(3)
    run.step([piece(1.0, 1.0)] * 2, [piece(1.0, bad), piece(1.0, 1.0)], [piece(1.0, 1.0)] * 2)
    assert run.counts() == (1, 1) and run.moved()[0] == pytest.approx((1.0, 1.0), abs=1e-6)


def test_a_fault_injected_where_a_rank_has_no_rows_is_still_one():
    run = Run()
    run.learners[1].spoil = lambda updates: True
    reports = run.step([piece(1.0, 1.0)], [None])
    assert run.counts() == (0, 1) and run.moved()[0] == (0.0, 0.0)
    assert all(report.metrics["minibatches"] == 0 for report in reports)


def test_no_weight_anywhere_divides_nothing_by_0():
    run = Run()
    run.step([piece(0.0, 0.0, 0, 0.0)], [None])
    assert run.counts() == (1, 0) and run.moved()[0] == (0.0, 0.0)
