"""Targets and losses of Q-learning: double-Q (van Hasselt et al. 2016), n-step sums of sequences, Huber with a bound.

A target is reward + discount * bootstrap with both factors as data: a replay memory of transitions stores them, and
`nstep` makes them of the rows of a sequence. In either case discount is gamma^m for m <= n steps, and 0 if the episode
terminated within them; the bootstrap is the value of the state m steps later, the final one where an episode ends.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from rookery.ops.rescale import rescaled, unrescaled


class NStep(NamedTuple):
    reward: Tensor  # [T, B] discounted sum of the rewards of m <= n steps
    discount: Tensor  # [T, B] gamma^m, or 0 if the episode terminated within them
    row: Tensor  # [T, B] int64, t + m: which of the T+1 states follows


def at_action(out: Tensor, action: Tensor) -> Tensor:
    """What belongs to an action: out [..., A] -> [...], or out [..., A, Z] -> [..., Z]; action [...]."""
    if out.ndim == action.ndim + 1:
        return out.gather(-1, action.unsqueeze(-1)).squeeze(-1)
    assert out.ndim == action.ndim + 2, (out.shape, action.shape)
    index = action[..., None, None].expand(*action.shape, 1, out.shape[-1])
    return out.gather(-2, index).squeeze(-2)


@torch.no_grad()
def nstep(reward: Tensor, discount: Tensor, continues: Tensor, n: int) -> NStep:
    """Every row's sum of up to n steps; fewer at an episode's end and at the end of the rows.

    reward, discount (gamma, 0 where terminated) and continues (0 where the episode ends) are [T, B], as in `returns`.
    """
    assert reward.shape == discount.shape == continues.shape, (reward.shape, discount.shape, continues.shape)
    assert n >= 1, n
    last = torch.zeros_like(continues, dtype=torch.bool)
    last[-1] = True
    stops = last | (continues == 0)
    total, product, steps = reward, discount, torch.ones_like(reward, dtype=torch.int64)
    for _ in range(min(n, len(reward)) - 1):  # k steps from here are one step, then k - 1 steps from the next row
        total = torch.where(stops, reward, reward + discount * total.roll(-1, 0))
        product = torch.where(stops, discount, discount * product.roll(-1, 0))
        steps = torch.where(stops, 1, 1 + steps.roll(-1, 0))
    return NStep(total, product, steps + torch.arange(len(reward), device=reward.device).unsqueeze(1))


@torch.no_grad()
def td_target(reward: Tensor, discount: Tensor, bootstrap: Tensor, rescale: bool = False) -> Tensor:
    """reward + discount * bootstrap; with rescaling h(reward + discount * h⁻¹(bootstrap))."""
    assert reward.shape == discount.shape == bootstrap.shape, (reward.shape, discount.shape, bootstrap.shape)
    if rescale:
        return rescaled(torch.addcmul(reward, discount, unrescaled(bootstrap)))
    return torch.addcmul(reward, discount, bootstrap)


def huber(value: Tensor, target: Tensor, bound: float) -> Tensor:
    """Half the squared error up to the bound, linear beyond: its gradient is the error, clipped to ±bound."""
    assert value.shape == target.shape, (value.shape, target.shape)
    return F.huber_loss(value, target, reduction="none", delta=bound)
