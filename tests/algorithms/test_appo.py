"""Asynchronous PPO: the loss of a fixed batch in plain loops, the ratio of three policies, when the target follows."""

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
    linear,
    moved,
    repeated,
    rig,
    with_junk,
)
from support_lanes import ScriptedLanes, frozen, shaken

from rookery.algorithms.appo import APPO, APPOConfig
from rookery.core.reduce import ALONE
from rookery.core.unroll import Unroll

CONFIG = APPOConfig(**NUMBERS, chunk=3, clip=0.25, ratio_clip=1.5, rho_clip=1.5, c_clip=0.75)


def only_piece(algorithm, prepared):
    (piece,) = algorithm.minibatches(prepared, torch.Generator().manual_seed(1), ALONE)
    return piece


class Reference:
    """Objective, value loss, entropy and divergence from the definitions, with the policies that each of them means."""

    def __init__(self, config: APPOConfig, batch: Unroll, start: Model, target: Model):
        self.config, self.table, self.target = config, Table(batch), target
        table = self.table
        self.advantage, self.value_target = [], []
        for t, b in table.live:
            if config.correction == "gae":
                advantage = table.lambda_advantage(start, t, b, config.gamma, config.lam)
                value_target = advantage + start.value(table.obs[t, b])
            else:
                value_target, advantage = table.vtrace(
                    start, t, b, config.gamma, config.lam, (config.rho_clip, config.c_clip, 1.0), self.rho
                )
            self.advantage.append(advantage)
            self.value_target.append(value_target)
        if config.normalize_advantage:
            n = len(self.advantage)
            mean = sum(self.advantage) / n
            deviation = math.sqrt(sum((a - mean) ** 2 for a in self.advantage) / n)
            self.advantage = [(a - mean) / (deviation + 1e-8) for a in self.advantage]

    def rho(self, t: int, b: int) -> float:
        return self.table.ratio(self.target, t, b)

    def ratio(self, now: Model, t: int, b: int) -> float:
        """min(mu / target, bound) · pi / mu; with GAE pi / mu."""
        plain = self.table.ratio(now, t, b)
        if self.config.correction == "gae":
            return plain
        return min(1 / self.rho(t, b), self.config.ratio_clip) * plain

    def parts(self, now: Model) -> dict[str, float]:
        config, table = self.config, self.table
        sums = dict.fromkeys(("policy_loss", "value_loss", "entropy", "kl", "clip_fraction"), 0.0)
        for i, (t, b) in enumerate(table.live):
            x, ratio, advantage = table.obs[t, b], self.ratio(now, t, b), self.advantage[i]
            held = min(max(ratio, 1 - config.clip), 1 + config.clip)
            sums["policy_loss"] -= min(ratio * advantage, held * advantage)
            sums["value_loss"] += 0.5 * (now.value(x) - self.value_target[i]) ** 2
            sums["entropy"] += now.entropy(x)
            sums["kl"] += self.target.kl(now, x) if config.kl else ratio - 1 - math.log(ratio)
            sums["clip_fraction"] += abs(ratio - 1) > config.clip
        return {name: total / len(table.live) for name, total in sums.items()}

    def loss(self, now: Model) -> float:
        config, parts = self.config, self.parts(now)
        loss = parts["policy_loss"] + config.value_coef * parts["value_loss"] - config.entropy * parts["entropy"]
        return loss + config.kl * parts["kl"]


FIXED = {
    "slow": ("discrete", {"target_period": 2}),
    "slow-raw": ("discrete", {"target_period": 2, "normalize_advantage": False, "lam": 1.0}),
    "slow-kl": ("discrete", {"target_period": 2, "kl": 0.5}),
    "slow-box-kl": ("box", {"target_period": 2, "kl": 0.5}),
    "slow-multi-kl": ("multi", {"target_period": 2, "kl": 0.5}),
    "fast": ("discrete", {}),
    "fast-box-kl": ("box", {"kl": 0.5}),
    "gae": ("discrete", {"correction": "gae"}),
    "gae-multi": ("multi", {"correction": "gae", "target_period": 2, "normalize_advantage": False}),
    "gae-box-kl": ("box", {"correction": "gae", "kl": 0.5}),
}


