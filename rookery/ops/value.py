"""Value losses per element, and how much of the returns the values explain.

Two clipped losses go by the same name and are not equivalent: they are two functions here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rookery.ops.moments import from_sums, moments, to_sums


def value_loss(value: Tensor, target: Tensor) -> Tensor:
    """Half the squared error: its gradient is the error."""
    assert value.shape == target.shape, (value.shape, target.shape)
    return 0.5 * (value - target).square()


def clipped_value_loss(value: Tensor, old_value: Tensor, target: Tensor, clip: float) -> Tensor:
    """The larger of the plain loss and the loss of the value held within `clip` of the old one (OpenAI Baselines)."""
    assert value.shape == old_value.shape == target.shape, (value.shape, old_value.shape, target.shape)
    held = old_value + (value - old_value).clamp(-clip, clip)
    return torch.maximum(value_loss(value, target), value_loss(held, target))


def clipped_value_loss_habitat(value: Tensor, old_value: Tensor, target: Tensor, clip: float) -> Tensor:
    """The loss of the held value alone (Habitat): no gradient beyond the clip, not even back from a worse value."""
    assert value.shape == old_value.shape == target.shape, (value.shape, old_value.shape, target.shape)
    change = value - old_value
    held = torch.where(change.abs() < clip, value, old_value + change.clamp(-clip, clip))
    return value_loss(held, target)


@torch.no_grad()
def explained_variance(
    value: Tensor, target: Tensor, weight: Tensor, sum_over_ranks: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """1 - Var(target - value) / Var(target) where there is weight: 1 perfect, 0 no better than a constant.

    A target without spread leaves nothing to explain: 0, so that the metric is always finite. With `sum_over_ranks`
    the variances are those of all ranks' samples together.
    """
    assert value.shape == target.shape == weight.shape, (value.shape, target.shape, weight.shape)
    both = [moments(target, weight), moments(target - value, weight)]
    if sum_over_ranks is not None:
        both = [from_sums(sums) for sums in sum_over_ranks(torch.stack([to_sums(part) for part in both]))]
    total, rest = (part.m2 for part in both)
    return torch.where(total > 0, 1 - rest / torch.where(total > 0, total, 1.0), 0.0)
