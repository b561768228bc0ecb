"""The slope of the value along the action, dq/da, which a deterministic policy follows: how it is clipped.

Element-wise (Ape-X: Horgan et al. 2018, appendix D) keeps each dimension's push within a bound and may turn the
direction; by norm (Acme's D4PG) keeps the direction. The two are not equal.
"""

from __future__ import annotations

import torch
from torch import Tensor


def clipped_slope(slope: Tensor, how: str, bound: float) -> Tensor:
    """dq/da [..., A] with each entry ("element") or each row's length ("norm") held to the bound; "none": as it is."""
    assert how in ("none", "element", "norm"), how
    if how == "element":
        return slope.clamp(-bound, bound)
    if how == "norm":
        return slope * (bound / torch.linalg.vector_norm(slope, dim=-1, keepdim=True).clamp(min=bound))
    return slope
