"""PPO's batches: normalised as a whole, cut into whole chunks, with dead rows that have no voice."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from support_lanes import NETS, SMALL, ScriptedLanes, build

from rookery.algorithms.ppo import PPO, PPOConfig
from rookery.core.config import NetConfig
from rookery.core.errors import UsageError
from rookery.core.reduce import ALONE

T, B = SMALL.unroll, 4


def test_advantages_are_normalised_over_the_whole_batch_and_targets_are_not():
    """P18."""
    plain, normal = (
        build(config=dataclasses.replace(SMALL, normalize_advantage=flag), actors=2) for flag in (False, True)
    )
    for _ in range(3):
        a, b = plain.prepared(plain.collect()), normal.prepared(normal.collect())
        live = a.weight > 0
        assert 0 < live.sum() < live.numel()
        assert torch.equal(a.target, b.target) and torch.equal(a.value, b.value)
        advantage = a.advantage[live].double()
        expected = (advantage - advantage.mean()) / advantage.std(unbiased=False)
        torch.testing.assert_close(b.advantage[live].double(), expected, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(b.advantage[live].double(), advantage)


def test_a_batch_of_one_step_is_finite():
    """P18: the deviation of one advantage is 0."""
    config = PPOConfig(unroll=1, minibatches=1, epochs=1)
    rig = build(lambda: ScriptedLanes(count=1, lengths=((1,),)), config=config)
    for _ in range(4):  # every second row is dead: a batch in which nothing is live
        batch = rig.collect()
        report = rig.learner.step(batch, 0.0)
        assert all(math.isfinite(x) for x in report.metrics.values())
        assert all(torch.isfinite(p).all() for p in rig.learner.nets.parameters())
    assert rig.learner.updates == 4 and rig.learner.skipped == 0


def test_a_batch_without_a_live_row_has_no_gradient():
    rig = build(lambda: ScriptedLanes(count=1, lengths=((1,),)), config=PPOConfig(unroll=1, minibatches=1, epochs=1))
    rig.collect()
    batch = rig.collect()
    assert not batch.live.any()
    output = rig.learner.gradients(rig.prepared(batch))
    assert float(output.losses["all"].detach()) == 0 and not rig.learner.flat["all"].grad.any()


@pytest.mark.parametrize("name", ["split", "shared", "lstm2"])
def test_what_a_dead_row_contains_changes_nothing(name):
    """P24: its action, log-probability and reward reach neither loss nor gradient nor statistics."""
    config = dataclasses.replace(SMALL, scale_reward=True)
    net = dataclasses.replace(NETS[name], normalize_obs=True)
    rig = build(config=config, net=net)
    for _ in range(3):
        rig.update()
    batch = rig.collect()
    dead = ~batch.live
    assert dead.sum() >= 4
    spoiled = dataclasses.replace(
        batch,
        action=torch.where(dead, (batch.action + 1) % 3, batch.action),
        logp=torch.where(dead, batch.logp - 3.0, batch.logp),
        reward=torch.where(dead, 1e6, batch.reward),
    )
    results = []
    start = {name: value.clone() for name, value in rig.learner.nets.state_dict().items()}
    for each in (batch, spoiled):
        rig.learner.nets.load_state_dict(start)
        prepared = rig.prepared(each)
        output = rig.learner.gradients(prepared)
        rig.algorithm.observe(rig.learner.nets, each, ALONE)
        buffers = [b.clone() for b in rig.learner.nets.buffers()]
        results.append([rig.learner.flat["all"].grad.clone(), output.losses["all"].detach(), *buffers])
        results[-1] += [output.metrics[key] for key in sorted(output.metrics)]
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


# Minibatches


@pytest.mark.parametrize("actors", [1, 2])
def test_feed_forward_minibatches_hold_each_step_once_per_epoch(actors):
    config = dataclasses.replace(SMALL, epochs=3, minibatches=4)
    rig = build(config=config, actors=actors)
    batch = rig.collect()
    lanes = B * actors
    number = torch.arange(T * lanes, dtype=torch.float32).view(T, lanes)
    batch.obs["obs"][:-1, :, 0] = number  # each row says its place
    marked = dataclasses.replace(batch, logp=number.clone(), action=number.long())
    pieces = list(rig.algorithm.minibatches(rig.prepared(marked), torch.Generator().manual_seed(1), ALONE))
    assert len(pieces) == 12
    orders = []
    for epoch in range(3):
        seen = torch.cat([piece.logp for piece in pieces[4 * epoch : 4 * epoch + 4]])
        assert sorted(seen.tolist()) == number.flatten().tolist()
        orders.append(seen.tolist())
    assert orders[0] != orders[1] != orders[2] != orders[0]
    whole = rig.prepared(marked)
    for piece in pieces:
        assert len(piece.logp) == T * lanes // 4
        at = piece.logp.long()
        assert torch.equal(piece.obs["obs"][:, 0], piece.logp) and torch.equal(piece.action, at)
        for field in ("advantage", "target", "value", "weight"):  # and brings all that belongs to it
            assert torch.equal(getattr(piece, field), getattr(whole, field)[at])


@pytest.mark.parametrize("chunk", [1, 2, 3, 6])
@pytest.mark.parametrize("name", ["gru2", "lstm2"])
def test_recurrent_minibatches_are_whole_chunks_with_their_own_states(name, chunk):
    """P26, P28: state = 100·layer + 10·chunk + lane, through several actors, two layers and the shuffle."""
    config = dataclasses.replace(SMALL, chunk=chunk, epochs=2, minibatches=4)
    rig = build(config=config, net=NETS[name], actors=2)
    batch = rig.collect()
    lanes, chunks = 2 * B, T // chunk
    t, lane = torch.meshgrid(torch.arange(T), torch.arange(lanes), indexing="ij")
    place = (100 * t + lane).float()
    c, b, layer, unit = torch.meshgrid(*(torch.arange(n) for n in (chunks, lanes, 2, 5)), indexing="ij")
    code = (100 * layer + 10 * c + b + unit / 10).float()
    state0 = {leaf: code + (1000 if leaf == "c" else 0) for leaf in batch.state0}
    batch.obs["obs"][:-1, :, 0] = place
    marked = dataclasses.replace(batch, logp=place, state0=state0)
    prepared = rig.algorithm.prepare(rig.learner.nets, marked, ALONE)
    pieces = list(rig.algorithm.minibatches(prepared, torch.Generator().manual_seed(1), ALONE))
    assert len(pieces) == 8
    for epoch in (pieces[:4], pieces[4:]):
        assert sorted(torch.cat([p.logp.flatten() for p in epoch]).tolist()) == sorted(place.flatten().tolist())
    for piece in pieces:
        assert piece.logp.shape == (chunk, chunks * lanes // 4)
        assert torch.equal(piece.logp, piece.obs["obs"][..., 0])
        row, who = piece.logp[0].long() // 100, piece.logp[0].long() % 100
        assert (row % chunk == 0).all(), "a sequence begins where a state was stored"
        assert torch.equal(piece.logp, piece.logp[0] + 100 * torch.arange(chunk).unsqueeze(1))
        for leaf, stored in piece.state.items():
            assert torch.equal(stored, state0[leaf][row // chunk, who])
        # The state is zeroed before the row behind a dead one, and only there; chunk starts were zeroed when acting.
        rows = row + torch.arange(chunk).unsqueeze(1)
        assert torch.equal(piece.weight, batch.live[rows, who].float())
        dead_before = ~batch.live[rows - 1, who]
        dead_before[0] = False
        assert torch.equal(piece.reset, dead_before)


def test_the_shuffle_is_a_function_of_the_seed_and_the_version():
    one, two = build(seed=3), build(seed=3)
    for rig in (one, two):
        rig.update()
        rig.update()
    assert torch.equal(one.learner.flat["all"].data, two.learner.flat["all"].data)
    other = build(seed=3)
    other.learner.version = 5
    other.update()
    assert not torch.equal(build_once(seed=3).learner.flat["all"].data, other.learner.flat["all"].data)


def build_once(seed: int):
    rig = build(seed=seed)
    rig.update()
    return rig


@pytest.mark.parametrize(
    ("unroll", "chunk", "minibatches", "lanes", "core", "words"),
    [
        (10, 16, 3, 8, "none", ["80 steps", "3 equal minibatches", "algo.minibatches", "(8)"]),
        (32, 16, 5, 8, "lstm", ["16 chunks", "5 equal minibatches"]),
        (32, 16, 32, 8, "gru", ["16 chunks", "32 equal minibatches"]),
        (20, 16, 1, 8, "lstm", ["algo.unroll 20", "algo.chunk 16"]),
    ],
)
def test_an_impossible_split_is_refused_with_its_numbers(unroll, chunk, minibatches, lanes, core, words):
    config = PPOConfig(unroll=unroll, chunk=chunk, minibatches=minibatches)
    with pytest.raises(UsageError) as caught:
        PPO(config, NetConfig(core=core), ScriptedLanes().spec, lanes)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("field", ["minibatches", "unroll", "chunk", "epochs"])
def test_a_count_of_zero_is_refused_in_words(field):
    config = dataclasses.replace(SMALL, **{field: 0})
    with pytest.raises(UsageError, match=field):
        PPO(config, NetConfig(core="gru"), ScriptedLanes().spec, 4)


def test_chunk_is_of_no_concern_without_recurrence():
    algorithm = PPO(PPOConfig(unroll=10, chunk=16, minibatches=2), NetConfig(), ScriptedLanes().spec, 4)
    assert algorithm.plan().chunk == algorithm.plan().unroll == 10
