"""DQN and DPG on several ranks, each with items of its own: together the update of one rank with all items."""

from __future__ import annotations

import dataclasses
import math

import pytest
import support_dpg
import support_dqn
import torch
from support_ranks import agreed, ranks, together

from rookery.core import tree
from rookery.core.config import NetConfig
from rookery.core.errors import NumericError
from rookery.core.types import Sequences, Transitions
from rookery.roles.learner import Learner

FLAT = NetConfig(hidden=(8,), features=6, normalize_obs=True)
GRU = NetConfig(hidden=(8,), features=6, normalize_obs=True, core="gru", core_size=5)
SPLITS = {"equal": [8, 8], "unequal": [3, 13], "three": [5, 1, 10]}


def split(items: Transitions | Sequences, sizes: list[int]) -> list:
    """The items of each rank. Sequences are time-major, but for the fields of whole items."""
    if isinstance(items, Transitions):
        return [tree.map_fields(items, lambda x, r=r: x.split(sizes)[r].clone()) for r in range(len(sizes))]
    whole = ("state", "weight", "version")
    rows = [tree.map_fields(items, lambda x, r=r: x.split(sizes, 1)[r].clone(), skip=whole) for r in range(len(sizes))]
    return [
        dataclasses.replace(
            part, **{n: tree.map(lambda x, r=r: x.split(sizes)[r].clone(), getattr(items, n)) for n in whole}
        )
        for r, part in enumerate(rows)
    ]


class Run:
    def __init__(self, sizes: list[int], make):
        """make(reduce) -> Learner, always with the same weights."""
        self.sizes, self.group = sizes, ranks(len(sizes), in_place=len(sizes) == 3)
        self.whole: Learner = make(None)
        self.learners: list[Learner] = [make(rank) for rank in self.group]

    def step(self, items, progress: float = 0.0) -> tuple:
        return self.whole.step(items, progress), self.step_parts(items, progress)

    def step_parts(self, items, progress: float = 0.0) -> list:
        parts = split(items, self.sizes)
        return together(self.group, lambda r: self.learners[r].step(parts[r], progress))

    def check(self) -> None:
        counts = (self.whole.version, self.whole.updates, self.whole.skipped)
        assert [(x.version, x.updates, x.skipped) for x in self.learners] == [counts] * len(self.learners)
        expected = self.whole.nets.state_dict()
        for learner in self.learners:
            for name, value in learner.nets.state_dict().items():
                torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-6, msg=name)
                assert torch.equal(value, self.learners[0].nets.state_dict()[name])


def dqn(net: NetConfig, **changes):
    def make(reduce) -> Learner:
        return support_dqn.built(net, reduce=reduce, **changes)

    return make


def dpg(net: NetConfig, **changes):
    def make(reduce) -> Learner:
        return support_dpg.built(net, reduce=reduce, adam_eps=1e-4, **changes)

    return make


def agree(run: Run, batches: list) -> None:
    """Several updates, compared after each; the priorities of a rank are those of its own items."""
    start = torch.cat([flat.data for flat in run.whole.flat.values()])
    for number, items in enumerate(batches):
        report, parts = run.step(items, number / len(batches))
        priorities = torch.cat([part.priorities for part in agreed(parts)])
        torch.testing.assert_close(priorities, report.priorities, rtol=1e-4, atol=1e-5)
        run.check()
    assert (torch.cat([flat.data for flat in run.whole.flat.values()]) - start).abs().max() > 1e-3
    assert [len(rank.calls) for rank in run.group] == [2 * len(batches)] * len(run.group), "gradient and normaliser"


DQN_CASES = {"plain": {}, "c51": {"atoms": 11, "dueling": True}, "noisy": {"noisy": True}}


