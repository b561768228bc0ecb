"""Optimisers by their names: which one, with which numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rookery.nets.adam import FlatAdam
from rookery.nets.optimizers import make_optimizer
from rookery.nets.rmsprop import FlatAdaGrad, FlatRMSProp


def stepped(name: str, gradients: list[float], lr: float = 1.0, **numbers) -> list[float]:
    """Where a parameter that starts at 0 is after each gradient."""
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    optimizer = make_optimizer(name, parameter, lr, **numbers)
    places = []
    for gradient in gradients:
        parameter.grad.fill_(gradient)
        optimizer.step()
        places.append(parameter.item())
    return places


def test_the_first_step_of_rmsprop_is_tensorflows():
    """RM1: epsilon under the root, a mean square that starts at 1. torch's own would make a step of 5."""
    assert stepped("rmsprop", [1.0], decay=0.99, eps=0.1) == [pytest.approx(-0.953463, abs=1e-6)]
    assert stepped("rmsprop", [1.0], lr=7e-4, decay=0.99, eps=0.1) == [pytest.approx(-0.953463 * 7e-4, rel=1e-5)]


def test_the_mean_of_n_rows_makes_the_steps_of_their_sum_if_epsilon_and_the_first_square_are_scaled():
    """What the papers tuned for sums: with the gradient, both numbers under the root are divided by N²."""
    rows, gradients = 640, [1.0, -3.0, 0.2, 0.0, 5.0]
    sums = stepped("rmsprop", gradients, eps=0.1)
    means = stepped("rmsprop", [g / rows for g in gradients], eps=0.1 / rows**2, start=1 / rows**2)
    assert means == pytest.approx(sums, rel=1e-5)
    slow = stepped("rmsprop", [g / rows for g in gradients], eps=0.1 / rows**2)
    assert abs(slow[0]) < 0.01 * abs(sums[0]), "a square of 1 all but stops the first steps"


def test_each_name_is_its_own_optimiser_with_its_own_numbers():
    parameter = nn.Parameter(torch.zeros(3))
    adam, adagrad, rmsprop = (
        make_optimizer(name, parameter, 0.25, 1e-3, decay=0.75, momentum=0.5, centered=True)
        for name in ("adam", "adagrad", "rmsprop")
    )
    kinds = (FlatAdam, FlatAdaGrad, FlatRMSProp)
    for optimizer, kind in zip((adam, adagrad, rmsprop), kinds):
        assert type(optimizer) is kind and optimizer.parameter is parameter
        assert optimizer.param_groups[0]["lr"] == 0.25 and optimizer.param_groups[0]["eps"] == 1e-3
    numbers = rmsprop.param_groups[0]
    assert (numbers["decay"], numbers["momentum"], numbers["centered"], numbers["start"]) == (0.75, 0.5, True, 1.0)


@pytest.mark.parametrize(("name", "first"), [("adam", 1 / 1.5), ("adagrad", 1 / 1.5), ("rmsprop", 1 / 1.5**0.5)])
def test_epsilon_is_beside_the_root_or_under_it(name, first):
    assert stepped(name, [1.0], eps=0.5) == [pytest.approx(-first, rel=1e-5)]


def test_momentum_and_centering_reach_rmsprop():
    plain = stepped("rmsprop", [1.0, 1.0, 1.0], eps=0.1, decay=0.5)
    fast = stepped("rmsprop", [1.0, 1.0, 1.0], eps=0.1, decay=0.5, momentum=0.9)
    centered = stepped("rmsprop", [1.0, 1.0, 1.0], eps=0.1, decay=0.5, centered=True)
    assert plain[0] == fast[0] and fast[2] < 1.5 * plain[2]
    assert centered[2] < 1.2 * plain[2], "the mean gradient leaves little variance"


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match="sgd"):
        make_optimizer("sgd", nn.Parameter(torch.zeros(1)), 1.0, 0.1)  # type: ignore[arg-type]
