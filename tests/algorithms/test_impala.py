"""IMPALA: loss and gradient of a fixed batch against the paper's sums, V-trace's golden numbers, stored policies."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from support_actor_critic import (
    ACTIONS,
    CORES,
    LANES,
    NUMBERS,
    ROWS,
    Model,
    Table,
    check_gradients,
    fixed_batch,
    learner_of,
    linear,
    log_ratio,
    part_of,
    repeated,
    rig,
    spec_of,
    with_junk,
)
from support_lanes import ScriptedLanes, frozen, reward_of, shaken
from support_ranks import agreed, ranks, together

from rookery.algorithms.a2c import A2C, A2CConfig
from rookery.algorithms.impala import IMPALA, IMPALAConfig
from rookery.core import tree
from rookery.core.config import NetConfig, QueueConfig
from rookery.core.errors import UsageError
from rookery.core.reduce import ALONE
from rookery.core.types import Mix, Queue
from rookery.core.unroll import Unroll
from rookery.nets.rmsprop import FlatRMSProp

CONFIG = IMPALAConfig(**NUMBERS)
CLIPS = {"ones": (1.0, 1.0, 1.0), "apart": (1.5, 0.75, 2.0), "loose": (50.0, 50.0, 50.0), "tight": (0.5, 0.25, 0.125)}


def clipped(clips: tuple[float, float, float], **changes) -> IMPALAConfig:
    rho, c, pg = clips
    return dataclasses.replace(CONFIG, rho_clip=rho, c_clip=c, pg_rho_clip=pg, **changes)


def parts(config: IMPALAConfig, table: Table, start: Model, now: Model) -> tuple[float, float, float]:
    """Policy loss, value loss and entropy: means over live rows. Targets and advantages are those of `start`."""
    clips = (config.rho_clip, config.c_clip, config.pg_rho_clip)

    def ratio(t: int, b: int) -> float:
        return table.ratio(start, t, b) if config.correct else 1.0

    policy = error = entropy = 0.0
    for t, b in table.live:
        x = table.obs[t, b]
        target, advantage = table.vtrace(
            start,
            t,
            b,
            config.gamma,
            config.lam,
            clips,
            lambda k, b: table.ratio(start, k, b) if config.correct else 1.0,
        )
        policy -= advantage * now.logp(x, table.action[t, b])
        error += 0.5 * (now.value(x) - target) ** 2
        entropy += now.entropy(x)
    return tuple(x / len(table.live) for x in (policy, error, entropy))


def total(config: IMPALAConfig, table: Table, start: Model, now: Model) -> float:
    policy, error, entropy = parts(config, table, start, now)
    return policy + config.value_coef * error - config.entropy * entropy


CASES = [("discrete", name, 1.0) for name in CLIPS] + [("multi", "apart", 0.75), ("box", "apart", 0.75)]


@pytest.mark.parametrize("correct", [True, False])
@pytest.mark.parametrize(("action", "clips", "lam"), CASES)
def test_loss_and_gradient_of_a_fixed_batch_are_those_of_the_papers_sums(action, clips, lam, correct):
    """P32, P36, P37, P39, P40: signs, factors, the three clips; ends of both kinds; targets are constants."""
    config = clipped(CLIPS[clips], lam=lam, correct=correct)
    algorithm, nets = linear(IMPALA, config, action)
    batch = fixed_batch(action)
    output = algorithm.losses(nets, algorithm.prepare(nets, batch, ALONE))
    table, now = Table(batch), Model(nets, action)
    policy, error, entropy = parts(config, table, now, now)
    assert output.metrics["policy_loss"].item() == pytest.approx(policy, rel=1e-12)
    assert output.metrics["value_loss"].item() == pytest.approx(error, rel=1e-12)
    assert output.metrics["entropy"].item() == pytest.approx(entropy, rel=1e-12)
    assert output.losses["all"].item() == pytest.approx(total(config, table, now, now), rel=1e-12)
    assert float(output.weight) == len(table.live)
    assert all(not x.requires_grad for x in output.metrics.values())
    check_gradients(nets, output.losses["all"], lambda model: total(config, table, now, model), now)


def test_metrics_say_how_far_the_data_is_from_the_policy():
    config = clipped((1.5, 0.75, 2.0))
    algorithm, nets = linear(IMPALA, config)
    batch = fixed_batch()
    metrics = algorithm.losses(nets, batch).metrics
    table, model = Table(batch), Model(nets)
    ratios = [table.ratio(model, t, b) for t, b in table.live]
    n = len(ratios)
    assert metrics["rho"].item() == pytest.approx(sum(ratios) / n, rel=1e-12)
    assert metrics["kl"].item() == pytest.approx(sum(r - 1 - math.log(r) for r in ratios) / n, rel=1e-12)
    assert metrics["rho_clipped"].item() == pytest.approx(sum(r > 1.5 for r in ratios) / n)
    assert 0 < metrics["rho_clipped"] < 1


# Golden numbers: a uniform policy, V(x) = x, and log-probabilities stored so that pi / mu is what it should be.

GOLDEN = {
    # name: pi / mu, clips (rho, c, pg), whether row 1 terminates, vs, pg
    "VT1": ((1.0, 1.0, 1.0), (1.0, 1.0, 1.0), False, (4.078, 3.42, 3.8), (3.578, 2.42, 4.3)),
    "VT2": ((0.5, 2.0, 1.5), (1.0, 1.0, 1.0), False, (2.289, 3.42, 3.8), (1.789, 2.42, 4.3)),
    "VT3": ((0.5, 2.0, 1.5), (3.0, 1.0, 1.0), False, (2.50725, 3.905, 5.95), (2.00725, 4.355, 4.3)),
}


def golden(ratios: tuple[float, ...], terminated: bool) -> Unroll:
    """Three rows of one lane. Behind a termination the next row would be dead; here it is cut off instead."""
    no = torch.zeros(3, 1, dtype=torch.bool)
    ends = no.clone()
    ends[1] = terminated
    return Unroll(
        obs={"obs": torch.tensor([0.5, 1.0, -0.5, 2.0]).double().view(4, 1, 1).expand(4, 1, 3)},
        action=torch.zeros(3, 1, dtype=torch.int64), reward=torch.tensor([[1.0], [0.0], [2.0]]).double(),
        terminated=ends, truncated=no, live=~no,
        logp=math.log(1 / 3) - torch.tensor(ratios).double().log().view(3, 1), state0={},
        version=torch.zeros(1, dtype=torch.int64), lane=torch.zeros(1, dtype=torch.int64),
    )  # fmt: skip


def golden_losses(ratios, clips, terminated=False) -> tuple[float, float]:
    """The sum of the advantages, and twice that of the value losses."""
    algorithm, nets = linear(IMPALA, clipped(clips, gamma=0.9, lam=1.0))
    with torch.no_grad():
        for parameter in nets.parameters():
            parameter.zero_()
        nets["value"].linear.weight[0, 0] = 1.0
    metrics = algorithm.losses(nets, golden(ratios, terminated)).metrics
    return 3 * metrics["policy_loss"].item() / math.log(3), 6 * metrics["value_loss"].item()


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_targets_and_advantages(name):
    """P36, P37, P38. The wrong advantages of VT2, from V instead of v, would add up to 3.55."""
    ratios, clips, terminated, vs, pg = GOLDEN[name]
    advantages, errors = golden_losses(ratios, clips, terminated)
    assert advantages == pytest.approx(sum(pg), abs=1e-6)
    assert errors == pytest.approx(sum((v - target) ** 2 for v, target in zip((0.5, 1.0, -0.5), vs)), abs=1e-6)


def test_golden_termination():
    """P39, VT4: a discount of 0 cuts bootstrap and trace: vs are .75, 0 and 3.8."""
    advantages, errors = golden_losses((0.5, 2.0, 1.5), (1.0, 1.0, 1.0), terminated=True)
    assert advantages == pytest.approx(0.25 - 1.0 + 4.3, abs=1e-6)
    assert errors == pytest.approx(0.25**2 + 1.0**2 + 4.3**2, abs=1e-6)


# On-policy


def on_policy(action: str, nets, batch: Unroll) -> Unroll:
    """With the log-probabilities that these nets have."""
    table, model = Table(batch), Model(nets, action)
    logp = batch.logp.clone()
    for t in range(ROWS):
        for b in range(LANES):
            logp[t, b] = model.logp(table.obs[t, b], table.action[t, b])
    return dataclasses.replace(batch, logp=logp)


@pytest.mark.parametrize("action", ACTIONS)
def test_on_policy_the_gradient_is_that_of_a2c(action):
    """P38: returns to the end of the unroll. (The paper has no lambda.)"""
    config = clipped((1.0, 1.0, 1.0), lam=1.0)
    impala, nets = linear(IMPALA, config, action)
    a2c, _ = linear(A2C, A2CConfig(**(NUMBERS | {"lam": 1.0})), action)
    batch = on_policy(action, nets, fixed_batch(action))
    losses = [each.losses(nets, batch).losses["all"] for each in (impala, a2c)]
    torch.testing.assert_close(*losses, rtol=1e-12, atol=0)
    for mine, theirs in zip(*(torch.autograd.grad(loss, list(nets.parameters())) for loss in losses)):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-14)


def test_on_policy_with_lambda_it_learns_as_with_gae():
    """The gradients of policy and value are those of A2C."""
    config = clipped((1.0, 1.0, 1.0), entropy=0.0)
    impala, nets = linear(IMPALA, config)
    a2c, _ = linear(A2C, A2CConfig(**(NUMBERS | {"entropy": 0.0})))
    batch = on_policy("discrete", nets, fixed_batch())
    for group in ("value", "policy"):
        parameters = list(nets[group].parameters())
        mine, theirs = (
            torch.cat([g.flatten() for g in torch.autograd.grad(each.losses(nets, batch).losses["all"], parameters)])
            for each in (impala, a2c)
        )
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("action", ACTIONS)
def test_what_an_actor_stores_is_the_policy_that_the_learner_computes(core, action):
    """P15, P27, P43: log rho is 0 before the first step of the optimiser, along whole unrolls, also after updates."""
    config = IMPALAConfig(unroll=ROWS, lr=1e-2, max_grad_norm=0.5, optimizer="adam", scale_reward=True)
    net = dataclasses.replace(CORES[core], normalize_obs=True)
    set_up = rig(IMPALA, config, lambda: ScriptedLanes(action=ACTIONS[action], offset=5.0), net, actors=2)
    for _ in range(3):
        batch = set_up.collect()
        assert log_ratio(set_up, batch).abs().max() < 1e-5
        metrics = set_up.algorithm.losses(set_up.learner.nets, batch).metrics
        assert metrics["rho"].item() == pytest.approx(1.0, abs=1e-5)
        assert metrics["kl"].item() < 1e-10, "the mean of (log rho)² / 2"
        before = [p.detach().clone() for p in set_up.learner.nets.parameters()]
        set_up.learner.step(batch, 0.0)
        assert all(not torch.equal(p, old) for p, old in zip(set_up.learner.nets.parameters(), before))


@pytest.mark.parametrize("core", CORES)
def test_the_stored_policy_is_used_and_not_computed_again(core):
    """P41: with other weights than those that acted, rho is the ratio to what was stored."""
    set_up = rig(IMPALA, IMPALAConfig(unroll=ROWS), net=CORES[core])
    batch = frozen(set_up.collect())
    stored = batch.logp.clone()
    shaken(set_up.learner, 0.3)
    expected = log_ratio(set_up, batch)
    assert expected.abs().max() > 0.1
    prepared = set_up.prepared(batch)
    assert torch.equal(prepared.logp, stored)
    metrics = set_up.algorithm.losses(set_up.learner.nets, prepared).metrics
    assert metrics["rho"].item() == pytest.approx(expected.exp().mean().item(), rel=1e-5)
    assert metrics["rho_clipped"].item() == pytest.approx((expected > 0).float().mean().item())


def test_without_correction_the_stored_policy_does_not_matter():
    config = clipped((1.0, 1.0, 1.0), correct=False)
    losses = []
    for shift in (0.0, 1.5):
        algorithm, nets = linear(IMPALA, config)
        batch = fixed_batch()
        losses.append(algorithm.losses(nets, dataclasses.replace(batch, logp=batch.logp + shift)).losses["all"].item())
    assert losses[0] == losses[1]
    algorithm, nets = linear(IMPALA, dataclasses.replace(config, correct=True))
    assert algorithm.losses(nets, fixed_batch()).losses["all"].item() != pytest.approx(losses[0], rel=1e-3)


# Batches


@pytest.mark.parametrize("action", ACTIONS)
def test_dead_rows_weigh_nothing(action):
    algorithm, nets = linear(IMPALA, CONFIG, action)
    outputs = [algorithm.losses(nets, each) for each in (fixed_batch(action), with_junk(fixed_batch(action)))]
    gradients = [torch.autograd.grad(output.losses["all"], list(nets.parameters())) for output in outputs]
    assert outputs[0].losses["all"].item() == pytest.approx(outputs[1].losses["all"].item(), rel=1e-14)
    for a, b in zip(*gradients):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-15)
    for name, value in outputs[0].metrics.items():
        torch.testing.assert_close(value, outputs[1].metrics[name])


def test_the_loss_is_a_mean():
    """P44: the same unrolls twice leave it as it is, and weigh twice as much."""
    algorithm, nets = linear(IMPALA, CONFIG)
    once, twice = (algorithm.losses(nets, each) for each in (fixed_batch(), repeated(fixed_batch())))
    assert once.losses["all"].item() == pytest.approx(twice.losses["all"].item(), rel=1e-12)
    assert 2 * float(once.weight) == float(twice.weight)


def test_a_batch_without_a_live_row_has_no_gradient():
    algorithm, nets = linear(IMPALA, CONFIG)
    output = algorithm.losses(nets, dataclasses.replace(fixed_batch(), live=torch.zeros(ROWS, LANES, dtype=torch.bool)))
    assert output.losses["all"].item() == 0 and float(output.weight) == 0
    assert not any(x.any() for x in torch.autograd.grad(output.losses["all"], list(nets.parameters())))


def test_the_coefficients_weigh_their_losses():
    """P32: the loss is linear in both, with the signs of a cost and of a bonus."""
    losses = {}
    for value_coef, entropy in ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0)):
        algorithm, nets = linear(IMPALA, dataclasses.replace(CONFIG, value_coef=value_coef, entropy=entropy))
        output = algorithm.losses(nets, fixed_batch())
        losses[value_coef, entropy] = output.losses["all"].item()
    told = {name: x.item() for name, x in output.metrics.items()}
    assert losses[0, 0] == pytest.approx(told["policy_loss"])
    assert losses[1, 0] - losses[0, 0] == pytest.approx(told["value_loss"])
    assert losses[0, 1] - losses[0, 0] == pytest.approx(-told["entropy"])


def test_rows_are_aligned():
    """P42: the reward of a row is that of its own observation and action."""
    set_up = rig(IMPALA, IMPALAConfig(unroll=ROWS), net=CORES["gru"])
    for _ in range(3):
        batch = set_up.prepared(set_up.collect())
        for t in range(ROWS):
            expected = torch.from_numpy(reward_of(batch.obs["obs"][t].numpy(), batch.action[t].numpy()))
            assert torch.equal(batch.reward[t][batch.live[t]], expected[batch.live[t]])


def test_replayed_unrolls_are_learnt_from_and_leave_statistics_alone():
    """P50: V-trace corrects them like any other; they were counted when they were new."""
    config = IMPALAConfig(unroll=ROWS, queue=QueueConfig(replayed=1.0), scale_reward=True)
    net = dataclasses.replace(CORES["none"], normalize_obs=True)
    set_up = rig(IMPALA, config, net=net)
    nets, algorithm = set_up.learner.nets, set_up.algorithm
    old = frozen(set_up.collect())
    set_up.learner.step(old, 0.0)
    new = frozen(set_up.collect())
    both = tree.map_fields(new, lambda *xs: torch.cat(xs, 1 if xs[0].dim() > 1 else 0), old)
    both = tree.replace(both, replayed=torch.arange(8) >= 4)
    counts = [int(nets["normalizer"].leaves[0].running.count), int(nets["reward_scaler"].running.count)]
    assert counts == [int(old.live.sum())] * 2
    prepared = algorithm.prepare(nets, both, ALONE)
    output = algorithm.losses(nets, prepared)
    assert float(output.weight) == int(old.live.sum()) + int(new.live.sum())
    half = algorithm.losses(nets, tree.map_fields(prepared, lambda x: x[:, :4] if x.dim() > 1 else x[:4]))
    assert output.losses["all"].item() != pytest.approx(half.losses["all"].item(), rel=1e-3)
    algorithm.observe(nets, both, ALONE)
    counts = [int(nets["normalizer"].leaves[0].running.count), int(nets["reward_scaler"].running.count)]
    assert counts == [int(old.live.sum()) + int(new.live.sum())] * 2


# Settings


def test_the_plan_is_a_queue_with_lag_or_one_with_replay():
    plan = IMPALA(IMPALAConfig(unroll=7), CORES["lstm"], spec_of("discrete"), 4).plan()
    assert (plan.unroll, plan.chunk) == (7, 7) and not plan.extras
    assert isinstance(plan.table, Queue) and plan.table.max_lag == 1 and not plan.table.in_turns
    queue = QueueConfig(lag=3, batch=5, replayed=1.5, ring=32, loaders=2, buffers=4)
    table = IMPALA(IMPALAConfig(queue=queue), NetConfig(), spec_of("discrete"), 4).plan().table
    assert table == Mix(Queue(3, 5, 2, 4), 1.5, 32)


def test_clips_in_the_wrong_order_are_refused():
    with pytest.raises(UsageError) as caught:
        IMPALA(IMPALAConfig(rho_clip=1.0, c_clip=1.5), NetConfig(), spec_of("discrete"), 4)
    assert all(word in str(caught.value) for word in ("algo.c_clip", "1.5", "at most", "algo.rho_clip"))


def test_schedules_begin_and_end_where_they_say():
    """P30."""
    config = IMPALAConfig(lr=1e-3, lr_end=1e-5, entropy=0.02, entropy_end=0.0)
    algorithm = IMPALA(config, NetConfig(), spec_of("discrete"), 4)
    for progress, expected in {0.0: (1e-3, 0.02), 0.5: (5.05e-4, 0.01), 1.0: (1e-5, 0.0)}.items():
        assert (algorithm.schedule(progress)["all"], algorithm.entropy) == pytest.approx(expected, abs=1e-9)
    constant = IMPALA(IMPALAConfig(entropy=0.25), NetConfig(), spec_of("discrete"), 4)
    assert constant.schedule(1.0) == {"all": 0.0} and constant.entropy == 0.25


def test_the_default_optimiser_makes_the_papers_steps_of_a_sum_over_640_rows():
    """The paper's numbers (epsilon 0.1, mean square from 1, clip 40) are for sums; the losses here are means."""
    learner = rig(IMPALA, IMPALAConfig(unroll=ROWS, lr=1.0, lr_end=1.0)).learner
    optimizer = learner.optimizers["all"]
    assert isinstance(optimizer, FlatRMSProp)
    paper = FlatRMSProp(torch.nn.Parameter(torch.zeros(2)), 1.0, decay=0.99, eps=0.1, start=1.0)
    start = learner.flat["all"].data[:2].clone()
    for gradient in ([1.0, -8.0], [0.5, -16.0], [0.0, -2.0]):
        paper.parameter.grad = torch.tensor(gradient)
        learner.flat["all"].grad.zero_()
        learner.flat["all"].grad[:2] = torch.tensor(gradient) / 640
        paper.step()
        learner.apply()
    torch.testing.assert_close(learner.flat["all"].data[:2] - start, paper.parameter.detach(), rtol=0.02, atol=0)
    assert learner.algorithm.max_grad_norm == 40 / 640


@pytest.mark.parametrize("core", ["none", "lstm"])
def test_ranks_with_parts_of_the_lanes_equal_one_rank_with_all(core):
    """P20, P21: gradients are weighed by live rows."""
    config = IMPALAConfig(unroll=ROWS, lr=1e-2, scale_reward=True)
    net = dataclasses.replace(CORES[core], normalize_obs=True)
    whole, group = rig(IMPALA, config, net=net), ranks(2)
    learners = [learner_of(IMPALA, config, net, ScriptedLanes().spec, 4, reduce=rank) for rank in group]
    for _ in range(3):
        batch = frozen(whole.collect())
        whole.learner.step(batch, 0.0)
        agreed(together(group, lambda r, batch=batch: learners[r].step(part_of(batch, r, 2), 0.0)))
        assert torch.equal(learners[0].flat["all"].data, learners[1].flat["all"].data)
        torch.testing.assert_close(learners[0].flat["all"].data, whole.learner.flat["all"].data, rtol=0, atol=1e-5)
