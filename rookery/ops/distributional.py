"""Returns as distributions: on fixed atoms (C51, Bellemare et al. 2017, arXiv:1707.06887) and as mixtures of Gaussians
(D4PG, Barth-Maron et al. 2018, arXiv:1804.08617, appendix A).

Both are moved by the Bellman operator, z -> reward + discount * z, and compared with a prediction by cross-entropy.
`discount` is data, 0 where an episode terminated: gamma and episode ends are not handled here. Inputs are finite.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

HALF_LOG_TAU = 0.5 * math.log(2 * math.pi)
EDGE = 1e-6  # of the unit interval, so that no normal number is infinite


# Atoms


def project(probs: Tensor, atoms: Tensor, reward: Tensor, discount: Tensor) -> Tensor:
    """The distribution of reward + discount * z, put back on the atoms: m of C51's algorithm 1, [N, A].

    probs [N, A] on evenly spaced atoms [A]; reward, discount [N]. What falls beyond the ends is laid on them; what
    falls between two atoms is shared by them, nearer takes more, so that mass is kept, and the mean where none is cut.

    This is the triangular kernel m_i = sum_j p_j * clip(1 - |Tz_j - z_i| / dz, 0, 1) without its [N, A, A] table
    (35 times as fast for 256 x 51). The lower neighbour is at most the last but one: no case where b is an integer.
    """
    count = len(atoms)
    assert count >= 2 and probs.shape == (len(reward), count), (probs.shape, atoms.shape, reward.shape)
    assert reward.shape == discount.shape, (reward.shape, discount.shape)
    first, last = atoms[0], atoms[-1]
    moved = torch.addcmul(reward.unsqueeze(1), discount.unsqueeze(1), atoms)
    place = (moved - first).mul_((count - 1) / (last - first)).clamp_(0, count - 1)  # b, in units of the spacing
    lower = place.long().clamp_(max=count - 2)
    to_upper = probs * (place - lower)
    out = torch.zeros_like(probs).scatter_add(1, lower, probs - to_upper)
    return out.scatter_add(1, lower + 1, to_upper)


def categorical_mean(logits: Tensor, atoms: Tensor) -> Tensor:
    """Mean of the distribution softmax(logits) over the atoms, [..., A] -> [...]."""
    return logits.softmax(-1) @ atoms


def categorical_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """-sum_i target_i * log softmax(logits)_i, [..., A] -> [...]."""
    assert logits.shape == target.shape, (logits.shape, target.shape)
    return -(target * logits.log_softmax(-1)).sum(-1)


def mass_at_ends(target: Tensor, atoms: Tensor, reward: Tensor, discount: Tensor) -> Tensor:
    """Share of the targets' mass on the first and the last atom, [..., A] -> [...]: where returns have no room.

    An end counts if a row of this batch would go beyond it. Mass may lie at an end for good reason: where returns
    cannot be below 0, and most are 0, a distribution that begins at 0 cuts nothing.
    """
    first, last = atoms[0], atoms[-1]
    rounding = 1e-3 * (last - first) / len(atoms)
    below = (torch.addcmul(reward, discount, first) < first - rounding).any()
    above = (torch.addcmul(reward, discount, last) > last + rounding).any()
    return target[..., 0] * below + target[..., -1] * above


# Mixtures


class Mixture(NamedTuple):
    """K Gaussians per row."""

    log_weight: Tensor  # [N, K] normalised
    mean: Tensor  # [N, K]
    std: Tensor  # [N, K] above 0: the caller sets a floor, since a density is unbounded where deviations vanish


def mixture_mean(mixture: Mixture) -> Tensor:
    """[N]"""
    return (mixture.log_weight.exp() * mixture.mean).sum(-1)


def mixture_logp(mixture: Mixture, x: Tensor) -> Tensor:
    """Log-density of the points x [N, P], [N, P]."""
    log_weight, mean, std = mixture
    assert log_weight.shape == mean.shape == std.shape, (log_weight.shape, mean.shape, std.shape)
    z = (x.unsqueeze(-1) - mean.unsqueeze(-2)) / std.unsqueeze(-2)  # [N, P, K]
    scale = (log_weight - std.log() - HALF_LOG_TAU).unsqueeze(-2)
    return torch.logsumexp(torch.addcmul(scale, z, z, value=-0.5), -1)


def stratified_normal(uniform: Tensor) -> Tensor:
    """Standard normal numbers [N, P] from uniform ones in [0, 1): the j-th of a row lies in the j-th of P equal shares.

    A mean over a row has the right expectation, and far less variance than one over independent numbers.
    """
    count = uniform.shape[-1]
    place = (torch.arange(count, device=uniform.device) + uniform) / count
    return torch.special.ndtri(place.clamp_(EDGE, 1 - EDGE))


def mixture_points(mixture: Mixture, reward: Tensor, discount: Tensor, normal: Tensor) -> tuple[Tensor, Tensor]:
    """The distribution of reward + discount * z as weighted points, two tensors [N, K * P].

    Each component is represented by P points, its own share of `normal` [N, P]. They must be new draws for every
    target: a mixture fitted to the same points again and again collapses onto them. Where discount is 0 all
    points coincide with the reward.
    """
    assert mixture.mean.shape[:1] == reward.shape == discount.shape, (mixture.mean.shape, reward.shape, discount.shape)
    assert normal.shape[:1] == reward.shape, (normal.shape, reward.shape)
    z = torch.addcmul(mixture.mean.unsqueeze(-1), mixture.std.unsqueeze(-1), normal.unsqueeze(-2))  # [N, K, P]
    moved = torch.addcmul(reward.view(-1, 1, 1), discount.view(-1, 1, 1), z)
    share = (mixture.log_weight - math.log(normal.shape[-1])).exp().unsqueeze(-1)
    return moved.flatten(1), share.expand_as(moved).flatten(1)


def mixture_cross_entropy(mixture: Mixture, points: Tensor, weights: Tensor) -> Tensor:
    """-sum_j weight_j * log p(point_j), [N]: of a target given as weighted points, relative to the mixture."""
    assert points.shape == weights.shape, (points.shape, weights.shape)
    return -(weights * mixture_logp(mixture, points)).sum(-1)
