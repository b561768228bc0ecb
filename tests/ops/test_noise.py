"""Noise of continuous actions: the ladder's ends and factors, the stationary law of the OU process."""

from __future__ import annotations

import math

import pytest
import torch

from rookery.ops.noise import LOWEST, noise_ladder, ornstein_uhlenbeck


def test_the_ladder_runs_from_the_scale_down_in_equal_factors():
    rungs = noise_ladder(8, 0.3)
    assert rungs.dtype == torch.float32 and rungs.shape == (8,)
    assert rungs[0].item() == pytest.approx(0.3) and rungs[-1].item() == pytest.approx(0.3 * LOWEST)
    torch.testing.assert_close(rungs[1:] / rungs[:-1], torch.full((7,), LOWEST ** (1 / 7)))


def test_a_ladder_of_one_is_the_scale_itself():
    assert noise_ladder(1, 0.3).tolist() == pytest.approx([0.3])


def test_no_scale_no_noise():
    assert noise_ladder(4, 0.0).tolist() == [0.0] * 4


def test_ou_by_hand():
    noise = torch.tensor([[1.0, -2.0]])
    out = ornstein_uhlenbeck(noise, 0.25, 0.5, torch.tensor([[2.0, 0.0]]))
    assert out.tolist() == [[1.75, -1.5]]
    assert noise.tolist() == [[1.0, -2.0]]


def test_ou_with_theta_one_forgets_everything_and_is_independent_noise():
    normal = torch.randn(3, 2, generator=torch.Generator().manual_seed(0))
    assert torch.equal(ornstein_uhlenbeck(torch.full((3, 2), 9.0), 1.0, 0.2, normal), normal * 0.2)


def test_ou_has_its_stationary_deviation_and_correlation():
    theta, scale, rng = 0.15, 0.2, torch.Generator().manual_seed(1)
    noise = torch.zeros(20_000, 1)
    for _ in range(60):
        before, noise = noise, ornstein_uhlenbeck(noise, theta, scale, torch.randn(20_000, 1, generator=rng))
    assert noise.std().item() == pytest.approx(scale / math.sqrt(theta * (2 - theta)), rel=0.03)
    correlation = torch.corrcoef(torch.cat([before, noise], 1).T)[0, 1].item()
    assert correlation == pytest.approx(1 - theta, abs=0.02)


def test_lanes_may_have_scales_of_their_own():
    normal = torch.ones(2, 3)
    out = ornstein_uhlenbeck(torch.zeros(2, 3), 0.15, torch.tensor([[0.1], [0.4]]), normal)
    torch.testing.assert_close(out, torch.tensor([[0.1] * 3, [0.4] * 3]))
