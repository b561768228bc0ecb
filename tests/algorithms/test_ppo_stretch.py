"""PPO on unrolls in which each lane has its own number of steps (VER): weights, advantages, pieces, ranks."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from support_lanes import NETS, SMALL, ScriptedLanes, build, frozen, shaken
from support_ranks import agreed, ranks, together

from rookery.algorithms.ppo import PPO, experience_weight
from rookery.core import tree
from rookery.core.reduce import ALONE
from rookery.core.unroll import Unroll
from rookery.ops.shuffle import own_pieces, without_dead
from rookery.roles.learner import Learner

T = SMALL.unroll
LONG = dataclasses.replace(SMALL, stretch=4, normalize_advantage=False)
COUNTS = (21, 2, 9, 0)  # rows of the four lanes


def ragged(rig, counts=COUNTS) -> Unroll:
    """The rows of a long unroll, of which each lane keeps its first ones."""
    whole = frozen(rig.buffers[0])
    rig.actors[0].plan = dataclasses.replace(rig.actors[0].plan, steps=0)
    rig.actors[0].unroll(whole, 0)
    for lane, rows in enumerate(counts):
        whole.live[rows:, lane] = whole.terminated[rows:, lane] = whole.truncated[rows:, lane] = False
        whole.reward[rows:, lane] = 0.0
        for leaf in whole.obs.values():
            leaf[rows + 1 :, lane] = leaf[rows, lane]
    return tree.map_fields(whole, torch.from_numpy, skip=("replayed",))


def rows_of(x: torch.Tensor, lanes: int = 4) -> torch.Tensor:
    """[T, B] of what was cut into pieces."""
    return x.view(-1, lanes) if x.dim() == 1 else x.unflatten(1, (-1, lanes)).transpose(0, 1).flatten(0, 1)


def test_weights_of_the_specification():
    """IS1 and P34."""
    live = (torch.arange(8).unsqueeze(1) < torch.tensor([7, 5, 3])).float()
    weight = experience_weight(live, 4)
    torch.testing.assert_close(weight[0], torch.tensor([5 / 7, 1.0, 1.0]))
    assert torch.equal(weight != 0, live != 0)
    assert torch.equal(experience_weight(torch.ones(4, 3), 4), torch.ones(4, 3))


def test_no_environment_weighs_more_than_its_share_in_the_gradient():
    """Against brute force: the gradient is the sum over environments, each at most T + 1 mean steps of its own."""
    rig = build(config=dataclasses.replace(LONG, epochs=1, minibatches=1))
    batch = ragged(rig)
    prepared = rig.prepared(batch)
    output = rig.algorithm.losses(rig.learner.nets, prepared)
    live = batch.live.sum(0)
    assert output.weight == live.sum(), "ranks are weighed by their live rows"
    single, total = [], torch.zeros(())
    for lane in range(4):
        mine = torch.arange(len(prepared.logp)) % 4 == lane
        alone = tree.map_fields(prepared, lambda x: x[mine], skip=("unrolls",))  # noqa: B023
        alone = tree.replace(alone, weight=(alone.weight != 0).float())
        single.append(rig.algorithm.losses(rig.learner.nets, alone).losses["all"])
        total = total + single[-1] * min(int(live[lane]), T + 1) / live.sum()
    torch.testing.assert_close(output.losses["all"], total)


@pytest.mark.parametrize("net", ["split", "shared", "lstm", "gru2"])
def test_advantages_are_those_of_each_environment_by_itself(net):
    rig = build(config=LONG, net=NETS[net])
    batch = ragged(rig)
    out = rig.prepared(batch)
    advantage, target, weight = (rows_of(x) for x in (out.advantage, out.target, out.weight))
    assert len(advantage) == 21, "rows that nobody used are not there; whole chunks of 3"
    for lane, rows in enumerate(COUNTS):
        if rows == 0:
            assert not weight[:, lane].any()
            continue
        config = dataclasses.replace(LONG, stretch=1, unroll=rows, chunk=1, minibatches=1)
        alone = build(lambda: ScriptedLanes(count=1), config=config, net=NETS[net])
        shapes = {"obs": rows + 1, "state0": 0}
        mine = {f: getattr(batch, f) for f in ("action", "reward", "terminated", "truncated", "live", "logp")}
        cut = {f: x[:rows, lane : lane + 1] for f, x in mine.items()}
        extras = {name: x[:rows, lane : lane + 1] for name, x in batch.extras.items()}
        obs = tree.map(lambda x: x[: shapes["obs"], lane : lane + 1], batch.obs)  # noqa: B023
        state0 = _states(alone, rig, obs, cut["live"], rows, batch, lane)
        own = Unroll(obs=obs, state0=state0, version=batch.version[:1], lane=batch.lane[:1], extras=extras, **cut)
        wanted = alone.algorithm.prepare(rig.learner.nets, own, ALONE)
        live = cut["live"][:, 0]
        for found, expected in ((advantage, wanted.advantage), (target, wanted.target)):
            torch.testing.assert_close(found[:rows, lane][live], rows_of(expected, 1)[:, 0][live], atol=1e-5, rtol=1e-5)


def _states(alone, rig, obs, live, rows, batch, lane):
    """States before every row: those of the actor, run again row by row."""
    if not batch.state0:
        return {}
    state = rig.algorithm.initial_state(rig.learner.nets, 1)
    states = []
    with torch.no_grad():
        for row in range(rows):
            states.append(state)
            now = tree.map(lambda x: x[row], obs)  # noqa: B023
            state = rig.algorithm.act(rig.learner.nets, now, state, None).state
            if not live[row]:
                state = tree.map(torch.zeros_like, state)
    return tree.map(lambda *each: torch.stack(each), *states)


@pytest.mark.parametrize("net", ["split", "shared", "lstm"])
def test_lanes_in_step_give_the_bits_of_plain_ppo(net):
    def params(stretch):
        config = dataclasses.replace(SMALL, stretch=stretch, scale_reward=True)
        rig = build(config=config, net=dataclasses.replace(NETS[net], normalize_obs=True))
        for _ in range(3):
            rig.update()
        return rig.learner.flat["all"].data, rig.learner.nets.state_dict(), rig.reports

    (plain, state, told), (long, other, again) = params(1), params(4)
    assert torch.equal(plain, long) and all(torch.equal(x, other[name]) for name, x in state.items())
    assert [report.steps for report in told] == [report.steps for report in again]


@pytest.mark.parametrize("net", ["split", "lstm"])
def test_two_ranks_equal_one_whatever_their_lanes_have_given(net):
    """The lane with most rows is of one rank only, and most pieces of the other are dead."""
    config = dataclasses.replace(LONG, normalize_advantage=True, lr=1e-3)
    rig = build(config=config, net=NETS[net])
    batch = ragged(rig)
    group = ranks(2)
    algorithms = [PPO(config, NETS[net], ScriptedLanes().spec, 4) for _ in group]
    learners = [Learner(each, 7, reduce=rank) for each, rank in zip(algorithms, group)]
    for learner in learners:
        shaken(learner, 0.3)

    def body(rank):
        own = slice(2 * rank, 2 * rank + 2)
        part = tree.map_fields(batch, lambda x: x[:, own].clone(), skip=("version", "lane"))
        learners[rank].step(tree.replace(part, version=batch.version[own], lane=batch.lane[own]), 0.0)

    rig.learner.step(batch, 0.0)
    agreed(together(group, body))
    first, second = (learner.flat["all"].data for learner in learners)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, rig.learner.flat["all"].data, rtol=0, atol=1e-6)


def test_dead_pieces_are_left_out_and_no_live_one_is():
    order = torch.randperm(24, generator=torch.Generator().manual_seed(1))
    own, sizes = own_pieces(order, 12, 6, 0, 1)
    alive = torch.arange(24) % 3 == 0
    kept, counts = without_dead(own, sizes, alive)
    start = 0
    for part, count in zip(own.split(sizes), counts):
        mine, start = kept[start : start + count], start + count
        live = [int(x) for x in part if alive[x]]
        assert mine.tolist() == (live or [int(part[0])])
    assert len(kept) == sum(counts) < len(own)
    assert without_dead(own, sizes, torch.ones(24, dtype=torch.bool))[0] is own


def test_learning_does_not_see_what_is_behind_the_last_rows():
    def trained(junk):
        rig = build(config=LONG, net=NETS["lstm"])
        batch = ragged(rig)
        for lane, rows in enumerate(COUNTS):
            batch.action[rows + 1 :, lane] = 1
            batch.logp[rows + 1 :, lane] = junk
            batch.extras["value"][rows + 1 :, lane] = junk
        told = rig.learner.step(batch, 0.0)
        assert all(np.isfinite(x) for x in told.metrics.values())
        return rig.learner.flat["all"].data

    assert torch.equal(trained(0.0), trained(5.0))
