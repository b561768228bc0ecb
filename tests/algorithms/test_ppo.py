"""PPO: the numbers against plain numpy, values of the right rows, ratio 1 before the first step."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from support_lanes import BOX, DISCRETE, MULTI, NETS, SMALL, ScriptedLanes, build

from rookery.algorithms.ppo import PPO, PPOConfig
from rookery.core import tree
from rookery.core.config import NetConfig
from rookery.core.reduce import ALONE
from rookery.core.types import EnvSpec, Leaf
from rookery.core.unroll import Unroll
from rookery.nets import build as nets_build
from rookery.roles.learner import Learner

T, B = SMALL.unroll, 4
FLAT = NetConfig(hidden=())  # linear policy and value of the bare observation


def by_row(rig, x: torch.Tensor) -> torch.Tensor:
    """A column of a prepared batch back in the order [T, B] of the unroll."""
    if not rig.algorithm.recurrent:
        return x.unflatten(0, (T, -1))
    rows = rig.algorithm.config.chunk
    return x.unflatten(1, (T // rows, -1)).transpose(0, 1).flatten(0, 1)


# The loss against the paper's formulas in numpy, float64


def fixed_batch() -> Unroll:
    """Six rows of three lanes: a termination, a truncation, an end in the last row and a dead first row."""
    rng = np.random.default_rng(3)
    terminated, truncated = np.zeros((6, 3), bool), np.zeros((6, 3), bool)
    terminated[2, 0] = truncated[1, 1] = terminated[5, 1] = truncated[4, 2] = True
    live = np.ones((6, 3), bool)
    live[0, 2] = False
    live[1:] = ~(terminated | truncated)[:-1]
    reward = np.where(live, rng.normal(size=(6, 3)), 0).astype(np.float32)
    return Unroll(
        obs={"obs": torch.tensor(rng.normal(size=(7, 3, 3)), dtype=torch.float32)},
        action=torch.tensor(rng.integers(3, size=(6, 3))),
        reward=torch.from_numpy(reward), terminated=torch.from_numpy(terminated), truncated=torch.from_numpy(truncated),
        live=torch.from_numpy(live), logp=torch.tensor(rng.normal(-1.1, 0.25, (6, 3)), dtype=torch.float32), state0={},
        version=torch.zeros(3, dtype=torch.int64), lane=torch.arange(3),
    )  # fmt: skip


def linear_learner(config: PPOConfig) -> Learner:
    spec = EnvSpec("fixed", {"obs": Leaf((3,), "float32", "vector")}, DISCRETE)
    learner = Learner(PPO(config, FLAT, spec, 3), seed=1)
    rng = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in learner.nets.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=rng))
    return learner


def weights(learner: Learner) -> list[np.ndarray]:
    heads = (learner.nets["policy"].linear, learner.nets["value"].linear)
    return [p.detach().double().numpy().copy() for head in heads for p in (head.weight, head.bias)]


class Reference:
    """PPO's loss as the paper and GAE's definition have it: sums over single episodes, no scan, no masks."""

    def __init__(self, batch: Unroll, config: PPOConfig, start: list[np.ndarray]):
        self.batch, self.config = batch, config
        self.obs = batch.obs["obs"].double().numpy()
        value = self.values(start)
        term, trunc = batch.terminated.numpy(), batch.truncated.numpy()
        self.rows = [(t, b) for t in range(6) for b in range(3) if batch.live[t, b]]
        advantage = []
        for t, b in self.rows:
            total, decay = 0.0, 1.0
            for k in range(t, 6):
                bootstrap = 0.0 if term[k, b] else config.gamma * value[k + 1, b]
                total += decay * (float(batch.reward[k, b]) + bootstrap - value[k, b])
                if term[k, b] or trunc[k, b]:
                    break
                decay *= config.gamma * config.lam
            advantage.append(total)
        self.old_value = np.array([value[at] for at in self.rows])
        self.target = np.array(advantage) + self.old_value
        self.advantage = np.array(advantage)
        if config.normalize_advantage:
            self.advantage = (self.advantage - self.advantage.mean()) / (self.advantage.std() + 1e-8)

    def values(self, weights: list[np.ndarray]) -> np.ndarray:
        return (self.obs @ weights[2].T + weights[3])[..., 0]

    def parts(self, weights: list[np.ndarray]) -> tuple[float, float, float]:
        config, batch = self.config, self.batch
        surrogate, errors, entropies = [], [], []
        value = self.values(weights)
        for i, (t, b) in enumerate(self.rows):
            logits = weights[0] @ self.obs[t, b] + weights[1]
            p = np.exp(logits) / np.exp(logits).sum()
            ratio = p[int(batch.action[t, b])] / math.exp(float(batch.logp[t, b]))
            clipped = min(max(ratio, 1 - config.clip), 1 + config.clip)
            surrogate.append(min(ratio * self.advantage[i], clipped * self.advantage[i]))
            error = 0.5 * (value[t, b] - self.target[i]) ** 2
            if config.value_clip is not None:
                step = np.clip(value[t, b] - self.old_value[i], -config.value_clip, config.value_clip)
                error = max(error, 0.5 * (self.old_value[i] + step - self.target[i]) ** 2)
            errors.append(error)
            entropies.append(-(p * np.log(p)).sum())
        return -float(np.mean(surrogate)), float(np.mean(errors)), float(np.mean(entropies))

    def loss(self, weights: list[np.ndarray]) -> float:
        policy, value, entropy = self.parts(weights)
        return policy + self.config.value_coef * value - self.config.entropy * entropy


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("value_clip", [None, 0.05])
def test_loss_and_gradient_of_a_fixed_batch_are_those_of_the_formulas(value_clip, normalize):
    """P32, P40, P16, P17: signs and factors of every term; targets and advantages are constants."""
    config = PPOConfig(
        unroll=6, minibatches=1, epochs=1, gamma=0.9, lam=0.8, clip=0.15, value_coef=0.7, entropy=0.03,
        value_clip=value_clip, normalize_advantage=normalize,
    )  # fmt: skip
    learner, batch = linear_learner(config), fixed_batch()
    reference = Reference(batch, config, weights(learner))
    (prepared,) = learner.algorithm.minibatches(
        learner.algorithm.prepare(learner.nets, batch, ALONE), torch.Generator(), ALONE
    )
    with torch.no_grad():  # away from where the batch was prepared, so that ratios and value changes are not trivial
        for parameter in learner.nets.parameters():
            parameter.add_(0.1)
    output = learner.gradients(prepared)
    now = weights(learner)
    policy, value, entropy = reference.parts(now)
    assert float(output.losses["all"].detach()) == pytest.approx(reference.loss(now), rel=1e-5)
    assert float(output.metrics["policy_loss"]) == pytest.approx(policy, rel=1e-5)
    assert float(output.metrics["value_loss"]) == pytest.approx(value, rel=1e-5)
    assert float(output.metrics["entropy"]) == pytest.approx(entropy, rel=1e-5)
    assert float(output.metrics["clip_fraction"]) > 0.2, "the batch must hold clipped and unclipped rows"

    heads = (learner.nets["policy"].linear, learner.nets["value"].linear)
    gradients = [p.grad.double().numpy() for head in heads for p in (head.weight, head.bias)]
    for i, gradient in enumerate(gradients):
        for at in np.ndindex(gradient.shape):
            sides = []
            for h in (1e-6, -1e-6):
                moved = [w.copy() for w in now]
                moved[i][at] += h
                sides.append(reference.loss(moved))
            assert gradient[at] == pytest.approx((sides[0] - sides[1]) / 2e-6, rel=1e-3, abs=1e-6), (i, at)


def test_metrics_of_the_fixed_batch():
    config = PPOConfig(unroll=6, minibatches=1, gamma=0.9, lam=0.8, clip=0.15)
    learner, batch = linear_learner(config), fixed_batch()
    reference = Reference(batch, config, weights(learner))
    output = learner.gradients(learner.algorithm.prepare(learner.nets, batch, ALONE))
    log_ratio = []
    for t, b in reference.rows:
        logits = weights(learner)[0] @ reference.obs[t, b] + weights(learner)[1]
        log_ratio.append(logits[int(batch.action[t, b])] - np.log(np.exp(logits).sum()) - float(batch.logp[t, b]))
    log_ratio = np.array(log_ratio)
    assert float(output.metrics["kl"]) == pytest.approx((np.exp(log_ratio) - 1 - log_ratio).mean(), rel=1e-4)
    assert float(output.stop) == float(output.metrics["kl"])
    assert float(output.metrics["clip_fraction"]) == pytest.approx((np.abs(np.exp(log_ratio) - 1) > 0.15).mean())
    rest = np.var(reference.target - reference.old_value) / np.var(reference.target)
    assert float(output.metrics["explained_variance"]) == pytest.approx(1 - rest, rel=1e-4)
    assert all(not x.requires_grad for x in output.metrics.values())


# Returns and boundaries


def test_a_value_is_bootstrapped_from_the_true_successor_only():
    """P2: V(obs) names the observation, so the target of every row says which one it was bootstrapped from."""
    rig = build(config=dataclasses.replace(SMALL, lam=0.0, gamma=0.5, normalize_advantage=False), net=FLAT)
    head = rig.learner.nets["value"].linear
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[1000.0, 32.0, 1.0]]))
        head.bias.zero_()
    ends = 0
    for _ in range(8):
        batch = rig.collect()
        target = by_row(rig, rig.prepared(batch).target)
        now = batch.obs["obs"][:-1]
        after = now + torch.tensor([0.0, 0.0, 1.0])  # a live row's successor: the same episode, one step later
        value = (after @ torch.tensor([1000.0, 32.0, 1.0])) * ~batch.terminated
        expected = batch.reward + 0.5 * value
        assert torch.equal(target[batch.live], expected[batch.live])
        ends += int((batch.truncated & ~batch.terminated).sum())
    assert ends > 10


@pytest.mark.parametrize("name", NETS)
def test_values_of_all_rows_equal_a_full_forward_pass(name):
    """The bootstrap row included, with a shared torso or a core: dead rows before it, and chunks, change nothing."""
    config = dataclasses.replace(SMALL, lam=0.0, gamma=0.5, normalize_advantage=False)
    rig = build(config=config, net=NETS[name])
    nets = rig.learner.nets
    last_dead = last_end = 0
    for _ in range(10):
        batch = rig.collect()
        state = tree.map(lambda x: x[0], batch.state0)
        value = []
        with torch.no_grad():
            for t in range(T + 1):
                obs = {"obs": batch.obs["obs"][t]}
                features, state = nets["body"].step(nets["normalizer"](obs), state)
                value.append(nets["value"](nets["value_body"].step(obs, {})[0] if name == "split" else features))
                if t < T:
                    keep = batch.live[t].view(-1, 1, 1)
                    state = tree.map(lambda x: x * keep, state)  # noqa: B023
        value = torch.stack(value)
        prepared = rig.prepared(batch)
        expected = batch.reward + 0.5 * value[1:] * ~batch.terminated
        torch.testing.assert_close(by_row(rig, prepared.value), value[:-1], rtol=0, atol=2e-6)
        live = batch.live
        torch.testing.assert_close(by_row(rig, prepared.target)[live], expected[live], rtol=1e-6, atol=2e-6)
        last_dead, last_end = last_dead + int((~live[-1]).sum()), last_end + int(batch.truncated[-1].sum())
    assert last_dead and last_end


# Ratio 1


RATIOS = {
    **{name: (DISCRETE, net) for name, net in NETS.items()},
    "multi": (MULTI, NETS["split"]),
    "multi-lstm": (MULTI, NETS["lstm"]),
    "gaussian": (BOX, NETS["split"]),
    "gaussian-state-std": (BOX, dataclasses.replace(NETS["shared"], state_std=True)),
    "squashed": (BOX, dataclasses.replace(NETS["split"], squash=True)),
    "squashed-gru": (BOX, dataclasses.replace(NETS["gru"], squash=True)),
}


@pytest.mark.parametrize("normalize", [False, True], ids=["raw", "normalized"])
@pytest.mark.parametrize("name", RATIOS)
def test_the_ratio_is_1_before_the_first_minibatch_of_every_update(name, normalize):
    """P15: recurrent or not, whatever the policy; also after updates of weights and of observation statistics."""
    action, net = RATIOS[name]
    net = dataclasses.replace(net, normalize_obs=normalize)
    config = dataclasses.replace(SMALL, scale_reward=True, lr=3e-3)
    rig = build(lambda: ScriptedLanes(action=action, offset=5.0), config=config, net=net, actors=2)
    for _ in range(4):
        batch = rig.collect()
        # float32 log-densities of magnitude 10 and more cannot be closer
        assert (ratio(rig, batch) - 1).abs().max() < (1e-5 if action is BOX else 1e-6)
        rig.learner.step(batch, 0.0)
    assert rig.learner.updates == 16


@pytest.mark.parametrize("name", ["gru", "gru2", "lstm", "lstm2"])
def test_the_ratio_is_1_with_few_resets_in_long_chunks(name):
    """The core has another way through a sequence when resets are rare."""
    config = dataclasses.replace(SMALL, unroll=40, chunk=20)
    rig = build(lambda: ScriptedLanes(lengths=((33,), (25, 14), (60,), (7, 50))), config=config, net=NETS[name])
    resets = 0
    for _ in range(3):
        batch = rig.collect()
        assert (ratio(rig, batch) - 1).abs().max() < 1e-6
        resets += int((~batch.live).sum())
        rig.learner.step(batch, 0.0)
    assert resets >= 8


def ratio(rig, batch: Unroll) -> torch.Tensor:
    """pi / pi_old of every live row of a batch, by the training path."""
    prepared, nets = rig.prepared(batch), rig.learner.nets
    with torch.no_grad():
        params, *_ = nets_build.policy_value_sequence(nets, prepared.obs, prepared.state, prepared.reset)
        new_logp, _ = nets["policy"].logp_entropy(params, prepared.action)
    return (new_logp.double() - prepared.logp.double()).exp()[prepared.weight > 0]
