"""Unrolls that are cut short: dead rows at the end, a bootstrap at the cut, and an episode that goes on (P24)."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from support_lanes import NETS, SMALL, build, frozen

from rookery.core import tree
from rookery.core.reduce import ALONE
from rookery.core.unroll import live_steps
from rookery.roles.actor import CUT

T = SMALL.unroll


def cut_at(rows: int):
    return lambda row: CUT if row == rows else None


def poisoned(out):
    """Junk of an earlier unroll, in every array."""
    for leaf in tree.leaves(vars(out)):
        if isinstance(leaf, np.ndarray):
            leaf.fill(np.nan if leaf.dtype.kind == "f" else 1)


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
@pytest.mark.parametrize("net", ["split", "shared", "lstm"])
def test_a_cut_unroll_has_the_rows_before_it_and_the_next_one_goes_on_behind_them(net, rows):
    whole, short = build(net=NETS[net]), build(net=NETS[net])
    whole.actors[0].unroll(whole.buffers[0], 0)
    first, out = whole.buffers[0], short.buffers[0]
    poisoned(out)
    report = short.actors[0].unroll(out, 0, cut_at(rows))
    for name in ("action", "reward", "terminated", "truncated", "live", "logp"):
        np.testing.assert_array_equal(getattr(out, name)[:rows], getattr(first, name)[:rows], err_msg=name)
    np.testing.assert_array_equal(out.obs["obs"][: rows + 1], first.obs["obs"][: rows + 1])
    assert not out.live[rows:].any() and (out.obs["obs"][rows:] == first.obs["obs"][rows]).all()
    assert report.steps == out.live.sum() == live_steps(out, rows)
    assert all(np.isfinite(leaf).all() for leaf in tree.leaves(vars(out)) if isinstance(leaf, np.ndarray))
    cut = frozen(out)
    later = short.actors[0].unroll(out, 0)
    np.testing.assert_array_equal(out.obs["obs"][0], cut.obs["obs"][rows])
    np.testing.assert_array_equal(out.live[0], first.live[rows])
    taken = short.actors[0].lanes.taken
    assert report.steps + later.steps == taken, "no step is counted twice, and none is missing"
    ended = [(e.lane, e.total, e.length) for r in (report, later) for e in r.episodes]
    assert sorted(ended) == sorted(short.actors[0].lanes.finished), "an episode is whole, whatever cuts are in it"


@pytest.mark.parametrize("rows", [1, 3, 4])
@pytest.mark.parametrize("net", list(NETS))
def test_advantages_of_a_cut_unroll_are_those_of_the_rows_before_the_cut(net, rows):
    """As of an unroll that is as long as that: the cut bootstraps, and does not end the episode."""
    rig = build(net=NETS[net])
    rig.actors[0].unroll(rig.buffers[0], 0, cut_at(rows))
    short = dataclasses.replace(SMALL, unroll=rows, chunk=1)
    other = build(net=NETS[net], config=short)
    other.actors[0].unroll(other.buffers[0], 0)

    def prepared(rig):
        batch = tree.map_fields(frozen(rig.buffers[0]), torch.from_numpy, skip=("replayed",))
        rig.algorithm.config = dataclasses.replace(rig.algorithm.config, normalize_advantage=False)
        out = rig.algorithm.prepare(rig.learner.nets, batch, ALONE)
        if out.advantage.dim() == 1:
            return out.advantage.view(-1, 4), out.target.view(-1, 4), out.weight.view(-1, 4)
        return tuple(
            x.unflatten(1, (-1, 4)).transpose(0, 1).flatten(0, 1) for x in (out.advantage, out.target, out.weight)
        )

    (advantage, target, weight), (wanted, wanted_target, live) = prepared(rig), prepared(other)
    assert (weight[rows:] == 0).all() and torch.equal(weight[:rows], live)
    torch.testing.assert_close(advantage[:rows] * live, wanted * live, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(target[:rows] * live, wanted_target * live, atol=1e-5, rtol=1e-5)


def test_a_cut_in_the_first_row_is_none():
    rig = build()
    rig.actors[0].unroll(rig.buffers[0], 0, lambda row: CUT if row == 0 else None)
    assert rig.buffers[0].live[-1].any()


@pytest.mark.parametrize("net", ["split", "lstm"])
def test_learning_from_a_cut_unroll_stays_finite_and_ignores_what_is_behind_the_cut(net):
    rig = build(net=NETS[net])
    poisoned(rig.buffers[0])
    report = rig.actors[0].unroll(rig.buffers[0], 0, cut_at(4))
    batch = tree.map_fields(frozen(rig.buffers[0]), torch.from_numpy, skip=("replayed",))
    told = rig.learner.step(batch, 0.0)
    assert report.steps and rig.learner.finite() and all(np.isfinite(x) for x in told.metrics.values())
