"""The value rescaling h of R2D2 (Kapturowski et al. 2019; Pohlen et al. 2018) and its inverse.

    h(x)    = sgn(x) (√(|x| + 1) - 1) + εx
    h⁻¹(x) = sgn(x) (((√(1 + 4ε(|x| + 1 + ε)) - 1) / 2ε)² - 1)

Returns of any size become numbers a network can learn, instead of clipping rewards. Both are written without the
differences of nearly equal numbers that the textbook forms have around 0: there, in float32, the textbook inverse is
wrong by 1e-4.
"""

from __future__ import annotations

from torch import Tensor

EPSILON = 1e-3


def rescaled(x: Tensor, epsilon: float = EPSILON) -> Tensor:
    """h(x): about a square root, invertible because of the small linear part."""
    return x * ((x.abs() + 1).sqrt().add(1).reciprocal() + epsilon)  # √(y + 1) - 1 = y / (√(y + 1) + 1)


def unrescaled(x: Tensor, epsilon: float = EPSILON) -> Tensor:
    """h⁻¹(x)."""
    # With s = √(1 + 4ε(|x| + 1 + ε)), which is 1 + 2ε at 0, the root of h is 1 + |x| k:
    size = x.abs()
    s = (4 * epsilon * (size + (1 + epsilon)) + 1).sqrt()
    k = (2 - 4 * epsilon / (s + (1 + 2 * epsilon))) / (s + 1)
    return x * k * (size * k + 2)
