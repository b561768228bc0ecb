"""Deterministic policy gradients: losses by hand, who moves whom, targets, and the config's refusals."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch
from support_dpg import (
    CRITICS,
    DICT,
    SPEC,
    algorithm,
    batch,
    built,
    drawn,
    params_of,
    policy_of,
    q_of,
    score,
    weights,
)
from support_lanes import BOX, DISCRETE, MULTI
from torch import nn

from rookery.algorithms.dpg import DPGBatch
from rookery.core.config import NetConfig
from rookery.core.errors import UsageError
from rookery.core.types import Transitions
from rookery.nets.critic import STD_FLOOR
from rookery.ops.distributional import Mixture, mixture_logp, project
from rookery.roles.learner import Learner

# The critic's loss


def bootstrap(nets: nn.ModuleDict, data: Transitions):
    """The target critic's parameters at the target policy's action."""
    with torch.no_grad():
        return params_of(nets, "target_critic", data.next_obs, policy_of(nets, "target_policy", data.next_obs))


def test_scalar_loss_by_hand():
    learner, data = built(), batch()
    output = score(learner, data)
    q = q_of(learner.nets, "critic", data.obs, data.action)
    error = data.reward + data.discount * bootstrap(learner.nets, data) - q
    torch.testing.assert_close(output.losses["critic"], (data.weight * 0.5 * error**2).mean())
    torch.testing.assert_close(output.priorities, error.abs().detach())
    assert not output.priorities.requires_grad


def test_categorical_loss_by_hand():
    learner, data = built(critic="categorical"), batch()
    output = score(learner, data)
    atoms = torch.linspace(-5, 5, 11)
    target = project(bootstrap(learner.nets, data).softmax(1), atoms, data.reward, data.discount)
    predicted = params_of(learner.nets, "critic", data.obs, data.action).softmax(1)
    torch.testing.assert_close(output.losses["critic"], -(data.weight * (target * predicted.log()).sum(1)).mean())
    torch.testing.assert_close(output.priorities, (target @ atoms - predicted @ atoms).abs().detach())
    assert (data.reward + 5 * data.discount > 5).any() and (data.reward - 5 * data.discount < -5).any()
    torch.testing.assert_close(output.metrics["mass_at_ends"], (target[:, 0] + target[:, -1]).mean())


def test_mixture_loss_is_the_expected_log_density_of_the_target():
    """Against a fine grid over the moved target mixture, on average over draws; where nothing follows, exactly."""
    learner, data = built(critic="mixture"), batch(64)
    data = dataclasses.replace(data, weight=torch.ones(64))
    with torch.no_grad():
        losses = torch.stack([score(learner, data, seed).losses["critic"] for seed in range(100)])
        later, predicted = bootstrap(learner.nets, data), params_of(learner.nets, "critic", data.obs, data.action)
    reward, discount = data.reward.unsqueeze(1), data.discount.unsqueeze(1)
    moved = Mixture(later.log_weight, reward + discount * later.mean, (discount * later.std).clamp(min=1e-2))
    grid = torch.linspace(-40, 40, 16_001).expand(64, -1)
    exact = -(mixture_logp(moved, grid).exp() * mixture_logp(predicted, grid)).sum(1) * (grid[0, 1] - grid[0, 0])
    assert losses.mean().item() == pytest.approx(exact.mean().item(), rel=0.005)
    assert 0 < losses.std() < 0.02 * losses.mean()  # strata leave little noise
    certain = dataclasses.replace(data, discount=torch.zeros(64))
    density = mixture_logp(predicted, reward).mean()
    torch.testing.assert_close(score(learner, certain).losses["critic"].detach(), -density)


@pytest.mark.parametrize("critic", CRITICS)
def test_priorities_are_the_distance_of_means_and_ignore_the_weights(critic):
    learner, data = built(critic=critic, v_min=-50.0, v_max=50.0, atoms=51), batch()
    data = dataclasses.replace(data, reward=data.reward / 2)  # nothing is moved beyond the ends
    q = q_of(learner.nets, "critic", data.obs, data.action)
    later = learner.nets["target_critic"].mean(bootstrap(learner.nets, data))
    output = score(learner, data)
    error = (data.reward + data.discount * later - q).abs().detach()
    torch.testing.assert_close(output.priorities, error, atol=1e-4, rtol=0)
    heavy = score(learner, dataclasses.replace(data, weight=data.weight * 7))
    assert torch.equal(heavy.priorities, output.priorities)
    torch.testing.assert_close(heavy.losses["critic"], output.losses["critic"] * 7)
    torch.testing.assert_close(heavy.losses["actor"], output.losses["actor"])


def test_the_bootstrap_uses_both_target_networks_and_neither_online_one():
    learner, data = built(), batch()

    def td():
        return score(learner, data).priorities

    before = td()
    for name, matters in (("policy", False), ("target_policy", True), ("target_critic", True)):
        kept = copy.deepcopy(learner.nets[name].state_dict())
        with torch.no_grad():
            for parameter in learner.nets[name].parameters():
                parameter.add_(0.1)
        assert torch.equal(td(), before) != matters, name
        learner.nets[name].load_state_dict(kept)
    assert torch.equal(td(), before)


def test_nothing_behind_a_termination_counts():
    learner = built()
    data = dataclasses.replace(batch(), discount=torch.zeros(16))
    other = dataclasses.replace(data, next_obs={"obs": data.next_obs["obs"] * 100})
    one, two = (score(learner, each) for each in (data, other))
    assert torch.equal(one.losses["critic"], two.losses["critic"]) and torch.equal(one.priorities, two.priorities)


def test_the_penalty_on_the_critics_weights_is_half_the_sum_of_squares_and_spares_biases():
    data = batch()
    plain, bound = built(), built(critic_l2=0.02)
    a, b = (score(each, data) for each in (plain, bound))
    kernels = [p for p in bound.nets["critic"].parameters() if p.dim() == 2]
    assert len(kernels) == 3
    torch.testing.assert_close(b.losses["critic"] - a.losses["critic"], 0.01 * sum((p**2).sum() for p in kernels))
    assert torch.equal(a.metrics["critic_loss"], b.metrics["critic_loss"])


def test_returns_without_room_show_at_the_ends():
    learner = built(critic="categorical")
    fits = dataclasses.replace(batch(), reward=torch.zeros(16), discount=torch.zeros(16))
    cut = dataclasses.replace(fits, reward=torch.full((16,), 40.0))
    low, high = (score(learner, each).metrics["mass_at_ends"].item() for each in (fits, cut))
    assert low == pytest.approx(0) and high == pytest.approx(1)


def test_a_mixture_of_needles_has_a_finite_loss_and_gradient():
    learner = built(critic="mixture")
    with torch.no_grad():
        for name in ("critic", "target_critic"):
            learner.nets[name].head.out.weight.zero_()
            learner.nets[name].head.out.bias.copy_(torch.tensor([0.0] * 3 + [5.0, 0.0, -5.0] + [-80.0] * 3))
    predicted = params_of(learner.nets, "critic", batch().obs, batch().action)
    assert predicted.std.max().item() == pytest.approx(5 * STD_FLOOR)
    output = learner.gradients(drawn(learner.algorithm, batch()))
    assert output.losses["critic"].isfinite()
    assert learner.flat["critic"].grad.isfinite().all() and learner.flat["actor"].grad.isfinite().all()


# The policy's loss


class Hill(nn.Module):
    """A critic with Q = -height * sum (a - 1)^2, whatever the state."""

    def __init__(self, height: float = 1.0):
        super().__init__()
        self.height = nn.Parameter(torch.tensor(height))
        self.head = nn.Identity()

    def step(self, obs, state):
        return obs["obs"], state

    def value(self, features, action):
        return -self.height * (action - 1).square().sum(-1)

    def mean(self, params):
        return params


@pytest.mark.parametrize("how", ["none", "element", "norm"])
def test_one_step_of_the_policy_climbs_and_the_hill_stays(how):
    nets, data = built().nets, batch()
    alg = algorithm(clip_action_gradient=how)
    nets["critic"], nets["target_critic"] = Hill(), Hill()
    before = policy_of(nets, "policy", data.obs).detach()
    loss = alg.losses(nets, drawn(alg, data)).losses["actor"]
    assert torch.autograd.grad(loss, nets["critic"].height, allow_unused=True, retain_graph=True) == (None,)
    gradient = torch.autograd.grad(loss, list(nets["policy"].parameters()))
    with torch.no_grad():
        for parameter, slope in zip(nets["policy"].parameters(), gradient):
            parameter.sub_(1e-3 * slope)
    after = policy_of(nets, "policy", data.obs).detach()
    assert (after - 1).square().sum() < (before - 1).square().sum()


def test_without_a_clip_the_policys_gradient_is_that_of_minus_q():
    learner, data = built(clip_action_gradient="none", critic="categorical"), batch()
    surrogate = score(learner, data).losses["actor"]
    direct = -q_of(learner.nets, "critic", data.obs, policy_of(learner.nets, "policy", data.obs)).mean()
    parameters = list(learner.nets["policy"].parameters())
    ours, exact = (torch.autograd.grad(loss, parameters) for loss in (surrogate, direct))
    torch.testing.assert_close(ours, exact)
    metrics = score(learner, data).metrics
    torch.testing.assert_close(metrics["actor_loss"], direct.detach())


def test_the_clip_reaches_the_policy():
    """A steep hill and a gentle one differ only by the clip; the metric tells the slope before it."""
    nets, data = built().nets, batch()
    found = {}
    for height in (10.0, 1e4):
        nets["critic"] = Hill(height)
        for how in ("none", "element"):
            output = algorithm(clip_action_gradient=how).losses(nets, DPGBatch(data, None))
            found[height, how] = torch.autograd.grad(output.losses["actor"], list(nets["policy"].parameters()))
        assert output.metrics["action_gradient"] > height / 10
    torch.testing.assert_close(found[10.0, "element"], found[1e4, "element"])
    assert not torch.allclose(found[10.0, "none"][0], found[1e4, "none"][0])


# Groups, targets, state


@pytest.mark.parametrize("critic", CRITICS)
@pytest.mark.parametrize("spec", [SPEC, DICT], ids=lambda spec: spec.id)
def test_each_loss_moves_its_own_group(critic, spec):
    learner, data = built(critic=critic, spec=spec), batch(spec=spec)
    output = learner.gradients(drawn(learner.algorithm, data))
    for group, other in (("actor", "critic"), ("critic", "actor")):
        alone = built(critic=critic, spec=spec)
        loss = score(alone, data).losses[group]
        theirs = torch.autograd.grad(loss, alone.flat[other].parameters, allow_unused=True, retain_graph=True)
        assert all(x is None for x in theirs)
        alone.flat[group].zero_grad()
        loss.backward()
        assert torch.equal(alone.flat[group].grad, learner.flat[group].grad)
        assert all(p.grad.abs().sum() > 0 for p in learner.flat[group].parameters)
    assert set(output.losses) == {"actor", "critic"}
    assert all(p.grad is None for name in ("target_policy", "target_critic") for p in learner.nets[name].parameters())


def test_metrics_are_detached_numbers():
    for critic in CRITICS:
        learner = built(critic=critic)
        metrics = score(learner, batch()).metrics
        assert all(x.shape == () and not x.requires_grad and x.isfinite() for x in metrics.values())
        assert {"critic_loss", "actor_loss", "q", "td_error", "action_gradient", "action_size"} <= set(metrics)
        assert ("mass_at_ends" in metrics) == (critic == "categorical")


def test_hard_targets_stay_for_a_period_and_are_then_equal():
    learner = built(target_period=3)
    before = weights(learner, "target_policy", "target_critic")
    for update in range(1, 7):
        learner.step(batch(seed=update), 0.0)
        now, online = weights(learner, "target_policy", "target_critic"), weights(learner, "policy", "critic")
        same = {name: torch.equal(now[name], before[name]) for name in now}
        assert set(same.values()) == {update % 3 != 0}
        if update % 3 == 0:
            assert all(torch.equal(now[f"target_{name}"], value) for name, value in online.items())
        before = now


def test_soft_targets_follow_by_tau_in_every_update():
    learner = built(target_period=0, tau=0.25)
    for update in range(3):
        before = weights(learner, "target_policy", "target_critic")
        learner.step(batch(seed=update), 0.0)
        online, now = weights(learner, "policy", "critic"), weights(learner, "target_policy", "target_critic")
        for name, value in online.items():
            torch.testing.assert_close(now[f"target_{name}"], 0.75 * before[f"target_{name}"] + 0.25 * value)


def test_targets_start_as_copies_not_as_references():
    nets = algorithm().nets()
    for name in ("policy", "critic"):
        for mine, theirs in zip(nets[name].parameters(), nets[f"target_{name}"].parameters(), strict=True):
            assert torch.equal(mine, theirs) and mine.data_ptr() != theirs.data_ptr()
            assert mine.requires_grad and not theirs.requires_grad


@pytest.mark.parametrize("critic", CRITICS)
def test_a_resumed_learner_goes_on_exactly(critic):
    first = built(critic=critic, random_start=True, net=NetConfig(normalize_obs=True))
    for seed in range(4):
        first.step(batch(seed=seed), 0.0)
    second = Learner(first.algorithm, seed=1)  # of the same run, from its own start
    second.load(*first.state())
    for seed in range(4, 8):
        reports = [learner.step(batch(seed=seed), 0.5) for learner in (first, second)]
        assert torch.equal(reports[0].priorities, reports[1].priorities)
    mine, theirs = first.state()[0], second.state()[0]
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_observation_statistics_come_from_what_is_trained_on():
    learner = built(net=NetConfig(normalize_obs=True))
    data = batch()
    learner.step(data, 0.0)
    obs = torch.cat([data.obs["obs"]])
    seen = learner.nets["normalizer"](data.obs)["obs"]
    torch.testing.assert_close(seen, (obs - obs.mean(0)) / obs.std(0, correction=0), atol=1e-4, rtol=1e-4)


def test_learning_rates_belong_to_their_groups():
    learner = built(actor_lr=1e-3, critic_lr=1e-2)
    before = weights(learner, "policy", "critic")
    learner.step(batch(), 0.0)
    after = weights(learner, "policy", "critic")
    moved = {name: (after[name] - before[name]).abs().max().item() for name in before}
    assert max(x for name, x in moved.items() if name.startswith("policy")) == pytest.approx(1e-3, rel=0.01)
    assert max(x for name, x in moved.items() if name.startswith("critic")) == pytest.approx(1e-2, rel=0.01)


# What is refused


@pytest.mark.parametrize("action", [DISCRETE, MULTI], ids=lambda spec: spec.kind)
def test_choices_are_refused_with_what_to_use_instead(action):
    with pytest.raises(UsageError, match=r"continuous \(Box\) actions.*dqn, rainbow.*ppo"):
        algorithm(spec=dataclasses.replace(SPEC, action=action))


def test_unbounded_actions_are_said_to_be_held():
    loose = dataclasses.replace(BOX, low=(-1.0, None), high=(1.0, None))
    with pytest.warns(UserWarning, match=r"without bounds.*\[-1, 1\]"):
        alg = algorithm(spec=dataclasses.replace(SPEC, action=loose))
    assert np.array_equal(loose.to_env(np.array([0.5, 0.5], np.float32)), np.array([0.5, 0.5], np.float32))
    assert alg.nets()["policy"].out.out_features == 2


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"unroll": 0}, "unroll"),
        ({"n_step": 0}, "n_step"),
        ({"critic": "categorical", "atoms": 1}, "atoms"),
        ({"critic": "mixture", "components": 0}, "components"),
        ({"critic": "categorical", "v_min": 5.0}, "v_min is 5.0; it must be below algo.v_max, 5.0"),
        ({"critic": "mixture", "v_min": 6.0}, "v_min"),
        ({"target_period": -1}, "target_period"),
        ({"target_period": 0, "tau": 0.0}, "tau"),
        ({"target_period": 0, "tau": 1.5}, "tau"),
        ({"noise_scale": -0.1}, "noise_scale"),
        ({"noise": "ou", "ou_theta": 0.0}, "ou_theta"),
        ({"action_gradient_bound": 0.0}, "action_gradient_bound"),
        ({"second_torso": ("terrain",)}, "second_torso"),
        ({"net": NetConfig(core="gru"), "sequence": 10, "overlap": 10}, "overlap"),
        ({"net": NetConfig(core="gru"), "burn_in": -1}, "burn_in"),
    ],
)
def test_numbers_that_make_no_sense_are_named(changes, said):
    with pytest.raises(UsageError, match=said):
        algorithm(**changes).nets()


def test_a_scalar_critic_does_not_mind_the_range_it_does_not_use():
    assert algorithm(critic="scalar", v_min=0.0, v_max=0.0).config.critic == "scalar"
