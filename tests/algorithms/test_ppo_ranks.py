"""PPO on several ranks: parts of the lanes on each give the update that one rank makes of all lanes (P19 to P22)."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from support_lanes import NETS, SMALL, Rig, ScriptedLanes, build, frozen, shaken
from support_ranks import Rank, agreed, ranks, together

from rookery.algorithms.ppo import PPO, PPOConfig
from rookery.core import tree
from rookery.core.config import NetConfig
from rookery.core.errors import NumericError
from rookery.core.unroll import Unroll
from rookery.roles.learner import Learner

LANES = 6
SCALED = dataclasses.replace(SMALL, scale_reward=True, lr=1e-3)


def part_of(batch: Unroll, rank: int, size: int) -> Unroll:
    """The lanes of one rank."""
    count = batch.reward.shape[1] // size
    own = slice(rank * count, (rank + 1) * count)
    cut = tree.map_fields(batch, lambda x: x[:, own].clone(), skip=("version", "lane"))
    return tree.replace(cut, version=batch.version[own], lane=batch.lane[own])


class Run:
    """One learner on all lanes, and one learner per rank on its part of them."""

    def __init__(self, size: int, config: PPOConfig, net: NetConfig, in_place: bool = False):
        self.net = dataclasses.replace(net, normalize_obs=True)
        self.whole: Rig = build(lambda: ScriptedLanes(count=LANES), config, self.net)
        self.group: list[Rank] = ranks(size, in_place)
        algorithms = [PPO(config, self.net, ScriptedLanes().spec, LANES) for _ in self.group]
        self.learners = [Learner(each, 7, reduce=rank) for each, rank in zip(algorithms, self.group)]
        for learner in self.learners:
            shaken(learner, 0.3)

    def batch(self) -> Unroll:
        return frozen(self.whole.collect())

    def step(self, batch: Unroll, progress: float = 0.0) -> tuple:
        """The report of the whole, and those (or the errors) of the ranks."""
        report = self.whole.learner.step(batch, progress)
        return report, self.step_parts(batch, progress)

    def step_parts(self, batch: Unroll, progress: float = 0.0) -> list:
        size = len(self.group)
        return together(self.group, lambda r: self.learners[r].step(part_of(batch, r, size), progress))

    def check(self) -> None:
        whole, (first, *others) = self.whole.learner, self.learners
        counts = (whole.version, whole.updates, whole.skipped)
        assert [(x.version, x.updates, x.skipped) for x in self.learners] == [counts] * len(self.learners)
        torch.testing.assert_close(first.flat["all"].data, whole.flat["all"].data, rtol=0, atol=1e-6)
        for other in others:
            assert torch.equal(other.flat["all"].data, first.flat["all"].data), "ranks never drift apart"
        for name, expected in whole.nets.named_buffers():
            for learner in self.learners:
                torch.testing.assert_close(learner.nets.get_buffer(name), expected, rtol=1e-6, atol=1e-6)


CASES = [("split", n) for n in (1, 2, 4, 9, 36)] + [("shared", 4)]
CASES += [("gru", n) for n in (1, 2, 3, 12)] + [("lstm2", 4)]


@pytest.mark.parametrize(("name", "minibatches"), CASES)
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_with_parts_of_the_lanes_equal_one_rank_with_all(size, name, minibatches):
    """P19, P20, P21: however many minibatches; with 36 a rank has no row at all in most of them."""
    run = Run(size, dataclasses.replace(SCALED, minibatches=minibatches), NETS[name], in_place=size == 3)
    start = run.whole.learner.flat["all"].data.clone()
    for number in range(4):
        batch = run.batch()
        report, parts = run.step(batch, number / 4)
        live = batch.live.sum(0).view(size, -1).sum(1).tolist()
        assert len(set(live)) > 1, "the ranks have unequal numbers of live rows"
        for found in agreed(parts):
            assert found.metrics["explained_variance"] == pytest.approx(report.metrics["explained_variance"], abs=1e-5)
            assert found.metrics["grad_norm"] == pytest.approx(report.metrics["grad_norm"], rel=1e-3)
            assert found.metrics["minibatches"] == report.metrics["minibatches"] == 2 * minibatches
        run.check()
    assert (run.whole.learner.flat["all"].data - start).abs().max() > 1e-3


@pytest.mark.parametrize("minibatches", [2, 36])
def test_a_minibatch_costs_one_collective(minibatches):
    config = dataclasses.replace(SCALED, minibatches=minibatches, target_kl=1e9)
    run = Run(2, config, NETS["split"])
    agreed(run.step(run.batch())[1])
    floats = run.learners[0].flat["all"].grad.numel()
    for rank in run.group:
        large = [shape for shape in rank.calls if math.prod(shape) >= floats]
        assert len(large) == config.epochs * minibatches
        assert len(rank.calls) - len(large) == 4, "once per update: rewards, advantages, explained variance, normaliser"


def test_every_piece_is_in_one_minibatch_of_one_rank_per_epoch():
    """The pieces have the numbers, and the order, that they have on one rank with all lanes."""
    for name in ("split", "gru"):
        config = dataclasses.replace(SMALL, minibatches=4, epochs=3)
        run = Run(3, config, NETS[name])
        batch = run.batch()
        number = torch.arange(batch.logp.numel(), dtype=torch.float32).view_as(batch.logp)
        batch = dataclasses.replace(batch, logp=number)

        def pieces(algorithm, nets, batch, reduce):
            prepared = algorithm.prepare(nets, batch, reduce)
            made = algorithm.minibatches(prepared, torch.Generator().manual_seed(3), reduce)
            return [[] if x is None else x.logp.flatten().tolist() for x in made]

        whole = pieces(run.whole.algorithm, run.whole.learner.nets, batch, run.whole.learner.reduce)

        def body(r, run=run, batch=batch, pieces=pieces):
            learner = run.learners[r]
            return pieces(learner.algorithm, learner.nets, part_of(batch, r, 3), learner.reduce)

        parts = agreed(together(run.group, body))
        assert [len(x) for x in (whole, *parts)] == [12] * 4
        for number, everything in enumerate(whole):
            assert sorted(everything) == sorted(x for part in parts for x in part[number])
            for part in parts:
                own = set(part[number])
                assert part[number] == [x for x in everything if x in own], "in the same order"


def test_the_limit_of_the_divergence_is_judged_on_all_rows():
    """A rank that stops on its own would leave the others waiting."""
    stopped = set()
    for limit in (1e-4, 3e-3, 1e-2, 3e-2):
        config = dataclasses.replace(SCALED, lr=0.02, target_kl=limit, epochs=4, minibatches=3)
        run = Run(2, config, NETS["split"])
        _, parts = run.step(run.batch())
        agreed(parts)
        assert [x.updates for x in run.learners] == [run.whole.learner.updates] * 2
        stopped.add(run.whole.learner.updates)
    assert len(stopped) > 1 and max(stopped) < 12, stopped


@pytest.mark.parametrize("name", ["split", "gru"])
def test_what_is_not_finite_on_one_rank_is_skipped_and_counted_by_all(name):
    config = dataclasses.replace(SCALED, epochs=2, minibatches=3)
    run = Run(3, config, NETS[name])
    batch = run.batch()
    row = int(batch.live[:, 5].nonzero()[0, 0])
    batch.logp[row, 5] = math.nan  # a lane of the last rank
    report, parts = run.step(batch)
    for found in agreed(parts):
        assert all(math.isfinite(x) for x in found.metrics.values())
        assert found.metrics["minibatches"] == report.metrics["minibatches"] == 4
    assert run.whole.learner.skipped == 2
    run.check()
    agreed(run.step(run.batch())[1])  # and on
    run.check()


def test_three_in_a_row_end_the_run_on_every_rank():
    run = Run(2, dataclasses.replace(SCALED, epochs=3, minibatches=1), NETS["split"])
    batch = run.batch()
    row = int(batch.live[:, 5].nonzero()[0, 0])
    batch.logp[row, 5] = math.nan
    before = run.learners[0].flat["all"].data.clone()
    errors = run.step_parts(batch)
    assert all(isinstance(error, NumericError) and "3 times in a row" in str(error) for error in errors), errors
    assert all(len(error.skips) == 3 for error in errors)
    assert all(torch.equal(learner.flat["all"].data, before) for learner in run.learners)


def test_a_rank_without_a_live_row_joins_with_weight_0():
    run = Run(2, dataclasses.replace(SCALED, minibatches=4), NETS["split"])
    batch = run.batch()
    batch.live[:, 3:] = False
    _, parts = run.step(batch)
    agreed(parts)
    assert run.whole.learner.updates == 8
    run.check()


def test_no_live_row_on_any_rank_is_an_update_without_a_gradient():
    run = Run(2, dataclasses.replace(SCALED, minibatches=4), NETS["split"])
    batch = run.batch()
    batch.live.fill_(False)
    before = run.learners[0].flat["all"].data.clone()
    _, parts = run.step(batch)
    agreed(parts)
    run.check()
    assert torch.equal(run.learners[0].flat["all"].data, before)
