"""PPO's updates: schedules, starting weights, the KL limit, statistics; and tasks it learns in seconds."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from support_lanes import NETS, SMALL, GuessLanes, ScriptedLanes, build

from rookery.algorithms.ppo import PPO, PPOConfig
from rookery.core.config import NetConfig, RunConfig
from rookery.core.reduce import ALONE
from rookery.core.seeding import seed_of
from rookery.nets.adam import FlatAdam
from rookery.play.evaluate import evaluate
from rookery.play.policy import Policy
from rookery.storage.checkpoint import Checkpoint

T, B = SMALL.unroll, 4


# Schedules, starts, limits


def test_schedules_begin_and_end_where_they_say():
    """P30."""
    config = PPOConfig(lr=1e-3, lr_end=1e-5, clip=0.2, clip_end=0.1, entropy=0.02, entropy_end=0.0)
    algorithm = PPO(config, NetConfig(), ScriptedLanes().spec, 4)
    table = {0.0: (1e-3, 0.2, 0.02), 0.5: (5.05e-4, 0.15, 0.01), 1.0: (1e-5, 0.1, 0.0), 1.7: (1e-5, 0.1, 0.0)}
    for progress, expected in table.items():
        lr = algorithm.schedule(progress)["all"]
        assert (lr, algorithm.clip, algorithm.entropy) == pytest.approx(expected, abs=1e-15)
    constant = PPO(PPOConfig(), NetConfig(), ScriptedLanes().spec, 4)
    assert constant.schedule(0.7)["all"] == pytest.approx(0.3 * 2.5e-4)
    assert (constant.clip, constant.entropy) == (0.2, 0.01)


def test_the_schedule_reaches_the_optimiser_and_the_loss():
    rig = build(config=dataclasses.replace(SMALL, lr=1e-3, clip_end=0.0))
    report = rig.update(progress=0.25)
    assert report.metrics["lr"] == pytest.approx(7.5e-4)
    assert rig.learner.optimizers["all"].param_groups[0]["lr"] == pytest.approx(7.5e-4)
    before = rig.learner.flat["all"].data.clone()
    rig.update(progress=1.0)
    assert torch.equal(rig.learner.flat["all"].data, before), "a step size of 0 moves nothing"


@pytest.mark.parametrize("name", NETS)
def test_the_first_policy_is_nearly_uniform_and_weights_start_orthogonal(name):
    """P31."""
    rig = build(net=dataclasses.replace(NETS[name], hidden=(16, 12)), shake=0.0)
    output = rig.learner.gradients(rig.prepared(rig.collect()))
    assert float(output.metrics["entropy"]) >= 0.99 * math.log(3)
    nets = rig.learner.nets
    torsos = [nets[name].torso for name in ("body", "value_body") if name in nets]
    layers = [(layer, 2.0) for torso in torsos for layer in torso.vector.layers]
    layers += [(nets["policy"].linear, 1e-4), (nets["value"].linear, 1.0)]
    for layer, gain in layers:
        w = layer.weight.detach()
        product = w @ w.T if w.shape[0] <= w.shape[1] else w.T @ w
        torch.testing.assert_close(product, gain * torch.eye(len(product)), atol=1e-5, rtol=1e-4)
        assert not layer.bias.any()
    optimizer = rig.learner.optimizers["all"]
    assert isinstance(optimizer, FlatAdam) and optimizer.param_groups[0]["eps"] == 1e-5


def test_the_kl_limit_ends_an_update_after_exactly_one_minibatch():
    """P35: the first minibatch has ratio 1 and is applied; the second sees the limit passed and is not."""
    config = dataclasses.replace(SMALL, lr=0.05, target_kl=1e-4, epochs=4, minibatches=2)
    rig = build(config=config)
    report = rig.update()
    assert rig.learner.updates == 1 and report.metrics["minibatches"] == 1
    assert rig.learner.version == 1, "the update itself is over and done"
    unlimited = build(config=dataclasses.replace(config, target_kl=None))
    unlimited.update()
    assert unlimited.learner.updates == 8
    one = build(config=dataclasses.replace(config, target_kl=None))
    batch = one.collect()
    one.algorithm.schedule(0.0)
    rng = torch.Generator().manual_seed(seed_of(one.learner._seed, "minibatches", 0))
    first = next(iter(one.algorithm.minibatches(one.prepared(batch), rng, ALONE)))
    one.learner.gradients(first)
    one.learner.apply()
    assert torch.equal(one.learner.flat["all"].data, rig.learner.flat["all"].data)


# Statistics


def test_observation_statistics_are_those_of_the_live_rows_and_only_the_learner_changes_them():
    """P33."""
    rig = build(net=NetConfig(hidden=(8,), normalize_obs=True), config=dataclasses.replace(SMALL, scale_reward=True))
    nets = rig.learner.nets
    seen, rewards = [], 0
    for _ in range(4):
        before = {name: value.clone() for name, value in nets.state_dict().items()}
        batch = rig.collect()
        assert all(torch.equal(before[name], value) for name, value in nets.state_dict().items()), "acting is reading"
        seen.append(batch.obs["obs"][:-1][batch.live].double())
        rewards += int(batch.live.sum())
        rig.learner.step(batch, 0.0)
        running = nets["normalizer"].leaves[0].running
        pooled = torch.cat(seen)
        assert float(running.count) == len(pooled) == rewards == float(nets["reward_scaler"].running.count)
        torch.testing.assert_close(running.mean, pooled.mean(0))
        torch.testing.assert_close(running.m2 / running.count, pooled.var(0, unbiased=False))
    assert rewards == rig.actors[0].lanes.taken


@pytest.mark.parametrize("name", ["split", "lstm"])
def test_evaluation_leaves_statistics_and_weights_alone(name):
    """P33."""
    net = dataclasses.replace(NETS[name], normalize_obs=True)
    rig = build(net=net, config=dataclasses.replace(SMALL, scale_reward=True))
    rig.update()
    tensors, _ = rig.learner.state()
    config = RunConfig("ppo", "rookery.algorithms.ppo:PPO", "scripted", rig.algorithm.config, net, envs_per_actor=B)
    saved = Checkpoint(path=Path("step-1"), env_steps=1, tensors=tensors, meta={})
    policy = Policy(config, ScriptedLanes().spec, saved)
    before = {key: value.clone() for key, value in policy.nets.state_dict().items()}
    results = [evaluate(policy, ScriptedLanes(), 12, seed=1, greedy=greedy) for greedy in (True, True, False)]
    assert results[0] == results[1] and results[0].episodes == results[2].episodes == 12
    after = policy.nets.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert all(torch.equal(tensors[f"nets/{key}"], after[key]) for key in before)


# Learning, in seconds


def mean_reward(rig, learn: bool = False, progress: float = 0.0) -> float:
    batch = rig.collect()
    if learn:
        rig.learner.step(batch, progress)
    return float(batch.reward.sum()) / int(batch.live.sum())


def learn(task: str, net: NetConfig, config: PPOConfig, updates: int, enough: float, length: int = 5):
    """Mean reward per step before, and once it has stayed good enough for three batches (or `updates` are over)."""
    rig = build(lambda: GuessLanes(task, count=16, length=length), config=config, net=net, seed=2, shake=0.0)
    start, recent = mean_reward(rig), []
    for update in range(updates):
        recent = [*recent[-2:], mean_reward(rig, True, update / updates)]
        if len(recent) == 3 and min(recent) > enough:
            break
    return start, min(recent), rig


def test_learns_to_name_what_it_sees():
    config = PPOConfig(unroll=16, epochs=4, minibatches=2, lr=1e-2, entropy=0.0)
    start, end, _ = learn("symbol", NetConfig(hidden=(16,)), config, updates=40, enough=0.95)
    assert start < 0.6 and end > 0.95


@pytest.mark.parametrize("squash", [False, True])
def test_learns_to_be_where_it_should(squash):
    config = PPOConfig(unroll=16, epochs=8, minibatches=4, lr=1e-2, entropy=0.0, gamma=0.0)
    net = NetConfig(hidden=(16,), log_std=-0.5, squash=squash)
    start, end, rig = learn("target", net, config, updates=60, enough=-0.06)
    assert start < -0.4 and end > -0.06
    obs = torch.linspace(-0.7, 0.7, 5).unsqueeze(1)
    with torch.no_grad():
        action = rig.algorithm.act(rig.learner.nets, {"obs": obs}, {}, None).action
    assert (action - obs).abs().max() < 0.25, "greedy: the observation itself"


@pytest.mark.parametrize("core", ["gru", "lstm"])
def test_remembers_a_cue_with_a_core(core):
    config = PPOConfig(unroll=16, chunk=8, epochs=4, minibatches=1, lr=2e-2, entropy=0.0, gamma=0.95)
    net = NetConfig(hidden=(16,), core=core, core_size=16)
    _, end, _ = learn("cue", net, config, updates=100, enough=0.8 / 3, length=3)
    assert 3 * end > 0.8, "per episode; a third without memory"
