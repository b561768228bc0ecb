"""Images with mean 0 and deviation 1: contrast counts, brightness and its scale do not."""

from __future__ import annotations

import pytest
import torch

from rookery.core.config import NetConfig
from rookery.core.types import ActionSpec, EnvSpec, Leaf
from rookery.nets.cnn import _standardized
from rookery.nets.torso import make_torso


@pytest.mark.parametrize("shape", [(3, 1, 5, 7), (2, 4, 8, 8)])
def test_every_image_has_mean_0_and_deviation_1(shape):
    x = _standardized(torch.rand(shape, generator=torch.Generator().manual_seed(0)))
    torch.testing.assert_close(x.mean((1, 2, 3)), torch.zeros(shape[0]), atol=1e-5, rtol=0)
    torch.testing.assert_close(x.std((1, 2, 3), unbiased=False), torch.ones(shape[0]), atol=1e-3, rtol=0)


def test_an_image_without_contrast_becomes_0():
    assert not _standardized(torch.full((2, 3, 4, 4), 0.7)).any()


@pytest.mark.parametrize("shape", [(4, 24, 24), (24, 24, 3), (24, 24)])
def test_features_depend_on_contrast_and_not_on_brightness(shape):
    spec = EnvSpec("x", {"obs": Leaf(shape, "uint8", "image")}, ActionSpec("discrete", (2,), (0,)))
    image = torch.randint(50, 100, (2, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    for standardize in (True, False):
        torso = make_torso(spec, NetConfig(torso="nips", features=8, standardize=standardize))
        dark, bright = torso({"obs": image}), torso({"obs": 2 * image + 40})
        assert torch.allclose(dark, bright, atol=1e-3) == standardize
