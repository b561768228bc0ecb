"""The priority of a sequence (R2D2: Kapturowski et al. 2019, section 2.3).

Not here: exponents, probabilities and importance weights, which belong to the memory that draws (`tables/sampler.py`).
A transition's priority is the size of its error as it is.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def mixed(size: Tensor, live: Tensor, eta: float) -> Tensor:
    """eta max + (1 - eta) mean over time of the sizes of errors, [T, N] -> [N]; rows that are not live do not count.

    A sequence without a live row has priority 0.
    """
    assert size.shape == live.shape, (size.shape, live.shape)
    size = torch.where(live, size, 0.0)
    return eta * size.amax(0) + (1 - eta) * size.sum(0) / live.sum(0).clamp(min=1)
