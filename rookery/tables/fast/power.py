"""Priorities to the power of alpha, four at a time.

Measured for 512 priorities: 2.5 microseconds, checks and bounds included. numpy's power alone takes 2.0 (5.8 without
AVX-512); with the same checks and bounds, an update of 512 priorities takes 49 microseconds instead of 42, and an
insertion of 50 items 38 instead of 29.

The kernel is plain arithmetic that a compiler turns into vector code, and gives the same bits with numba and with
numpy: x = m * 2^e with m in [sqrt(1/2), sqrt(2)); log2(m) is a series in (m-1)/(m+1); 2^y is 2^n times a series in
y - n. Within 1e-13 of the exact value. Not a general power: no negative, no infinite numbers.
"""

from __future__ import annotations

import math

import numpy as np

from rookery.tables.fast import kernel
from rookery.tables.fast.sum_tree import LARGEST, TINY

_LOG = tuple(2 / math.log(2) / k for k in range(17, 0, -2))  # atanh, highest power first
_EXP = tuple(math.log(2) ** k / math.factorial(k) for k in range(13, -1, -1))
_BIAS = 1023 << 52  # exponent of 1.0, in the bits of a float64
_ROOT = 0x3FE6A09E667F3BCD - _BIAS  # sqrt(1/2), without the bias
_WHOLE = 2.0**52  # added to a small whole number, that number stands in the lowest bits
_WHOLE_BITS = 0x433 << 52
_ROUND = 1.5 * 2.0**52  # added to a small number and taken away again: the nearest whole number
_LEAST = 1e-300  # smaller numbers count as this one, whose bits are still those of a normal float
_HIGHEST, _LOWEST = 960.0, -996.0  # exponents of 2, so that results stay between TINY and LARGEST

_SIGNATURE = "boolean(float64[::1], float64, float64, float64[::1])"


def _power(x, alpha, zero, out) -> bool:
    """Each step is a loop of its own: integers and floats in turn, on the same memory, as a compiler can vectorise."""
    n, valid = len(x), True
    bits, scale_bits = np.empty(n, np.int64), np.empty(n, np.int64)
    part, scale = bits.view(np.float64), scale_bits.view(np.float64)
    for k in range(n):
        valid &= (x[k] >= 0.0) & (x[k] < np.inf)
        part[k] = max(x[k], _LEAST)
    for k in range(n):
        exponent = (bits[k] - _ROOT) >> 52
        bits[k] -= (exponent - 1023) << 52
        scale_bits[k] = exponent | _WHOLE_BITS
    for k in range(n):
        s = (part[k] - 1.0) / (part[k] + 1.0)
        square, y = s * s, 0.0
        for c in _LOG:
            y = y * square + c
        y = alpha * ((scale[k] - (_WHOLE + 1023.0)) + y * s)
        y = min(max(y, _LOWEST), _HIGHEST)
        rounded = y + _ROUND
        y -= rounded - _ROUND
        series = 0.0
        for c in _EXP:
            series = series * y + c
        part[k], scale[k] = series, rounded
    for k in range(n):
        scale_bits[k] = (scale_bits[k] + 1023) << 52
    for k in range(n):
        result = part[k] * scale[k]
        out[k] = result if x[k] > 0.0 else zero
    return valid


def _power_numpy(x, alpha, zero, out) -> bool:
    bits = np.maximum(x, _LEAST).view(np.int64)
    exponent = (bits - _ROOT) >> 52
    m = (bits - ((exponent - 1023) << 52)).view(np.float64)
    s = (m - 1.0) / (m + 1.0)
    square, y = s * s, 0.0
    for c in _LOG:
        y = y * square + c
    y = alpha * (((exponent | _WHOLE_BITS).view(np.float64) - (_WHOLE + 1023.0)) + y * s)
    y = np.minimum(np.maximum(y, _LOWEST), _HIGHEST)
    rounded = y + _ROUND
    y -= rounded - _ROUND
    series = np.zeros(len(x))
    for c in _EXP:
        series = series * y + c
    scale = ((rounded.view(np.int64) + 1023) << 52).view(np.float64)
    out[:] = np.where(x > 0.0, series * scale, zero)
    return bool(((x >= 0.0) & (x < np.inf)).all())


class Power:
    """p -> p^alpha, between TINY and LARGEST.

    A priority of 0 becomes the limit: TINY, which is never drawn beside any other (LARGEST if alpha is negative). So
    an item is told from an empty leaf, and items that all have priority 0 are drawn equally often. 0^0 is 1.
    """

    def __init__(self, alpha: float):
        if not math.isfinite(alpha):
            raise ValueError(f"alpha is {alpha}: it must be finite")
        self.alpha = float(alpha)
        self._zero = 1.0 if alpha == 0 else TINY if alpha > 0 else LARGEST
        self._kernel = kernel.pick(_power, _SIGNATURE, _power_numpy)

    def __call__(self, priority: np.ndarray) -> np.ndarray:
        priority = kernel.plain(priority, np.float64)
        out = np.empty(len(priority))
        if not self._kernel(priority, self.alpha, self._zero, out):
            worst = priority[~((priority >= 0) & (priority < np.inf))][0]
            raise ValueError(f"a priority is {worst}: they must be finite and not negative")
        return out