@pytest.mark.parametrize("name", FIXED)
def test_loss_and_gradient_of_a_fixed_batch_are_those_of_the_formulas(name):
    """P16, P32, P36, P37, P39, P40, P46: signs and factors of all terms; each ratio has its own pair of policies."""
    action, changes = FIXED[name]
    config = dataclasses.replace(CONFIG, **changes)
    algorithm, nets = linear(APPO, config, action)
    batch, start = fixed_batch(action), Model(nets, action)
    slow = config.target_period > 1 and config.correction == "vtrace"
    assert ("target" in nets) is slow
    reference = Reference(config, batch, start, Model(nets["target"], action) if slow else start)
    prepared = algorithm.prepare(nets, batch, ALONE)
    for each in ("body", "policy", "value_body", "value"):  # away from where the batch was prepared
        moved(nets[each], 0.15, seed=11)
    now = Model(nets, action)
    output = algorithm.losses(nets, only_piece(algorithm, prepared))
    for metric, expected in reference.parts(now).items():
        assert output.metrics[metric].item() == pytest.approx(expected, rel=1e-10), metric
    assert 0 < output.metrics["clip_fraction"] < 1, "the batch must hold clipped and unclipped rows"
    assert output.losses["all"].item() == pytest.approx(reference.loss(now), rel=1e-10)
    assert float(output.weight) == len(reference.table.live)
    assert all(not x.requires_grad for x in output.metrics.values())
    check_gradients(nets, output.losses["all"], reference.loss, now)


def test_metrics_say_how_far_the_data_is_from_the_target():
    algorithm, nets = linear(APPO, dataclasses.replace(CONFIG, target_period=2))
    batch, target = fixed_batch(), Model(nets["target"])
    metrics = algorithm.losses(nets, algorithm.prepare(nets, batch, ALONE)).metrics
    table = Table(batch)
    rhos = [table.ratio(target, t, b) for t, b in table.live]
    n = len(rhos)
    assert metrics["rho"].item() == pytest.approx(sum(rhos) / n, rel=1e-10)
    assert metrics["rho_clipped"].item() == pytest.approx(sum(r > 1.5 for r in rhos) / n)
    assert metrics["lag_kl"].item() == pytest.approx(sum(r - 1 - math.log(r) for r in rhos) / n, rel=1e-10)


def one_step(mu: float) -> Unroll:
    """One row of one lane, which ends with a reward of 1."""
    yes = torch.ones(1, 1, dtype=torch.bool)
    return Unroll(
        obs={"obs": torch.zeros(2, 1, 3).double()}, action=torch.zeros(1, 1, dtype=torch.int64),
        reward=torch.ones(1, 1).double(), terminated=yes, truncated=~yes, live=yes,
        logp=torch.full((1, 1), mu).double().log(), state0={}, version=torch.zeros(1, dtype=torch.int64),
        lane=torch.zeros(1, dtype=torch.int64),
    )  # fmt: skip


@pytest.mark.parametrize(("bound", "ratio"), [(2.0, 1.0), (1.0, 0.5), (4.0, 2.0), (1e9, 2.0)])
def test_im1_through_the_loss(bound, ratio):
    """P46: mu .2, target .05, pi .1. The advantage is .25 of the reward: V-trace weighs it with target / mu."""
    changes = {"unroll": 1, "ratio_clip": bound, "clip": 100.0, "normalize_advantage": False, "target_period": 2}
    algorithm, nets = linear(APPO, dataclasses.replace(CONFIG, **changes))
    with torch.no_grad():
        for parameter in nets.parameters():
            parameter.zero_()
        for policy, p in ((nets["policy"], 0.1), (nets["target"]["policy"], 0.05)):
            policy.linear.bias.copy_(torch.tensor([p, (1 - p) / 2, (1 - p) / 2]).log())
    output = algorithm.losses(nets, algorithm.prepare(nets, one_step(0.2), ALONE))
    assert output.metrics["policy_loss"].item() == pytest.approx(-0.25 * ratio, rel=1e-6)


