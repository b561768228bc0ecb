"""Asynchronous PPO's updates: pieces of a batch, the target network's copies, the adaptive divergence, settings."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support_actor_critic import ACTIONS, CORES, LANES, ROWS, learner_of, part_of, rig, spec_of
from support_lanes import ScriptedLanes, frozen
from support_ranks import agreed, ranks, together

from rookery.algorithms.appo import APPO, APPOConfig, CircularConfig
from rookery.core import tree
from rookery.core.config import NetConfig, QueueConfig
from rookery.core.errors import UsageError
from rookery.core.reduce import ALONE
from rookery.core.types import Circular, Mix, Queue
from rookery.core.unroll import Unroll
from rookery.nets.target import KLCoefficient

SMALL = APPOConfig(unroll=ROWS, chunk=3, lr=1e-2, lr_end=1e-2)
CIRCULAR = CircularConfig(batches=4, uses=2)


def pieces_of(set_up, batch: Unroll) -> list:
    return list(set_up.algorithm.minibatches(set_up.prepared(batch), torch.Generator().manual_seed(1), ALONE))


def numbered(batch: Unroll) -> Unroll:
    """Every row says its place, 100·t + lane, in its observation."""
    rows, lanes = batch.reward.shape
    place = 100.0 * torch.arange(rows).view(-1, 1) + torch.arange(lanes)
    obs = batch.obs["obs"].clone()
    obs[:-1, :, 0] = place
    return dataclasses.replace(batch, obs={"obs": obs})


# Minibatches


@pytest.mark.parametrize(("minibatches", "sizes"), [(1, {24}), (4, {6}), (5, {4, 5}), (24, {1})])
def test_each_step_is_once_in_every_pass(minibatches, sizes):
    set_up = rig(APPO, dataclasses.replace(SMALL, epochs=3, minibatches=minibatches))
    batch = numbered(frozen(set_up.collect()))
    pieces, whole = pieces_of(set_up, batch), set_up.prepared(batch)
    assert len(pieces) == 3 * minibatches
    order = {place: i for i, place in enumerate(whole.obs["obs"][:, 0].tolist())}
    passes = []
    for epoch in range(3):
        part = pieces[epoch * minibatches : (epoch + 1) * minibatches]
        passes.append([place for piece in part for place in piece.obs["obs"][:, 0].tolist()])
        assert sorted(passes[-1]) == sorted(order)
    assert passes[0] != passes[1] != passes[2]
    assert {len(piece.logp) for piece in pieces} == sizes, "parts of equal size, or uneven by one"
    for piece in pieces:
        at = [order[place] for place in piece.obs["obs"][:, 0].tolist()]
        for field in ("action", "logp", "advantage", "value_target", "weight"):
            assert torch.equal(getattr(piece, field), getattr(whole, field)[at]), field


@pytest.mark.parametrize("minibatches", [1, 3, 5])
@pytest.mark.parametrize("core", ["gru", "lstm"])
def test_with_a_core_pieces_are_whole_chunks_with_their_own_states(core, minibatches):
    """P28: 12 chunks of 2 rows, each from the state that was stored for it; uneven minibatches too."""
    config = dataclasses.replace(SMALL, chunk=2, epochs=2, minibatches=minibatches, kl=1.0)
    set_up = rig(APPO, config, net=CORES[core])
    set_up.collect()
    batch = numbered(frozen(set_up.collect()))
    pieces = pieces_of(set_up, batch)
    assert len(pieces) == 2 * minibatches
    for epoch in (pieces[:minibatches], pieces[minibatches:]):
        seen = sorted(place for piece in epoch for place in piece.obs["obs"][..., 0].flatten().tolist())
        assert seen == sorted(batch.obs["obs"][:-1, :, 0].flatten().tolist())
    for piece in pieces:
        place = piece.obs["obs"][..., 0]
        row, lane = place[0].long() // 100, place[0].long() % 100
        assert (row % 2 == 0).all() and torch.equal(place[1], place[0] + 100), "in the order of time"
        rows = row + torch.arange(2).unsqueeze(1)
        assert torch.equal(piece.action, batch.action[rows, lane])
        assert torch.equal(piece.weight, batch.live[rows, lane].float())
        assert torch.equal(piece.reset, torch.stack([torch.zeros_like(lane).bool(), ~batch.live[row, lane]]))
        for leaf, state in piece.state.items():
            assert torch.equal(state, batch.state0[leaf][row // 2, lane])


@pytest.mark.parametrize("core", ["none", "gru"])
def test_batches_with_replayed_unrolls_need_not_be_cut_evenly(core):
    """P50: their number changes from batch to batch; all of them are learnt from, and counted in no statistics."""
    config = dataclasses.replace(
        SMALL, epochs=2, minibatches=5, queue=QueueConfig(replayed=0.75), scale_reward=True, kl=1.0
    )
    net = dataclasses.replace(CORES[core], normalize_obs=True)
    set_up = rig(APPO, config, net=net)
    old = frozen(set_up.collect())
    set_up.learner.step(old, 0.0)
    counted = int(old.live.sum())
    for extra in (1, 3):
        new = frozen(set_up.collect())
        some = tree.map_fields(old, lambda x: x[:, :extra] if x.dim() > 1 else x[:extra])  # noqa: B023
        both = tree.map_fields(new, lambda *xs: torch.cat(xs, 1 if xs[0].dim() > 1 else 0), some)
        both = tree.replace(both, replayed=torch.arange(LANES + extra) >= LANES)
        pieces = pieces_of(set_up, both)
        assert sum(int(piece.weight.numel()) for piece in pieces) == 2 * ROWS * (LANES + extra)
        set_up.learner.nets["reward_scaler"].running.count.fill_(counted)  # `pieces_of` has counted it once
        report = set_up.learner.step(both, 0.0)
        assert report.metrics["minibatches"] == 10
        counted += int(new.live.sum())
        nets = set_up.learner.nets
        assert int(nets["normalizer"].leaves[0].running.count) == counted == int(nets["reward_scaler"].running.count)


def test_a_batch_that_is_used_again_is_learnt_from_and_counted_once():
    """As a circular buffer may hand it out: every unroll of it was trained on before."""
    config = dataclasses.replace(SMALL, circular=CIRCULAR, scale_reward=True)
    set_up = rig(APPO, config, net=dataclasses.replace(CORES["none"], normalize_obs=True))
    batch, nets = frozen(set_up.collect()), set_up.learner.nets
    set_up.learner.step(batch, 0.0)
    statistics = {name: x.clone() for name, x in nets.named_buffers()}
    before = set_up.learner.flat["all"].data.clone()
    report = set_up.learner.step(dataclasses.replace(batch, replayed=torch.ones(LANES, dtype=torch.bool)), 0.0)
    assert not torch.equal(set_up.learner.flat["all"].data, before) and report.metrics["grad_norm"] > 0
    assert all(torch.equal(x, statistics[name]) for name, x in nets.named_buffers())


# The target


def policy_of(nets) -> list[torch.Tensor]:
    return [p.detach().clone() for name in ("body", "policy") for p in nets[name].parameters()]


def target_of(nets) -> list[torch.Tensor]:
    return [p.detach().clone() for p in nets["target"].parameters()]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) > 0 and all(torch.equal(x, y) for x, y in zip(a, b))


@pytest.mark.parametrize("core", ["none", "lstm"])
@pytest.mark.parametrize("circular", [CircularConfig(), CIRCULAR], ids=["queue", "circular"])
def test_the_target_is_copied_every_period_and_never_in_between(core, circular):
    """P48: counted in updates, whatever the number of minibatches; before the first copy it has the start weights."""
    config = dataclasses.replace(SMALL, target_period=3, epochs=2, minibatches=2, circular=circular)
    set_up = rig(APPO, config, net=CORES[core], shake=0.0)
    nets = set_up.learner.nets
    copied = policy_of(nets)
    assert same(target_of(nets), copied)
    for version in range(1, 10):
        set_up.update()
        assert set_up.learner.version == version and set_up.learner.updates == 4 * version
        assert not same(policy_of(nets), copied)
        if version % 3 == 0:
            copied = policy_of(nets)
        assert same(target_of(nets), copied), version


def test_a_target_that_follows_at_once_has_no_network():
    """It is the policy at the start of the update, also with a circular buffer."""
    for changes in ({}, {"circular": CIRCULAR}, {"correction": "gae", "target_period": 5}):
        algorithm = APPO(dataclasses.replace(SMALL, **changes), NetConfig(), spec_of("discrete"), LANES)
        assert "target" not in algorithm.nets(), changes


@pytest.mark.parametrize("core", ["none", "gru"])
def test_the_target_is_neither_published_nor_trained_but_saved(core):
    slow, fast = (
        rig(APPO, dataclasses.replace(SMALL, target_period=period), net=CORES[core], shake=0.0).learner
        for period in (4, 1)
    )
    assert slow.published.size == fast.published.size and torch.equal(slow.read(), fast.read())
    assert slow.flat["all"].grad.numel() == fast.flat["all"].grad.numel()
    own = {id(p) for p in slow.flat["all"].parameters}
    assert not any(id(p) in own or p.requires_grad for p in slow.nets["target"].parameters())
    before = slow.read()
    with torch.no_grad():
        for parameter in slow.nets["target"].parameters():
            parameter.add_(1.0)
    assert torch.equal(slow.read(), before)
    tensors, _ = slow.state()
    saved = [tensors[f"nets/target.{name}"] for name, _ in slow.nets["target"].named_parameters()]
    assert same(saved, target_of(slow.nets)) and "nets/kl.value" in tensors


def test_the_target_decides_about_advantages_and_the_policy_does_not():
    """V-trace is with respect to the target: other policy weights leave advantages, other target weights do not."""
    set_up = rig(APPO, dataclasses.replace(SMALL, target_period=4, rho_clip=10.0, c_clip=10.0))
    nets, batch = set_up.learner.nets, frozen(set_up.collect())

    def prepared(moved) -> torch.Tensor:
        with torch.no_grad():
            parameters = [p for module in moved for p in module.parameters()]
            for p in parameters:
                p.add_(0.2)
            found = set_up.prepared(batch).value_target
            for p in parameters:
                p.sub_(0.2)
        return found

    start = prepared([])
    torch.testing.assert_close(prepared([nets["body"], nets["policy"]]), start, rtol=1e-4, atol=1e-4)
    target = prepared([nets["target"]["body"]])
    assert (target - start).abs().max() > 0.1


# The weight of the divergence


@pytest.mark.parametrize(("kl_target", "factor"), [(1e-9, 1.5), (1e9, 0.5), (None, 1.0)])
@pytest.mark.parametrize("action", ACTIONS)
def test_the_weight_of_the_divergence_adapts_after_the_update(action, kl_target, factor):
    config = dataclasses.replace(SMALL, kl=0.25, kl_target=kl_target, epochs=2, minibatches=2, target_period=2)
    set_up = rig(APPO, config, lambda: ScriptedLanes(action=ACTIONS[action]))
    weight = set_up.learner.nets["kl"]
    for used in (0.25, 0.25 * factor):
        report = set_up.update()
        assert report.metrics["kl_coef"] == pytest.approx(used), "the one that was used, not the next one"
        assert report.metrics["kl"] > 0
    assert float(weight.value) == pytest.approx(0.25 * factor**2)


def test_near_its_target_the_weight_stays():
    config = dataclasses.replace(SMALL, kl=0.25, kl_target=1.0, target_period=100)
    set_up = rig(APPO, config)  # shaken: policy and target differ from the start
    kl = set_up.algorithm.losses(set_up.learner.nets, set_up.prepared(frozen(set_up.collect()))).metrics["kl"].item()
    set_up = rig(APPO, dataclasses.replace(config, kl_target=kl / 1.8))
    set_up.update()
    assert float(set_up.learner.nets["kl"].value) == 0.25
    set_up = rig(APPO, dataclasses.replace(config, kl_target=kl / 2.2))
    set_up.update()
    assert float(set_up.learner.nets["kl"].value) == 0.375


def test_a_batch_without_a_live_row_leaves_the_weight_alone():
    set_up = rig(APPO, dataclasses.replace(SMALL, kl=0.25, kl_target=0.01))
    batch = frozen(set_up.collect())
    set_up.learner.step(dataclasses.replace(batch, live=torch.zeros_like(batch.live)), 0.0)
    assert float(set_up.learner.nets["kl"].value) == 0.25


def test_the_divergence_is_from_the_policy_before_the_update_in_every_pass():
    """A Gaussian's deviation is a parameter: its copy must not move with it."""
    config = dataclasses.replace(SMALL, kl=1.0, lr=0.0, lr_end=0.0, epochs=2)
    set_up = rig(APPO, config, lambda: ScriptedLanes(action=ACTIONS["box"]))
    nets = set_up.learner.nets
    pieces = set_up.algorithm.minibatches(set_up.prepared(frozen(set_up.collect())), torch.Generator(), ALONE)
    assert set_up.algorithm.losses(nets, next(pieces)).metrics["kl"] < 1e-6
    with torch.no_grad():
        nets["policy"].log_std.add_(0.5)
    second = set_up.algorithm.losses(nets, next(pieces)).metrics["kl"].item()
    per_axis = 0.5 + (torch.tensor(-1.0).exp().item() - 1) / 2  # KL of a deviation that is e^.5 times as large
    assert second == pytest.approx(2 * per_axis, rel=1e-4)