@pytest.mark.parametrize("sizes", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("case", DQN_CASES)
def test_dqn_on_transitions(case, sizes):
    """Noise of noisy nets is of the minibatch, so all ranks have the same."""
    run = Run(sizes, dqn(FLAT, optimizer_eps=1e-3, **DQN_CASES[case]))
    agree(run, [support_dqn.transitions(16, seed=n) for n in range(5)])


@pytest.mark.parametrize("sizes", SPLITS.values(), ids=SPLITS)
def test_dqn_on_sequences_counts_items(sizes):
    """The loss of a sequence is the sum over its rows: weight is the number of items, however long they are."""
    run = Run(sizes, dqn(GRU, optimizer_eps=1e-3))
    ends = {3: (4, "terminated"), 9: (3, "truncated"), 12: (5, "terminated")}
    agree(run, [support_dqn.sequences(run.whole, ends, 16, seed=n) for n in range(4)])


@pytest.mark.parametrize("sizes", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("critic", ["scalar", "categorical"])
def test_dpg_on_transitions(critic, sizes):
    run = Run(sizes, dpg(FLAT, critic=critic, critic_l2=1e-2))
    agree(run, [support_dpg.batch(16, seed=n) for n in range(5)])


def test_dpg_with_a_mixture_draws_for_the_items_of_all_ranks():
    """The points of a mixture's target are drawn per row: ranks must not all use the same ones."""
    agree(Run([8, 8], dpg(FLAT, critic="mixture")), [support_dpg.batch(16, seed=n) for n in range(4)])


@pytest.mark.parametrize("critic", ["scalar", "mixture"])
def test_dpg_on_sequences_counts_live_rows(critic):
    """The loss of a batch is the mean over live rows, so long items weigh more than short ones."""
    sizes = [[3, 13], [5, 1, 10]] if critic == "scalar" else [[8, 8]]
    for each in sizes:
        run = Run(each, dpg(GRU, critic=critic, sequence=4, burn_in=2, overlap=2))
        batches = [dpg_sequences(run.whole, 16, seed) for seed in range(4)]
        live = [int(part.live[2:].sum()) for part in split(batches[0], each)]
        assert len({count / size for count, size in zip(live, each)}) > 1, "unequal live rows per item"
        agree(run, batches)


def dpg_sequences(learner: Learner, count: int, seed: int) -> Sequences:
    rng, rows = torch.Generator().manual_seed(seed), 6
    length = torch.randint(3, rows + 1, (count,), generator=rng)
    length[0] = rows
    live = torch.arange(rows).unsqueeze(1) < length
    terminated = torch.arange(rows).unsqueeze(1) == length - 1
    state = learner.algorithm.initial_state(learner.nets, count)
    return Sequences(
        obs={"obs": torch.randn(rows + 1, count, 3, generator=rng)},
        action=(torch.rand(rows, count, 2, generator=rng) * 2 - 1) * live.unsqueeze(-1),
        reward=torch.randn(rows, count, generator=rng) * live, terminated=terminated,
        truncated=torch.zeros_like(terminated), live=live,
        state=tree.map(lambda x: torch.randn(x.shape, generator=rng), state),
        weight=torch.rand(count, generator=rng) + 0.1, version=torch.zeros(count, dtype=torch.int64),
    )  # fmt: skip


# What is not finite on one rank


def test_errors_that_are_not_finite_on_one_rank_are_skipped_and_counted_by_all():
    """The gradient of a Huber loss is finite, whatever the error: only the priorities tell."""
    run = Run([3, 13], dqn(FLAT))
    items = support_dqn.transitions(16)
    items.reward[1] = math.inf  # of the first rank
    report, parts = run.step(items)
    assert report.priorities is None
    assert all(part.priorities is None for part in agreed(parts)), "a skipped update has no priorities"
    assert run.learners[1].flat["all"].grad.isfinite().all()
    run.check()
    assert [learner.skipped for learner in run.learners] == [1, 1]
    agree_once(run)


def agree_once(run: Run) -> None:
    report, parts = run.step(support_dqn.transitions(16, seed=9))
    assert report.priorities is not None and all(part.priorities is not None for part in agreed(parts))
    run.check()


def test_three_in_a_row_end_the_run_on_every_rank_and_each_says_whose_fault_it_was():
    run = Run([3, 5, 8], dqn(FLAT))
    items = support_dqn.transitions(16)
    items.reward[1] = math.inf
    for _ in range(2):
        agreed(run.step_parts(items))
    errors = run.step_parts(items)
    assert all(isinstance(error, NumericError) and "3 times in a row" in str(error) for error in errors), errors
    assert "the sum of errors" in str(errors[0]) and "another rank" in str(errors[1])
    assert [learner.skipped for learner in run.learners] == [3, 3, 3]


def test_a_gradient_that_is_not_finite_in_one_group_of_one_rank_stops_both_groups_on_all():
    run = Run([3, 13], dpg(FLAT))
    before = [flat.data.clone() for flat in run.learners[1].flat.values()]
    items = support_dpg.batch(16)
    items.action[2] = math.nan
    agreed(run.step(items)[1])
    run.check()
    assert all(torch.equal(a, flat.data) for a, flat in zip(before, run.learners[1].flat.values()))
    assert [learner.skipped for learner in run.learners] == [1, 1]


def test_a_fault_that_is_injected_on_one_rank_reaches_all():
    run = Run([8, 8], dqn(FLAT))
    run.learners[1].spoil = lambda updates: updates == 2
    for seed in range(2):
        agreed(run.step_parts(support_dqn.transitions(16, seed=seed)))
    agreed(run.step_parts(support_dqn.transitions(16, seed=2)))
    assert [(x.updates, x.skipped) for x in run.learners] == [(2, 1)] * 2
    run.learners[1].spoil = lambda updates: False
    agreed(run.step_parts(support_dqn.transitions(16, seed=3)))
    assert [(x.updates, x.skipped) for x in run.learners] == [(3, 1)] * 2
