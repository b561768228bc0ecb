"""Count, mean and squared deviation of weighted samples, in float64, mergeable over batches, time and ranks.

Merging: Chan, Golub & LeVeque 1979. Averaging the means and variances of parts of unequal size would be wrong.
It keeps no state: a running normaliser is a `Moments` that its owner replaces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Moments(NamedTuple):
    count: Tensor  # type: ignore[assignment]  # [] sum of weights; hides tuple.count
    mean: Tensor  # [...] per feature
    m2: Tensor  # [...] weighted sum of squared deviations from the mean


@torch.no_grad()
def moments(x: Tensor, weight: Tensor | None = None, leading: int | None = None) -> Moments:
    """Moments over the leading dimensions of x, one per remaining feature.

    A weight (or bool mask) covers exactly the dimensions that are folded: x [T, B, F] with weight [T, B] gives [F].
    Without one, `leading` says how many; by default all. What has weight 0 may be NaN.
    """
    if weight is None:
        leading = x.ndim if leading is None else leading
        weight = torch.ones(x.shape[:leading], dtype=torch.float64, device=x.device)
    assert leading in (None, weight.ndim) and weight.shape == x.shape[: weight.ndim], (x.shape, weight.shape, leading)
    features = x.shape[weight.ndim :]
    weight = weight.double().reshape(-1, *[1] * len(features))
    x = torch.where(weight != 0, x.double().reshape(-1, *features), 0.0)
    count = weight.sum()
    mean = (weight * x).sum(0) / _divisor(count)
    return Moments(count, mean, (weight * (x - mean).square()).sum(0))


def merge(a: Moments, b: Moments) -> Moments:
    """Moments of both together."""
    assert a.mean.shape == b.mean.shape, (a.mean.shape, b.mean.shape)
    count = a.count + b.count
    share = b.count / _divisor(count)
    shift = b.mean - a.mean
    return Moments(count, a.mean + shift * share, a.m2 + b.m2 + shift.square() * a.count * share)


def to_sums(m: Moments, pivot: Tensor | float = 0.0) -> Tensor:
    """[3, ...]: count, sum and sum of squares of (x - pivot), which add up: what an all-reduce can carry in one go.

    Every part must use the same pivot. The variance returns with a relative error of 1e-16 (mean - pivot)² / variance:
    0 is fine for advantages; for data far from 0 pass a number near its mean that all ranks know, like a running mean.
    """
    offset = m.mean - pivot
    total = m.count * offset
    return torch.stack([m.count.expand_as(total), total, m.m2 + total * offset])


def from_sums(sums: Tensor, pivot: Tensor | float = 0.0) -> Moments:
    """Moments from (added) `to_sums`."""
    count, total, squares = sums[0].flatten()[0], sums[1], sums[2]
    offset = total / _divisor(count)
    mean = torch.where(count > 0, offset + pivot, 0.0)
    return Moments(count, mean, (squares - total * offset).clamp(min=0))


def pooled(x: Tensor, weight: Tensor, sum_over_ranks: Callable[[Tensor], Tensor]) -> Moments:
    """Moments of all ranks' samples together; `sum_over_ranks` is the identity in one process."""
    return from_sums(sum_over_ranks(to_sums(moments(x, weight))))


def variance(m: Moments, unbiased: bool = False) -> Tensor:
    """Population variance, or Bessel's with weights read as repetitions; 0 if there are too few samples to vary."""
    freedom = m.count - int(unbiased)
    return torch.where(freedom > 0, m.m2 / _divisor(freedom), 0.0)


def normalized(x: Tensor, weight: Tensor | None, mean: Tensor, var: Tensor, eps: float = 1e-8) -> Tensor:
    """(x - mean) / (deviation + eps) in x's dtype; 0 where there is no weight."""
    y = ((x.double() - mean) / (var.sqrt() + eps)).to(x.dtype)
    if weight is None:
        return y
    assert weight.shape == x.shape[: weight.ndim], (x.shape, weight.shape)
    return torch.where(weight.reshape(*weight.shape, *[1] * (x.ndim - weight.ndim)) != 0, y, 0.0)


def _divisor(count: Tensor) -> Tensor:
    return torch.where(count > 0, count, 1.0)
