"""Noisy layers: the formula with its matrix of noise, one noise for all rows or one for each, and how they start."""

from __future__ import annotations

import math

import pytest
import torch

from rookery.nets.noisy import NoisyLinear, factors


def layer(inputs: int = 5, outputs: int = 3, sigma: float = 0.5) -> NoisyLinear:
    torch.manual_seed(1)
    made = NoisyLinear(inputs, outputs, sigma)
    with torch.no_grad():  # deviations that differ
        made.weight_sigma.mul_(torch.rand(outputs, inputs) + 0.5)
        made.bias_sigma.mul_(torch.rand(outputs) + 0.5)
    return made


def by_the_paper(made: NoisyLinear, x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    noise_in, noise_out = noise[: made.inputs], noise[made.inputs :]
    weight = made.weight + made.weight_sigma * torch.outer(noise_out, noise_in)
    return weight @ x + made.bias + made.bias_sigma * noise_out


def test_it_is_the_paper_s_formula_for_shared_and_for_single_noise():
    made, x = layer(), torch.randn(4, 5)
    noise = factors(4, made.width, generator=torch.Generator().manual_seed(2))
    shared = torch.stack([by_the_paper(made, row, noise[0]) for row in x])
    torch.testing.assert_close(made(x, noise[0]), shared)
    single = torch.stack([by_the_paper(made, row, own) for row, own in zip(x, noise)])
    torch.testing.assert_close(made(x, noise), single)
    time_major = made(x.view(2, 2, 5), noise[0])
    torch.testing.assert_close(time_major, shared.view(2, 2, 3))


def test_without_noise_it_computes_with_its_means():
    """P71."""
    made, x = layer(), torch.randn(4, 5)
    assert torch.equal(made(x), made(x)) and torch.equal(made(x), x @ made.weight.T + made.bias)
    assert torch.equal(made(x, torch.zeros(8)), made(x))


def test_f_is_the_signed_root_of_a_gaussian():
    noise = factors(20_000, generator=torch.Generator().manual_seed(3))
    gaussian = torch.randn(20_000, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(noise, gaussian.sign() * gaussian.abs().sqrt())
    assert abs(float(noise.mean())) < 0.02
    assert float(noise.square().mean()) == pytest.approx(math.sqrt(2 / math.pi), 0.02)


def test_it_starts_within_the_paper_s_bounds():
    torch.manual_seed(4)
    made = NoisyLinear(100, 50, sigma=0.4)
    for mean in (made.weight, made.bias):
        assert 0.08 < float(mean.detach().abs().max()) <= 0.1
    assert torch.all(made.weight_sigma == 0.04) and torch.all(made.bias_sigma == 0.04)


def test_means_and_deviations_both_learn():
    made = layer().double()
    x = torch.randn(4, 5, dtype=torch.float64)
    noise = factors(made.width, generator=torch.Generator().manual_seed(5)).double()
    made(x, noise).square().sum().backward()
    assert all(float(p.grad.abs().min()) > 0 for p in made.parameters())
    parameters = [p.detach().clone().requires_grad_() for p in made.parameters()]
    names = [name for name, _ in made.named_parameters()]

    def run(*values):
        return torch.func.functional_call(made, dict(zip(names, values)), (x, noise))

    assert torch.autograd.gradcheck(run, parameters)
