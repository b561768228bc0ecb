"""Integers of an observation as a network takes them: one-hot, those of one observation side by side."""

from __future__ import annotations

from itertools import accumulate

import torch

from rookery.core.types import Leaf


def one_hot(x: torch.Tensor, leaf: Leaf) -> torch.Tensor:
    """Of integers [N, *shape] of kind "discrete" or "multi", [N, leaf.width]."""
    x = x.reshape(x.shape[0], -1).long()
    if leaf.kind == "multi":  # each has its own number of values: where its ones begin differs
        firsts = torch.tensor([0, *accumulate(leaf.counts[:-1])], device=x.device)
        return torch.zeros(x.shape[0], leaf.width, device=x.device).scatter_(1, x + firsts, 1.0)
    return torch.zeros(*x.shape, leaf.n, device=x.device).scatter_(2, x.unsqueeze(2), 1.0).flatten(1)