# Ranks


def told(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[float]]:
    """By the coefficient's identity, what it was told to adapt to."""
    found: dict[int, list[float]] = {}
    adapt = KLCoefficient.adapt

    def noted(self, kl, target):
        found.setdefault(id(self), []).append(kl)
        adapt(self, kl, target)

    monkeypatch.setattr(KLCoefficient, "adapt", noted)
    return found


@pytest.mark.parametrize(("core", "minibatches"), [("none", 2), ("none", 24), ("gru", 8)])
def test_ranks_with_parts_of_the_lanes_equal_one_rank_with_all(core, minibatches, monkeypatch):
    """P19 to P21: weights, target and the weight of the divergence; with 24 minibatches a rank has no row in most."""
    config = dataclasses.replace(
        SMALL, epochs=2, minibatches=minibatches, target_period=2, scale_reward=True, kl=0.5, kl_target=1e-4, lr=1e-3
    )
    found = told(monkeypatch)
    net = dataclasses.replace(CORES[core], normalize_obs=True)
    whole, group = rig(APPO, config, net=net), ranks(2)
    learners = [learner_of(APPO, config, net, ScriptedLanes().spec, 4, reduce=rank) for rank in group]
    for _ in range(3):
        batch = frozen(whole.collect())
        whole.learner.step(batch, 0.0)
        agreed(together(group, lambda r, batch=batch: learners[r].step(part_of(batch, r, 2), 0.0)))
    one, two, all_of_it = (found[id(each.nets["kl"])] for each in (*learners, whole.learner))
    assert len(one) >= 2 and one == two == pytest.approx(all_of_it, rel=1e-2, abs=1e-7)
    values = [each.nets["kl"].value for each in (*learners, whole.learner)]
    assert values[0] == values[1] == values[2] != 0.5
    assert torch.equal(learners[0].flat["all"].data, learners[1].flat["all"].data)
    torch.testing.assert_close(learners[0].flat["all"].data, whole.learner.flat["all"].data, rtol=0, atol=1e-5)
    for mine, theirs in zip(learners[0].nets["target"].parameters(), whole.learner.nets["target"].parameters()):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)


