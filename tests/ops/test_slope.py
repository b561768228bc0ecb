"""Clips of dq/da: element-wise and by norm are two things, and small slopes pass both."""

from __future__ import annotations

import pytest
import torch

from rookery.ops.slope import clipped_slope

SLOPE = torch.tensor([[3.0, -4.0], [0.3, 0.4], [0.0, 0.0]])


@pytest.mark.parametrize(
    "how, bound, first",
    [
        ("none", 1.0, [3.0, -4.0]),
        ("element", 1.0, [1.0, -1.0]),
        ("norm", 1.0, [0.6, -0.8]),
        ("element", 3.5, [3.0, -3.5]),
        ("norm", 2.5, [1.5, -2.0]),
        ("norm", 6.0, [3.0, -4.0]),
    ],
)
def test_golden_vectors(how, bound, first):
    torch.testing.assert_close(clipped_slope(SLOPE, how, bound), torch.tensor([first, [0.3, 0.4], [0.0, 0.0]]))


def test_the_norm_keeps_every_direction_on_any_leading_axes():
    slope = torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(0)) * 10
    held = clipped_slope(slope, "norm", 0.5)
    torch.testing.assert_close(held.norm(dim=-1), slope.norm(dim=-1).clamp(max=0.5))
    torch.testing.assert_close(torch.cosine_similarity(held, slope, -1), torch.ones(4, 5))


def test_another_word_is_refused():
    with pytest.raises(AssertionError):
        clipped_slope(SLOPE, "elements", 1.0)
