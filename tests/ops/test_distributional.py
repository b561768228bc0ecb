"""Distributional operators: the paper's golden vectors, the naive sum, conserved mass and mean, unbiased strata."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from rookery.ops.distributional import (
    Mixture,
    categorical_cross_entropy,
    categorical_mean,
    mass_at_ends,
    mixture_cross_entropy,
    mixture_logp,
    mixture_mean,
    mixture_points,
    project,
    stratified_normal,
)

F64 = torch.float64
ATOMS = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0])
PROBS = torch.tensor([[0.1, 0.2, 0.4, 0.2, 0.1]])

GOLDEN = {
    "a": (0.5, 0.9, [0.03, 0.15, 0.32, 0.32, 0.18]),
    "b terminal": (0.3, 0.0, [0.0, 0.0, 0.7, 0.3, 0.0]),
    "c beyond the end": (5.0, 0.9, [0.0, 0.0, 0.0, 0.0, 1.0]),
    "d identity": (0.0, 1.0, [0.1, 0.2, 0.4, 0.2, 0.1]),
    "e one atom on": (1.0, 1.0, [0.0, 0.1, 0.2, 0.4, 0.3]),
    "c mirrored": (-5.0, 0.9, [1.0, 0.0, 0.0, 0.0, 0.0]),
    "terminal on the last atom": (2.0, 0.0, [0.0, 0.0, 0.0, 0.0, 1.0]),
    "terminal on the first atom": (-2.0, 0.0, [1.0, 0.0, 0.0, 0.0, 0.0]),
}


def kernel(probs, atoms, reward, discount):
    """The triangular kernel as written in the paper, in plain Python numbers."""
    low, high, count = atoms[0], atoms[-1], len(atoms)
    spacing = (high - low) / (count - 1)
    moved = [min(max(reward + discount * z, low), high) for z in atoms]
    return [
        sum(p * min(max(1 - abs(t - z) / spacing, 0.0), 1.0) for p, t in zip(probs, moved, strict=True)) for z in atoms
    ]


@pytest.mark.parametrize("name", GOLDEN)
def test_c51_golden_vectors(name):
    reward, discount, expected = GOLDEN[name]
    out = project(PROBS, ATOMS, torch.tensor([reward]), torch.tensor([discount]))
    torch.testing.assert_close(out, torch.tensor([expected]), atol=1e-6, rtol=0)
    assert out.sum().item() == pytest.approx(1, abs=1e-6)


def test_rows_do_not_mix():
    rewards = torch.tensor([x[0] for x in GOLDEN.values()])
    discounts = torch.tensor([x[1] for x in GOLDEN.values()])
    out = project(PROBS.expand(len(GOLDEN), -1), ATOMS, rewards, discounts)
    torch.testing.assert_close(out, torch.tensor([x[2] for x in GOLDEN.values()]), atol=1e-6, rtol=0)


@settings(max_examples=150, deadline=None)
@given(
    count=st.integers(2, 60),
    low=st.floats(-150, 100),
    width=st.floats(0.1, 300),
    reward=st.floats(-400, 400),
    discount=st.floats(0, 1),
    seed=st.integers(0, 2**31),
)
def test_any_support_gives_the_naive_sum_and_keeps_its_mass(count, low, width, reward, discount, seed):
    atoms = torch.linspace(low, low + width, count, dtype=F64)
    probs = torch.rand(1, count, dtype=F64, generator=torch.Generator().manual_seed(seed)).softmax(1)
    out = project(probs, atoms, torch.tensor([reward], dtype=F64), torch.tensor([discount], dtype=F64))
    naive = kernel(probs[0].tolist(), atoms.tolist(), reward, discount)
    torch.testing.assert_close(out[0], torch.tensor(naive, dtype=F64), atol=1e-9, rtol=0)
    assert out.min() >= 0 and out.sum().item() == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("low, high, count", [(-10, 10, 51), (-150, 150, 51), (0, 1, 2), (-3, 97, 101)])
def test_single_precision_keeps_mass_and_mean_on_large_batches(low, high, count):
    rng = torch.Generator().manual_seed(3)
    atoms = torch.linspace(low, high, count)
    probs = torch.randn(4096, count, generator=rng).mul(3).softmax(1)
    discount = torch.rand(4096, generator=rng) * 0.5
    reward = (1 - discount) * (low + (high - low) * torch.rand(4096, generator=rng))  # stays within the support
    out = project(probs, atoms, reward, discount)
    torch.testing.assert_close(out.sum(1), torch.ones(4096), atol=2e-6, rtol=0)
    torch.testing.assert_close(out @ atoms, reward + discount * (probs @ atoms), atol=2e-5 * (high - low), rtol=0)


def test_projecting_twice_by_integers_is_projecting_once():
    one, zero = torch.tensor([1.0]), torch.tensor([0.0])
    there = project(project(PROBS, ATOMS, one, one), ATOMS, zero, one)
    torch.testing.assert_close(there, project(PROBS, ATOMS, one, one))


def test_projection_leaves_its_inputs_alone():
    probs, reward, discount = PROBS.clone(), torch.tensor([0.5]), torch.tensor([0.9])
    project(probs, ATOMS, reward, discount)
    assert torch.equal(probs, PROBS) and reward.item() == 0.5 and discount.item() == pytest.approx(0.9)


def test_shapes_that_would_broadcast_are_refused():
    with pytest.raises(AssertionError):
        project(PROBS, ATOMS, torch.zeros(3), torch.zeros(3))
    with pytest.raises(AssertionError):
        project(PROBS, ATOMS[:4], torch.zeros(1), torch.zeros(1))
    with pytest.raises(AssertionError):
        project(PROBS, ATOMS, torch.zeros(1), torch.zeros(()))


def test_mean_and_cross_entropy_of_a_categorical():
    logits = PROBS.log()
    assert categorical_mean(logits + 7, ATOMS).item() == pytest.approx(0, abs=1e-6)
    assert categorical_mean(logits, ATOMS + 3).item() == pytest.approx(3, abs=1e-6)
    entropy = -(PROBS * logits).sum()
    torch.testing.assert_close(categorical_cross_entropy(logits, PROBS)[0], entropy)
    other = torch.tensor([[0.0, 0.0, 0.0, 0.0, 1.0]])
    assert categorical_cross_entropy(logits, other).item() == pytest.approx(-math.log(0.1), rel=1e-6)


def test_cross_entropy_is_least_at_the_target_and_its_gradient_is_the_difference():
    logits = torch.randn(1, 5, dtype=F64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    target = PROBS.to(F64)
    categorical_cross_entropy(logits, target).sum().backward()
    torch.testing.assert_close(logits.grad, logits.softmax(1).detach() - target / target.sum())


def mass_cut(reward: list[float], discount: list[float], probs: list[float]) -> list[float]:
    reward, discount = torch.tensor(reward), torch.tensor(discount)
    target = project(torch.tensor(probs).expand(len(reward), -1), ATOMS, reward, discount)
    return mass_at_ends(target, ATOMS, reward, discount).tolist()


def test_mass_at_ends_tells_returns_that_do_not_fit():
    assert mass_cut([0.0], [0.5], [0.1, 0.2, 0.4, 0.2, 0.1]) == [pytest.approx(0)]
    assert mass_cut([9.0], [0.5], [0.1, 0.2, 0.4, 0.2, 0.1]) == [pytest.approx(1)]
    assert mass_cut([-9.0], [0.5], [0.1, 0.2, 0.4, 0.2, 0.1]) == [pytest.approx(1)]


def test_mass_at_an_end_beyond_which_nothing_goes_is_not_cut():
    """A range may be exact: -2 is the worst that can happen, and mostly happens."""
    worst = [1.0, 0.0, 0.0, 0.0, 0.0]
    assert mass_cut([-0.2, 0.0], [0.9, 1.0], worst) == [0, 0]
    assert mass_cut([-2.0, 0.0], [0.0, 0.0], worst) == [0, 0]


def test_an_end_that_one_row_goes_beyond_counts_for_the_batch():
    """Rewards may be rare: the rows without one have piled up there all the same."""
    assert mass_cut([0.0, 0.0, 0.5], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0, 1.0]) == [1, 1, 1]
    assert mass_cut([0.0, 0.0, 0.5], [1.0, 1.0, 1.0], [0.5, 0.0, 0.5, 0.0, 0.0]) == [0, 0, 0]


# Mixtures


def mixture(rows: int, components: int, seed: int = 0) -> Mixture:
    rng = torch.Generator().manual_seed(seed)
    return Mixture(
        torch.randn(rows, components, dtype=F64, generator=rng).log_softmax(1),
        torch.randn(rows, components, dtype=F64, generator=rng) * 2,
        torch.rand(rows, components, dtype=F64, generator=rng) + 0.3,
    )


def normal(rows: int, count: int, seed: int = 7) -> torch.Tensor:
    return stratified_normal(torch.rand(rows, count, dtype=F64, generator=torch.Generator().manual_seed(seed)))


def test_log_density_equals_torch_distributions():
    mix = mixture(4, 3)
    x = torch.randn(4, 6, dtype=F64, generator=torch.Generator().manual_seed(5)) * 3
    oracle = torch.distributions.MixtureSameFamily(
        torch.distributions.Categorical(logits=mix.log_weight), torch.distributions.Normal(mix.mean, mix.std)
    )
    torch.testing.assert_close(mixture_logp(mix, x), oracle.log_prob(x.T).T)
    torch.testing.assert_close(mixture_mean(mix), oracle.mean)


def test_the_density_integrates_to_one():
    grid = torch.linspace(-30, 30, 20_001, dtype=F64)
    total = mixture_logp(mixture(2, 5), grid.expand(2, -1)).exp().sum(1) * (grid[1] - grid[0])
    torch.testing.assert_close(total, torch.ones(2, dtype=F64))


@pytest.mark.parametrize("count", [1, 4, 9])
def test_strata_are_normal_numbers_one_of_each_share(count):
    x = normal(20_000, count)
    share = torch.special.ndtr(x) * count
    assert torch.equal(share.floor(), torch.arange(count, dtype=F64).expand_as(x))
    assert x.mean().abs() < 0.02 and x.var().item() == pytest.approx(1, abs=0.03)
    assert (x**4).mean().item() == pytest.approx(3, abs=0.15)
    assert x.mean(1).std() < 1.05 / count  # independent numbers would have 1 / sqrt(count)


def test_strata_are_finite_at_the_ends_of_the_unit_interval():
    for dtype in (torch.float32, F64):
        ends = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=dtype)
        assert stratified_normal(ends).isfinite().all()


def test_points_have_the_mean_and_variance_of_the_moved_mixture():
    mix, reward, discount = mixture(3, 4), torch.tensor([1.0, -2.0, 0.5], dtype=F64), torch.tensor([0.9, 0.5, 0.0])
    discount = discount.to(F64)
    points, weights = mixture_points(mix, reward, discount, normal(3, 20_000))
    assert points.shape == weights.shape == (3, 80_000)
    mean = (weights * points).sum(1)
    torch.testing.assert_close(mean, reward + discount * mixture_mean(mix), atol=1e-3, rtol=0)
    share = mix.log_weight.exp()
    variance = (share * (mix.std**2 + mix.mean**2)).sum(1) - mixture_mean(mix) ** 2
    spread = (weights * (points - mean.unsqueeze(1)) ** 2).sum(1)
    torch.testing.assert_close(spread, discount**2 * variance, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(weights.sum(1), torch.ones(3, dtype=F64))


def test_without_a_future_every_point_is_the_reward():
    reward = torch.tensor([7.0, -1.0], dtype=F64)
    points, _ = mixture_points(mixture(2, 3), reward, torch.zeros_like(reward), normal(2, 5))
    assert torch.equal(points, reward.unsqueeze(1).expand(2, 15))


def test_cross_entropy_with_a_single_gaussian():
    """H(p, q) = log sd_q + (sd_p^2 + (mean_p - mean_q)^2) / (2 sd_q^2) + log(2 pi) / 2."""
    one = torch.zeros(1, 1, dtype=F64)
    target = Mixture(one, one + 2.0, one + 0.7)
    predicted = Mixture(one, one - 1.0, one + 1.5)
    points, weights = mixture_points(target, one[0], one[0] + 1, normal(1, 20_000))
    exact = math.log(1.5) + (0.7**2 + 3.0**2) / (2 * 1.5**2) + 0.5 * math.log(2 * math.pi)
    assert mixture_cross_entropy(predicted, points, weights).item() == pytest.approx(exact, rel=1e-4)


def test_cross_entropy_of_mixtures_is_that_of_a_fine_grid_on_average():
    """Few strata are enough, for they are drawn anew each time: their expectation has no error."""
    target, predicted = mixture(3, 4, seed=1), mixture(3, 4, seed=2)
    reward, discount = torch.tensor([0.3, -1.0, 2.0], dtype=F64), torch.tensor([0.9, 0.8, 0.95], dtype=F64)
    moved = Mixture(
        target.log_weight, reward.unsqueeze(1) + discount.unsqueeze(1) * target.mean, discount.unsqueeze(1) * target.std
    )
    grid = torch.linspace(-30, 30, 20_001, dtype=F64).expand(3, -1)
    exact = -(mixture_logp(moved, grid).exp() * mixture_logp(predicted, grid)).sum(1) * (grid[0, 1] - grid[0, 0])
    many, rows = 20_000, torch.arange(3).repeat(20_000)
    target, predicted = (Mixture(*(x[rows] for x in each)) for each in (target, predicted))
    points = mixture_points(target, reward[rows], discount[rows], normal(3 * many, 4))
    found = mixture_cross_entropy(predicted, *points).view(many, 3)
    torch.testing.assert_close(found.mean(0), exact, atol=0.01, rtol=0)


def test_cross_entropy_has_the_right_gradient():
    mix = mixture(2, 3)
    zero = torch.zeros(2, dtype=F64)
    points, weights = mixture_points(mixture(2, 3, seed=4), zero, zero + 1, normal(2, 3))

    def loss(log_weight, mean, std):
        return mixture_cross_entropy(Mixture(log_weight, mean, std), points, weights)

    assert gradcheck(loss, [x.clone().requires_grad_() for x in mix])


def test_far_away_points_have_a_finite_density_and_gradient():
    mean = torch.tensor([[0.0, 1.0]], requires_grad=True)
    std = torch.full((1, 2), 1e-8, requires_grad=True)
    mix = Mixture(torch.full((1, 2), math.log(0.5)), mean, std)
    loss = mixture_cross_entropy(mix, torch.tensor([[100.0, 0.5]]), torch.tensor([[0.5, 0.5]]))
    loss.sum().backward()
    assert loss.isfinite().all() and mean.grad.isfinite().all() and std.grad.isfinite().all()
