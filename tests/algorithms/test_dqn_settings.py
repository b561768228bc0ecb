"""What DQN's settings do to the first update and to the first networks."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from support_dqn import SPEC, algorithm, built, minibatch, transitions

from rookery.core.config import NetConfig
from rookery.core.types import Leaf

HIDDEN = NetConfig(hidden=(8,))


def updated(learner, items) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss's gradient, and how far one update moves the weights."""
    learner.gradients(minibatch(learner, items))
    flat = learner.flat["all"]
    gradient, before = flat.grad.clone(), flat.data.clone()
    learner.step(items, 0.0)
    return gradient, before - flat.data


# The first update

FIRST_STEPS = {  # of a gradient g, with a decay of 0.75; RMSProp's mean square starts at 1
    "adam": lambda g, eps: g / (g.abs() + eps),
    "rmsprop": lambda g, eps: g / (0.75 + 0.25 * g**2 - (0.25 * g) ** 2 + eps).sqrt(),
    "adagrad": lambda g, eps: g / (g.abs() + eps),
}


@pytest.mark.parametrize("eps", [1e-3, 0.4])
@pytest.mark.parametrize("optimizer", FIRST_STEPS)
def test_the_first_step_is_the_optimisers_with_its_epsilon(optimizer, eps):
    learner = built(optimizer=optimizer, optimizer_eps=eps, lr=0.1, decay=0.75)
    gradient, step = updated(learner, dataclasses.replace(transitions(), weight=torch.full((8,), 9.0)))
    assert gradient.abs().max() > 1  # where the square of the mean matters
    torch.testing.assert_close(step, 0.1 * FIRST_STEPS[optimizer](gradient, eps), rtol=1e-4, atol=1e-6)


def test_with_momentum_a_step_goes_on_by_its_share_of_the_last_one():
    plain, heavy = (built(optimizer="rmsprop", lr=0.1, momentum=momentum) for momentum in (0.0, 0.9))
    steps = [[updated(learner, transitions(seed=seed))[1] for seed in (0, 1)] for learner in (plain, heavy)]
    torch.testing.assert_close(steps[1], [steps[0][0], steps[0][1] + 0.9 * steps[0][0]], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("bound", [0.01, 0.1, 1e9])
def test_gradients_longer_than_the_bound_are_shortened_to_it(bound):
    learner = built(HIDDEN, max_grad_norm=bound, lr=1e6, optimizer_eps=1e6)  # Adam with such an epsilon: plain descent
    gradient, step = updated(learner, transitions())
    assert gradient.norm() > 0.1
    torch.testing.assert_close(step, gradient * min(1.0, bound / gradient.norm().item()), rtol=1e-4, atol=1e-6)


def test_the_trunk_of_two_streams_learns_with_its_gradient_scaled_and_the_streams_with_theirs():
    plain, scaled = (built(HIDDEN, dueling=True, stream=5, trunk_scale=on) for on in (False, True))
    for learner in (plain, scaled):
        learner.gradients(minibatch(learner, transitions()))
    for name, factor in (("body", 1 / math.sqrt(2)), ("q", 1.0)):
        for before, after in zip(plain.nets[name].parameters(), scaled.nets[name].parameters(), strict=True):
            assert before.grad.any()
            torch.testing.assert_close(after.grad, factor * before.grad)


# The first networks


@pytest.mark.parametrize("sigma", [0.1, 0.5, 2.0])
def test_noise_starts_with_a_deviation_of_sigma_over_the_root_of_the_inputs(sigma):
    head = algorithm(noisy=True, noisy_sigma=sigma).nets()["q"]
    x = transitions().obs["obs"]
    moved = head(x, torch.ones(head.noise)) - head(x)
    torch.testing.assert_close(moved, (sigma / math.sqrt(3) * (x.sum(1, keepdim=True) + 1)).expand(8, 3))


@pytest.mark.parametrize(
    "leaf", [Leaf((3,), "float32", "vector"), Leaf((2, 10, 10), "uint8", "image")], ids=lambda leaf: leaf.kind
)
def test_torsos_start_uniform_within_one_over_the_root_of_the_inputs(leaf):
    torch.manual_seed(5)
    spec = dataclasses.replace(SPEC, obs={"obs": leaf})
    torso = algorithm(NetConfig(hidden=(64, 128), features=64), spec).nets()["body"].torso
    weights, biases = ([p.detach() for p in torso.parameters() if (p.dim() == 1) == bias] for bias in (False, True))
    for weight, bias in zip(weights, biases, strict=True):
        bound = 1 / math.sqrt(weight[0].numel())
        for values in (weight / bound, bias / bound):
            assert 0.9 < values.abs().max() <= 1
            assert values.std().item() == pytest.approx(1 / math.sqrt(3), rel=0.2)
