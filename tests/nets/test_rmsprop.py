"""Optimisers of the DQN line: TensorFlow's RMSProp against a loop and a golden first step, AdaGrad against torch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from rookery.nets.rmsprop import FlatAdaGrad, FlatRMSProp


def parameter(values) -> nn.Parameter:
    p = nn.Parameter(torch.as_tensor(values, dtype=torch.float32).clone())
    p.grad = torch.zeros_like(p)
    return p


def test_golden_first_step():
    """RM1: 0.953 times the step size, where torch's own takes 5 times."""
    mine, theirs = parameter([0.0]), parameter([0.0])
    a = FlatRMSProp(mine, lr=1.0, decay=0.99, eps=0.1)
    b = torch.optim.RMSprop([theirs], lr=1.0, alpha=0.99, eps=0.1)
    for p, optimizer in ((mine, a), (theirs, b)):
        p.grad.fill_(1.0)
        optimizer.step()
    assert mine.item() == pytest.approx(-0.953463, abs=1e-6) and theirs.item() == pytest.approx(-5.0, abs=1e-5)


@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("momentum", [0.0, 0.95])
def test_it_takes_the_steps_of_the_formula(centered, momentum):
    rng = torch.Generator().manual_seed(3)
    start, gradients = torch.randn(7, generator=rng), torch.randn(9, 7, generator=rng)
    p = parameter(start)
    optimizer = FlatRMSProp(p, 0.02, decay=0.9, eps=1e-3, momentum=momentum, centered=centered, start=0.5)
    x, square, mean, speed = start.tolist(), [0.5] * 7, [0.0] * 7, [0.0] * 7
    for number, gradient in enumerate(gradients):
        lr = 0.02 if number < 5 else 0.005
        optimizer.param_groups[0]["lr"] = lr
        p.grad.copy_(gradient)
        optimizer.step()
        for i, g in enumerate(gradient.tolist()):
            square[i] = 0.9 * square[i] + 0.1 * g * g
            mean[i] = 0.9 * mean[i] + 0.1 * g
            speed[i] = momentum * speed[i] + lr * g / math.sqrt(square[i] - centered * mean[i] ** 2 + 1e-3)
            x[i] -= speed[i]
        torch.testing.assert_close(p.detach(), torch.tensor(x), rtol=1e-5, atol=1e-6)


def test_a_variance_that_rounds_below_nothing_is_nothing():
    p = parameter([0.0])
    optimizer = FlatRMSProp(p, lr=1e-3, decay=0.5, eps=1e-12, centered=True, start=0.0)
    for _ in range(200):  # a constant gradient has a variance of 0
        p.grad.fill_(1 / 3)
        optimizer.step()
        assert math.isfinite(p.item())


def test_adagrad_is_torchs():
    rng = torch.Generator().manual_seed(4)
    start, gradients = torch.randn(50, generator=rng), torch.randn(6, 50, generator=rng)
    mine, theirs = parameter(start), parameter(start)
    a, b = FlatAdaGrad(mine, lr=0.1, eps=1e-8), torch.optim.Adagrad([theirs], lr=0.1, eps=1e-8)
    for gradient in gradients:
        for p, optimizer in ((mine, a), (theirs, b)):
            p.grad.copy_(gradient)
            optimizer.step()
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize(
    "make",
    [lambda p: FlatRMSProp(p, 1e-2, momentum=0.9, centered=True), lambda p: FlatAdaGrad(p, 1e-2)],
    ids=["rmsprop", "adagrad"],
)
def test_state_is_a_dict_of_tensors_with_which_another_goes_on(make):
    """As the learner's checkpoints take it."""
    gradients = torch.randn(4, 10, generator=torch.Generator().manual_seed(5))
    whole, first = parameter(torch.zeros(10)), parameter(torch.zeros(10))
    a, b = make(whole), make(first)
    for gradient in gradients[:2]:
        for p, optimizer in ((whole, a), (first, b)):
            p.grad.copy_(gradient)
            optimizer.step()
    state = b.state[first]
    assert all(x.shape == (10,) and x.dtype == torch.float32 for x in state.values())
    second = parameter(first.detach())
    c = make(second)
    c.state[second] = {name: x.clone() for name, x in state.items()}
    for gradient in gradients[2:]:
        for p, optimizer in ((whole, a), (second, c)):
            p.grad.copy_(gradient)
            optimizer.step()
    assert torch.equal(whole, second)