# The ratio starts at 1


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("action", ACTIONS)
def test_on_policy_the_ratio_is_1_before_the_first_minibatch_of_every_update(core, action):
    """P15, P27: whatever the core and the actions, with chunks shorter than unrolls, also after updates."""
    config = APPOConfig(unroll=ROWS, chunk=3, epochs=2, minibatches=2, lr=3e-3, scale_reward=True)
    net = dataclasses.replace(CORES[core], normalize_obs=True)
    set_up = rig(APPO, config, lambda: ScriptedLanes(action=ACTIONS[action], offset=5.0), net, actors=2)
    nets = set_up.learner.nets
    for _ in range(3):
        batch = set_up.collect()
        metrics = set_up.algorithm.losses(nets, set_up.prepared(batch)).metrics
        assert metrics["rho"].item() == pytest.approx(1.0, abs=1e-5) and metrics["lag_kl"] < 1e-10
        assert metrics["kl"] < 1e-10 and metrics["clip_fraction"] == 0
        before = [p.detach().clone() for p in nets.parameters()]
        set_up.learner.step(batch, 0.0)
        assert all(not torch.equal(p, old) for p, old in zip(nets.parameters(), before)), "P97"
    assert set_up.learner.updates == 12 and set_up.learner.version == 3


@pytest.mark.parametrize("kl", [0.0, 1.0])
@pytest.mark.parametrize("core", CORES)
def test_the_ratio_to_the_target_is_1_with_data_of_older_policies_too(core, kl):
    """The target and the policy see the same recurrent states: those that were stored for each chunk."""
    config = APPOConfig(unroll=12, chunk=3, ratio_clip=1e9, kl=kl)
    set_up = rig(APPO, config, net=CORES[core])
    batch = frozen(set_up.collect())
    shaken(set_up.learner, 0.3)  # the weights have moved on since
    metrics = set_up.algorithm.losses(set_up.learner.nets, set_up.prepared(batch)).metrics
    assert abs(metrics["rho"].item() - 1) > 1e-2 and metrics["lag_kl"] > 1e-3
    assert metrics["kl"] < 1e-10 and metrics["clip_fraction"] == 0