# Settings


def test_schedules_begin_and_end_where_they_say():
    """P30."""
    config = APPOConfig(lr=1e-3, lr_end=1e-5, clip=0.4, clip_end=0.1, entropy=0.02, entropy_end=0.0)
    algorithm = APPO(config, NetConfig(), spec_of("discrete"), 4)
    table = {0.0: (1e-3, 0.4, 0.02), 0.5: (5.05e-4, 0.25, 0.01), 1.0: (1e-5, 0.1, 0.0)}
    for progress, expected in table.items():
        lr = algorithm.schedule(progress)["all"]
        assert (lr, algorithm.clip, algorithm.entropy) == pytest.approx(expected, abs=1e-8)
    constant = APPO(APPOConfig(entropy=0.25, clip=0.5), NetConfig(), spec_of("discrete"), 4)
    assert constant.schedule(1.0) == {"all": 0.0} and (constant.clip, constant.entropy) == (0.5, 0.25)


def test_the_schedule_of_the_clip_reaches_the_loss():
    set_up = rig(APPO, dataclasses.replace(SMALL, target_period=50, clip=1e6, clip_end=0.0))
    piece = set_up.prepared(frozen(set_up.collect()))
    fractions = []
    for progress in (0.0, 1.0):
        set_up.algorithm.schedule(progress)
        fractions.append(set_up.algorithm.losses(set_up.learner.nets, piece).metrics["clip_fraction"].item())
    assert fractions == [0.0, 1.0]


