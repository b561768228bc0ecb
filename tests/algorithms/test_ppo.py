"""PPO: the numbers against plain numpy, ratio 1 before the first step, whole chunks, dead rows without a voice."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from support_lanes import BOX, DISCRETE, MULTI, SMALL, GuessLanes, ScriptedLanes, build

from rookery import tree
from rookery.algorithms.ppo import PPO, PPOConfig
from rookery.checkpoint import Checkpoint
from rookery.config import NetConfig, RunConfig
from rookery.errors import UsageError
from rookery.evaluate import evaluate
from rookery.learner import Learner
from rookery.nets import build as nets_build
from rookery.policy import Policy
from rookery.types import EnvSpec, Leaf, Unroll

T, B = SMALL.unroll, 4
FLAT = NetConfig(hidden=())  # linear policy and value of the bare observation
NETS = {
    "split": NetConfig(hidden=(8,)),
    "shared": NetConfig(hidden=(8,), shared=True),
    "gru": NetConfig(hidden=(8,), core="gru", core_size=5),
    "gru2": NetConfig(hidden=(8,), core="gru", core_size=5, core_layers=2),
    "lstm": NetConfig(hidden=(8,), core="lstm", core_size=5),
    "lstm2": NetConfig(hidden=(8,), core="lstm", core_size=5, core_layers=2),
}


def identity(x: torch.Tensor) -> torch.Tensor:
    return x


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
        learner.algorithm.prepare(learner.nets, batch, identity), torch.Generator()
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
    output = learner.gradients(learner.algorithm.prepare(learner.nets, batch, identity))
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
                features, state = nets_build.features_step(nets, obs, state)
                value.append(nets["value"](nets["value_torso"](obs) if name == "split" else features))
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
    nets = rig.learner.nets
    for _ in range(4):
        batch = rig.collect()
        prepared = rig.prepared(batch)
        with torch.no_grad():
            params, _ = nets_build.policy_value_sequence(nets, prepared.obs, prepared.state, prepared.reset)
            new_logp, _ = nets["policy"].logp_entropy(params, prepared.action)
        ratio = (new_logp.double() - prepared.logp.double()).exp()[prepared.weight > 0]
        # float32 log-densities of magnitude 10 and more cannot be closer
        assert (ratio - 1).abs().max() < (1e-5 if action is BOX else 1e-6)
        rig.learner.step(batch, 0.0)
    assert rig.learner.updates == 16


# Advantages


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
        rig.algorithm.after_update(rig.learner.nets, each, identity)
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
    pieces = list(rig.algorithm.minibatches(rig.prepared(marked), torch.Generator().manual_seed(1)))
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
    prepared = rig.algorithm.prepare(rig.learner.nets, marked, identity)
    pieces = list(rig.algorithm.minibatches(prepared, torch.Generator().manual_seed(1)))
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
    layers = [(layer, 2.0) for torso in ("torso", "value_torso") if torso in nets for layer in nets[torso].vector.layers]
    layers += [(nets["policy"].linear, 1e-4), (nets["value"].linear, 1.0)]
    for layer, gain in layers:
        w = layer.weight.detach()
        product = w @ w.T if w.shape[0] <= w.shape[1] else w.T @ w
        torch.testing.assert_close(product, gain * torch.eye(len(product)), atol=1e-5, rtol=1e-4)
        assert not layer.bias.any()
    optimizer = rig.learner.optimizers["all"]
    assert isinstance(optimizer, torch.optim.Adam) and optimizer.param_groups[0]["eps"] == 1e-5


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
    rng = one.learner._rng.manual_seed(one_seed(one.learner))
    first = next(iter(one.algorithm.minibatches(one.prepared(batch), rng)))
    one.learner.gradients(first)
    one.learner.apply()
    assert torch.equal(one.learner.flat["all"].data, rig.learner.flat["all"].data)


def one_seed(learner: Learner) -> int:
    from rookery.seeding import seed_of

    return seed_of(learner._seed, "minibatches", learner.version)


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


def mean_reward(rig, unrolls: int = 4) -> float:
    total = steps = 0.0
    for _ in range(unrolls):
        batch = rig.collect()
        total, steps = total + float(batch.reward.sum()), steps + int(batch.live.sum())
    return total / steps


def learn(task: str, net: NetConfig, config: PPOConfig, updates: int, length: int = 5):
    rig = build(lambda: GuessLanes(task, count=16, length=length), config=config, net=net, seed=2, shake=0.0)
    start = mean_reward(rig)
    for update in range(updates):
        rig.update(update / updates)
    return start, mean_reward(rig), rig


def test_learns_to_name_what_it_sees():
    config = PPOConfig(unroll=16, epochs=4, minibatches=2, lr=1e-2, entropy=0.0)
    start, end, _ = learn("symbol", NetConfig(hidden=(16,)), config, updates=25)
    assert start < 0.6 and end > 0.95


@pytest.mark.parametrize("squash", [False, True])
def test_learns_to_be_where_it_should(squash):
    config = PPOConfig(unroll=32, epochs=8, minibatches=4, lr=1e-2, entropy=0.0, gamma=0.0)
    net = NetConfig(hidden=(16,), log_std=-0.5, squash=squash)
    start, end, rig = learn("target", net, config, updates=30)
    assert start < -0.4 and end > -0.05
    obs = torch.linspace(-0.7, 0.7, 5).unsqueeze(1)
    with torch.no_grad():
        action = rig.algorithm.act(rig.learner.nets, {"obs": obs}, {}, None).action
    assert (action - obs).abs().max() < 0.25, "greedy: the observation itself"


@pytest.mark.parametrize("core", ["gru", "lstm"])
def test_remembers_a_cue_with_a_core(core):
    config = PPOConfig(unroll=16, chunk=4, epochs=4, minibatches=2, lr=1e-2, entropy=0.01, gamma=0.95)
    net = NetConfig(hidden=(16,), core=core, core_size=16)
    _, end, _ = learn("cue", net, config, updates=40, length=4)
    assert 4 * end > 0.9, "per episode; a third without memory"
