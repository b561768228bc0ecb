"""h and its inverse: the golden numbers, inverse of each other in float32 also around 0, and odd."""

from __future__ import annotations

import math

import pytest
import torch

from rookery.ops.rescale import EPSILON, rescaled, unrescaled

WIDE = torch.cat([-torch.logspace(-8, 6, 200, dtype=torch.float64), torch.logspace(-8, 6, 200, dtype=torch.float64)])


def textbook(x: float) -> float:
    return math.copysign(math.sqrt(abs(x) + 1) - 1, x) + EPSILON * x


def textbook_inverse(x: float) -> float:
    root = (math.sqrt(1 + 4 * EPSILON * (abs(x) + 1 + EPSILON)) - 1) / (2 * EPSILON)
    return math.copysign(root**2 - 1, x)


def test_golden_numbers():
    """H of the sheet."""
    x = torch.tensor([1.0, 10.0, 100.0, 1000.0], dtype=torch.float64)
    h = torch.tensor([0.41521356, 2.32662479, 9.14987562, 31.63858404], dtype=torch.float64)
    torch.testing.assert_close(rescaled(x), h, rtol=0, atol=1e-8)
    torch.testing.assert_close(rescaled(-x), -h, rtol=0, atol=1e-8)
    inverse = unrescaled(torch.tensor([1.0, 10.0, -1.0], dtype=torch.float64))
    expected = torch.tensor([2.988057, 117.430323, -2.988057], dtype=torch.float64)
    torch.testing.assert_close(inverse, expected, rtol=0, atol=1e-6)


def test_a_target_needs_both_sides():
    """R2T, P82: h(1 + 0.997 h⁻¹(2)); without the scale it would be 2.994."""
    target = rescaled(1 + 0.997 * unrescaled(torch.tensor(2.0, dtype=torch.float64)))
    assert float(target) == pytest.approx(2.15987948, abs=1e-8)


def test_they_are_the_textbook_forms():
    expected = torch.tensor([textbook(x) for x in WIDE.tolist()], dtype=torch.float64)
    torch.testing.assert_close(rescaled(WIDE), expected, rtol=1e-9, atol=1e-12)
    far = WIDE[WIDE.abs() > 1e-2]  # nearer to 0 the textbook's inverse loses digits even in float64
    expected = torch.tensor([textbook_inverse(x) for x in far.tolist()], dtype=torch.float64)
    torch.testing.assert_close(unrescaled(far), expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("dtype, rtol", [(torch.float32, 1e-6), (torch.float64, 1e-14)])
def test_they_undo_each_other_to_the_last_digits_everywhere(dtype, rtol):
    """P81. The textbook's inverse has an absolute error of 1e-4 around 0 in float32, this one 1e-6 of x."""
    x = WIDE.to(dtype)
    torch.testing.assert_close(unrescaled(rescaled(x)), x, rtol=rtol, atol=0)
    torch.testing.assert_close(rescaled(unrescaled(x)), x, rtol=rtol, atol=0)
    assert unrescaled(torch.zeros(1, dtype=dtype)) == 0 == rescaled(torch.zeros(1, dtype=dtype))


def test_another_epsilon_and_none():
    x = torch.linspace(-50, 50, 101, dtype=torch.float64)
    for epsilon in (1e-2, 0.0):
        torch.testing.assert_close(unrescaled(rescaled(x, epsilon), epsilon), x, rtol=1e-12, atol=1e-12)
    assert float(rescaled(torch.tensor(3.0), 0.0)) == 1.0