def test_the_plan_says_how_unrolls_wait():
    def plan(core: str = "none", **changes):
        return APPO(dataclasses.replace(SMALL, **changes), CORES[core], spec_of("discrete"), 4).plan()

    queue = QueueConfig(lag=3, batch=5, ring=32, loaders=2, buffers=4)
    assert (plan().unroll, plan().chunk, plan().extras) == (6, 6, {}) and plan("gru").chunk == 3
    assert plan(queue=queue).table == Queue(3, 5, 2, 4)
    assert plan(queue=queue, circular=CIRCULAR).table == Circular(Queue(3, 5, 2, 4), 4, 2)
    assert plan(queue=dataclasses.replace(queue, replayed=1.5)).table == Mix(Queue(3, 5, 2, 4), 1.5, 32)


@pytest.mark.parametrize(
    ("core", "changes", "words"),
    [
        ("gru", {"unroll": 50, "chunk": 20}, ["algo.unroll 50", "algo.chunk 20", "use algo.unroll 40 or 60"]),
        ("lstm", {"unroll": 5, "chunk": 20}, ["algo.unroll 5", "use algo.unroll 20"]),
        ("none", {"rho_clip": 1.0, "c_clip": 1.5}, ["algo.c_clip 1.5", "algo.rho_clip 1", "use algo.c_clip 1"]),
        ("none", {"circular": CIRCULAR, "queue": QueueConfig(replayed=1.0)},
         ["algo.circular.batches", "algo.queue.replayed", "to 0"]),
        ("none", {"kl_target": 0.01}, ["algo.kl_target", "algo.kl", "start it at 1"]),
        ("gru", {"chunk": 0}, ["algo.chunk", "1 or more"]),
        ("none", {"minibatches": 0}, ["algo.minibatches", "1 or more"]),
        ("none", {"target_period": 0}, ["algo.target_period", "1 or more"]),
        ("none", {"clip": 0.0}, ["algo.clip", "above 0"]),
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused_with_what_to_do(core, changes, words):
    with pytest.raises(UsageError) as caught:
        APPO(dataclasses.replace(SMALL, **changes), CORES[core], spec_of("discrete"), 4)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(("core", "minibatches", "what"), [("none", 25, "24 steps"), ("gru", 9, "8 chunks")])
def test_more_minibatches_than_there_is_to_cut_are_refused(core, minibatches, what):
    """Known only when a batch comes: it may hold any number of unrolls."""
    set_up = rig(APPO, dataclasses.replace(SMALL, minibatches=minibatches), net=CORES[core])
    with pytest.raises(UsageError) as caught:
        set_up.update()
    assert what in str(caught.value) and f"algo.minibatches {what.split()[0]} or less" in str(caught.value)


def test_chunk_is_of_no_concern_without_recurrence():
    assert APPO(dataclasses.replace(SMALL, unroll=5, chunk=4), NetConfig(), spec_of("box"), 4).plan().chunk == 5