@pytest.mark.parametrize("core", ["gru", "lstm"])
def test_values_of_chunks_are_those_of_the_losses_and_lead_from_one_chunk_to_the_next(core):
    """With lambda 0 the target of a row is bootstrapped from the value that the losses see in the next one."""
    config = APPOConfig(unroll=12, chunk=3, lam=0.0, gamma=0.5, correction="gae", normalize_advantage=False)
    set_up = rig(APPO, config, net=CORES[core])
    set_up.collect()
    batch = frozen(set_up.collect())
    shaken(set_up.learner, 0.3)
    nets, value = set_up.learner.nets, []
    with torch.no_grad():
        for t in range(13):
            if t % 3 == 0 and t < 12:
                state = {name: x[t // 3] for name, x in batch.state0.items()}
            features, state = nets["body"].step({"obs": batch.obs["obs"][t]}, state)
            value.append(nets["value"](features))
            if t < 12:
                state = {name: x * batch.live[t].view(-1, 1, 1) for name, x in state.items()}
    value = torch.stack(value)
    expected = batch.reward + 0.5 * value[1:] * ~batch.terminated
    target = set_up.prepared(batch).value_target.unflatten(1, (4, -1)).transpose(0, 1).flatten(0, 1)
    torch.testing.assert_close(target[batch.live], expected[batch.live], rtol=1e-5, atol=1e-5)


def test_plain_ppo_on_old_data_has_its_ratio_to_what_acted():
    set_up = rig(APPO, APPOConfig(unroll=ROWS, correction="gae", target_period=4))
    batch = frozen(set_up.collect())
    assert "target" not in set_up.learner.nets
    metrics = set_up.algorithm.losses(set_up.learner.nets, set_up.prepared(batch)).metrics
    assert metrics["kl"] < 1e-10
    shaken(set_up.learner, 0.3)
    metrics = set_up.algorithm.losses(set_up.learner.nets, set_up.prepared(batch)).metrics
    assert metrics["kl"] > 1e-3 and metrics["kl"].item() == pytest.approx(metrics["lag_kl"].item(), rel=1e-4)


# Rows


@pytest.mark.parametrize("action", ACTIONS)
def test_dead_rows_weigh_nothing(action):
    """Neither in the loss nor in the statistics of the advantages."""
    config = dataclasses.replace(CONFIG, target_period=2, kl=0.5)
    algorithm, nets = linear(APPO, config, action)
    own = [p for p in nets.parameters() if p.requires_grad]
    outputs = []
    for batch in (fixed_batch(action), with_junk(fixed_batch(action))):
        output = algorithm.losses(nets, algorithm.prepare(nets, batch, ALONE))
        outputs.append((output, torch.autograd.grad(output.losses["all"], own)))
    (a, gradients), (b, others) = outputs
    assert a.losses["all"].item() == pytest.approx(b.losses["all"].item(), rel=1e-13)
    for mine, theirs in zip(gradients, others):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-14)
    for name, value in a.metrics.items():
        torch.testing.assert_close(value, b.metrics[name])


def test_advantages_are_normalised_over_live_rows_and_value_targets_are_not():
    """P18."""
    prepared = {}
    for normalize in (True, False):
        set_up = rig(APPO, APPOConfig(unroll=ROWS, normalize_advantage=normalize), actors=2)
        set_up.collect()
        prepared[normalize] = set_up.prepared(set_up.collect())
    live = prepared[True].weight > 0
    assert 0 < live.sum() < live.numel()
    assert torch.equal(prepared[True].value_target, prepared[False].value_target)
    raw = prepared[False].advantage[live].double()
    expected = (raw - raw.mean()) / raw.std(unbiased=False)
    torch.testing.assert_close(prepared[True].advantage[live].double(), expected, rtol=1e-5, atol=1e-6)


def test_the_loss_is_a_mean():
    """P44: the same unrolls twice leave it as it is, and weigh twice as much."""
    algorithm, nets = linear(APPO, CONFIG)
    batches = (fixed_batch(), repeated(fixed_batch()))
    once, twice = (algorithm.losses(nets, algorithm.prepare(nets, each, ALONE)) for each in batches)
    assert once.losses["all"].item() == pytest.approx(twice.losses["all"].item(), rel=1e-10)
    assert 2 * float(once.weight) == float(twice.weight)


def test_a_batch_without_a_live_row_has_no_gradient():
    algorithm, nets = linear(APPO, dataclasses.replace(CONFIG, kl=1.0))
    batch = dataclasses.replace(fixed_batch(), live=torch.zeros(ROWS, LANES, dtype=torch.bool))
    output = algorithm.losses(nets, algorithm.prepare(nets, batch, ALONE))
    assert output.losses["all"].item() == 0 and float(output.weight) == 0
    assert not any(x.any() for x in torch.autograd.grad(output.losses["all"], list(nets.parameters())))


def test_the_coefficients_weigh_their_losses():
    """P32: the loss is linear in all three, with the signs of a cost, of a bonus, and of a cost."""
    losses = {}
    for weights in ((0.0, 0.0, 1.0), (1.0, 0.0, 1.0), (0.0, 1.0, 1.0), (0.0, 0.0, 2.0)):
        value_coef, entropy, kl = weights
        changes = {"value_coef": value_coef, "entropy": entropy, "kl": kl, "target_period": 2}
        algorithm, nets = linear(APPO, dataclasses.replace(CONFIG, **changes))
        output = algorithm.losses(nets, algorithm.prepare(nets, fixed_batch(), ALONE))
        losses[weights] = output.losses["all"].item()
    told, base = {name: x.item() for name, x in output.metrics.items()}, losses[0.0, 0.0, 1.0]
    assert base == pytest.approx(told["policy_loss"] + told["kl"]) and told["kl"] > 0.01
    assert losses[1.0, 0.0, 1.0] - base == pytest.approx(told["value_loss"])
    assert losses[0.0, 1.0, 1.0] - base == pytest.approx(-told["entropy"])
    assert losses[0.0, 0.0, 2.0] - base == pytest.approx(told["kl"])
