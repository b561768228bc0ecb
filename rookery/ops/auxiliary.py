"""Auxiliary tasks: pixel control and reward prediction (UNREAL, Jaderberg et al. 2017, arXiv:1611.05397), and the
reconstruction loss of an auto-encoder.

Pixel control learns, for each cell of a grid over the image, the Q-value of changing the pixels in it. Reward
prediction classifies the sign of the next reward, on rows that are drawn so that half of them are rewarding.
Value replay, the third task of UNREAL, is the value loss on old rows and needs no function of its own.

Time-major [T, B, ...], as in `returns`: `discount` is the pixel-control gamma (0.9 in the paper) times
1 - terminated, `continues` is 1 - (terminated | truncated). Losses are per row. Rows that are not live get numbers that
mean nothing; they reach no live row, and the caller gives them weight 0. The heads are in `nets/auxiliary.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from rookery.ops.policy import categorical_logp
from rookery.ops.qlearning import at_action
from rookery.ops.returns import nstep_return
from rookery.ops.value import value_loss

ZERO, POSITIVE, NEGATIVE = range(3)  # classes of rewards


# Pixel control


@torch.no_grad()
def pixel_change(frames: Tensor, cell: int, cells: tuple[int, int] | None = None) -> Tensor:
    """Mean absolute change of the pixels of each cell from row t to row t+1, [T+1, B, C, H, W] -> [T, B, h, w].

    The mean is over channels and over the cell x cell pixels. Bytes are divided by 255, floats are taken as they are.
    `cells` (h, w) is the grid, in the centre of the image; by default as many cells as fit. UNREAL has 20x20 cells of
    4x4 pixels in an image of 84x84, where 21x21 would fit. Of a stack of frames pass the newest one only (C = 1).
    """
    assert frames.ndim == 5 and cell >= 1, (frames.shape, cell)
    assert frames.dtype == torch.uint8 or frames.is_floating_point(), frames.dtype
    height, width = frames.shape[-2:]
    h, w = cells or (height // cell, width // cell)
    assert h >= 1 and w >= 1 and h * cell <= height and w * cell <= width, (frames.shape, cell, cells)
    top, left = (height - h * cell) // 2, (width - w * cell) // 2
    frames = frames[..., top : top + h * cell, left : left + w * cell]
    before, after = frames[:-1], frames[1:]
    if frames.dtype == torch.uint8:  # bytes wrap around: 0 - 255 is 1
        change, scale = (torch.maximum(before, after) - torch.minimum(before, after)).float(), 1 / 255
    else:
        change, scale = (after - before).abs_(), 1.0
    pooled = F.avg_pool2d(change.flatten(0, 1), cell).mean(1)
    return pooled.mul_(scale).unflatten(0, change.shape[:2])


@torch.no_grad()
def pixel_control_target(reward: Tensor, discount: Tensor, continues: Tensor, q: Tensor) -> Tensor:
    """Targets of the Q-values of each cell, [T, B, h, w]: discounted changes up to the end of the episode or unroll,
    then the Q-value of the best action there, or nothing if the episode terminated.

    reward [T, B, h, w] are the pixel changes; discount, continues [T, B]; q [T+1, B, A, h, w].
    """
    assert reward.ndim == 4 and q.ndim == 5, (reward.shape, q.shape)
    assert discount.shape == continues.shape == reward.shape[:2], (reward.shape, discount.shape, continues.shape)
    discount, continues = (x[..., None, None].expand_as(reward) for x in (discount, continues))
    return nstep_return(reward, discount, continues, q.amax(2))


def pixel_control_loss(q: Tensor, action: Tensor, target: Tensor) -> Tensor:
    """Half the squared error of the Q-values of the action taken, mean over cells, [T, B].

    q [T, B, A, h, w], action [T, B], target [T, B, h, w].
    """
    # Deviates: the paper sums over cells; the size of a mean does not depend on the grid. A weight of the sum (of half
    # the square, as in miyosuda/unreal) times h * w is the weight of this mean: 0.01 with 20x20 cells is 4 here.
    assert q.shape[:-3] == action.shape == target.shape[:-2], (q.shape, action.shape, target.shape)
    assert q.shape[-2:] == target.shape[-2:], (q.shape, target.shape)
    return value_loss(at_action(q.flatten(-2), action), target.flatten(-2)).mean(-1)


# Reward prediction


def reward_class(reward: Tensor) -> Tensor:
    """0 where the reward is zero, 1 where it is positive, 2 where it is negative; int64."""
    return (reward > 0) * POSITIVE + (reward < 0) * NEGATIVE


def reward_prediction_loss(logits: Tensor, reward: Tensor) -> Tensor:
    """Cross-entropy of the class of each reward, [...]; logits [..., 3], reward [...]."""
    assert logits.shape == (*reward.shape, 3), (logits.shape, reward.shape)
    return -categorical_logp(logits, reward_class(reward))


def balanced_weight(reward: Tensor, usable: Tensor) -> Tensor:
    """Weights of rows [T, B], sum 1: rewarding rows and the others weigh one half together, and alike among themselves.

    What the paper draws (rewarding and not, with probability 1/2 each) is weighed here: the expected gradient is the
    same, and nothing is random. If one kind is missing, the other has all the weight; without usable rows all is 0.
    """
    assert reward.shape == usable.shape and usable.dtype == torch.bool, (reward.shape, usable.shape, usable.dtype)
    kinds = torch.stack([usable & (reward == 0), usable & (reward != 0)]).float()
    counts = kinds.flatten(1).sum(1)
    share = (counts > 0).float() / counts.clamp(min=1) / (counts > 0).sum().clamp(min=1)
    return (kinds * share.view(-1, *[1] * reward.ndim)).sum(0)


# Reconstruction


def reconstruction_loss(predicted: Tensor, target: Tensor, lead: int = 1) -> Tensor:
    """Half the squared error, mean over everything but the `lead` leading axes: [T, B, ...] -> [T, B] with lead 2."""
    assert predicted.shape == target.shape, (predicted.shape, target.shape)
    assert 1 <= lead <= predicted.ndim, (lead, predicted.shape)
    return value_loss(predicted, target).unsqueeze(-1).flatten(lead).mean(-1)
