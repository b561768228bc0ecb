"""Deterministic policy gradients learn in seconds: the best action of a bandit, and the fixed point of the critic."""

from __future__ import annotations

import pytest
import torch
from support_dpg import DICT, batch, built, policy_of, q_of

from rookery.core.types import Transitions

FAST = {"actor_hidden": (32,), "critic_hidden": (48,), "actor_lr": 5e-3, "critic_lr": 1e-2}


def bandit(rng: torch.Generator, rows: int = 64) -> Transitions:
    """Be at half of what you see; the reward is between -9/4 and 0 per dimension, and nothing follows."""
    obs = torch.rand(rows, 3, generator=rng) * 2 - 1
    action = torch.rand(rows, 2, generator=rng) * 2 - 1
    reward = -(action - obs[:, :2] / 2).square().sum(1)
    return Transitions({"obs": obs}, action, reward, torch.zeros(rows), {"obs": obs}, torch.ones(rows),
                       torch.zeros(rows, dtype=torch.int64))  # fmt: skip


@pytest.mark.parametrize(
    "critic, how", [("scalar", "element"), ("scalar", "none"), ("categorical", "norm"), ("mixture", "norm")]
)
def test_the_policy_finds_the_best_action(critic, how):
    learner = built(critic=critic, v_min=-4.5, v_max=0.5, atoms=21, clip_action_gradient=how, **FAST)
    rng = torch.Generator().manual_seed(3)
    obs = {"obs": torch.rand(256, 3, generator=rng) * 2 - 1}
    best = obs["obs"][:, :2] / 2
    before = (policy_of(learner.nets, "policy", obs) - best).abs().mean().item()
    for _ in range(200):
        report = learner.step(bandit(rng), 0.0)
    after = (policy_of(learner.nets, "policy", obs) - best).abs().mean().item()
    assert before > 0.3 and after < 0.13, (before, after)
    assert report.metrics["q"] > -2


@pytest.mark.parametrize(
    "critic, soft", [("scalar", True), ("scalar", False), ("categorical", False), ("mixture", True)]
)
def test_the_critic_converges_to_the_discounted_sum(critic, soft):
    """Reward 1 for ever with discount 1/2 is worth 2, through the target networks."""
    targets = {"target_period": 0, "tau": 0.2} if soft else {"target_period": 5}
    learner = built(critic=critic, v_min=-1.0, v_max=4.0, atoms=26, **FAST, **targets)
    rng = torch.Generator().manual_seed(4)
    for _ in range(150):
        obs, later = ({"obs": torch.randn(64, 3, generator=rng)} for _ in range(2))
        action = torch.rand(64, 2, generator=rng) * 2 - 1
        learner.step(Transitions(obs, action, torch.ones(64), torch.full((64,), 0.5), later, torch.ones(64),
                                 torch.zeros(64, dtype=torch.int64)), 0.0, tell=False)  # fmt: skip
    q = q_of(learner.nets, "critic", obs, action)
    assert q.mean().item() == pytest.approx(2, abs=0.1) and (q - 2).abs().mean().item() < 0.25


@pytest.mark.parametrize("second", [(), ("eye",)], ids=["standard", "parkour"])
def test_images_and_vectors_are_learnt_from_together(second):
    learner = built(spec=DICT, critic="categorical", second_torso=second, **FAST)
    data = batch(spec=DICT)
    first = learner.step(data, 0.0).metrics["critic_loss"]
    for _ in range(40):
        last = learner.step(data, 0.0).metrics["critic_loss"]
    assert last < 0.7 * first
