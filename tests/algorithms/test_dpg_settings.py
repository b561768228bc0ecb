"""What the settings of deterministic policy gradients do to losses, to the first update and to the networks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support_dpg import algorithm, batch, built, drawn, policy_of, q_of, score
from torch import nn

from rookery.roles.learner import Learner


def updated(learner: Learner) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Of each group the loss's gradient, and how far one update moves the weights."""
    data = batch()
    learner.gradients(drawn(learner.algorithm, data))
    before = {group: (flat.grad.clone(), flat.data.clone()) for group, flat in learner.flat.items()}
    learner.step(data, 0.0)
    return {group: (gradient, old - learner.flat[group].data) for group, (gradient, old) in before.items()}


@pytest.mark.parametrize("eps", [1e-3, 0.4])
def test_the_first_step_is_adams_with_its_epsilon(eps):
    for gradient, step in updated(built(adam_eps=eps, actor_lr=0.1, critic_lr=0.1, max_grad_norm=1e9)).values():
        torch.testing.assert_close(step, 0.1 * gradient / (gradient.abs() + eps), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("bound", [0.01, 0.1, 1e9])
def test_gradients_longer_than_the_bound_are_shortened_to_it_policy_and_critic_each(bound):
    descent = {"adam_eps": 1e6, "actor_lr": 1e6, "critic_lr": 1e6}  # Adam with such an epsilon
    for gradient, step in updated(built(max_grad_norm=bound, **descent)).values():
        assert gradient.norm() > 0.1
        torch.testing.assert_close(step, gradient * min(1.0, bound / gradient.norm().item()), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("bound", [0.2, 0.3])
@pytest.mark.parametrize("how", ["element", "norm"])
def test_the_policy_follows_the_slope_of_the_value_within_its_bound(how, bound):
    learner, data = built(clip_action_gradient=how, action_gradient_bound=bound), batch()
    action = policy_of(learner.nets, "policy", data.obs).detach().requires_grad_()
    (slope,) = torch.autograd.grad(q_of(learner.nets, "critic", data.obs, action).sum(), action)
    size = slope.abs() if how == "element" else slope.norm(dim=1, keepdim=True)
    assert size.min() < bound < size.max()
    expected = -(slope * (bound / size).clamp(max=1) * action).sum(1).mean()
    torch.testing.assert_close(score(learner, data).losses["actor"], expected)


@pytest.mark.parametrize("activation", ["relu", "elu", "tanh"])
@pytest.mark.parametrize("layer_norm", [False, True])
def test_policy_and_critic_are_the_layers_that_are_asked_for(layer_norm, activation):
    """Normalised, the first layer is linear, LayerNorm, tanh; the activation is that of the others."""
    torch.manual_seed(5)
    nets, data, act = algorithm(layer_norm=layer_norm, activation=activation).nets(), batch(), getattr(F, activation)
    for name, parameter in nets.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)

    def by_hand(name: str, x: torch.Tensor) -> torch.Tensor:
        first, second, last = (p for p in nets[name].parameters() if p.dim() > 1)
        x = x @ first.T
        x = F.layer_norm(x, x.shape[-1:]).tanh() if layer_norm else act(x)
        return act(x @ second.T) @ last.T

    obs = data.obs["obs"]
    torch.testing.assert_close(policy_of(nets, "policy", data.obs), by_hand("policy", obs).tanh())
    value = by_hand("critic", torch.cat([obs, data.action], 1)).squeeze(1)
    torch.testing.assert_close(q_of(nets, "critic", data.obs, data.action), value)
