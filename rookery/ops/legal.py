"""Illegal actions: their logits, or values, become the lowest number there is.

The number is finite: an action has then a probability of exactly 0, and 0 · log 0, which an entropy adds up, is 0 and
not NaN. Huang and Ontañón 2020 (arXiv:2006.14171) show that the gradient stays that of a policy: it is the
gradient of the distribution over the legal actions, and 0 for the logits of the others.

Advantages of a dueling head are still taken about their mean over all actions: that fixes a constant for each state,
which any fixed set of actions does, and one that depends on the mask would change with it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def only_legal(x: Tensor, legal: Tensor) -> Tensor:
    """x [..., A] or [..., A, h, w], logits or values, where legal [..., A] says so; elsewhere the lowest number.

    Where nothing is legal x stays as it is: rows that no action follows have no mask, and must not be NaN.
    """
    assert x.shape[: legal.ndim] == legal.shape and legal.dtype == torch.bool, (x.shape, legal.shape, legal.dtype)
    kept = legal | ~legal.any(-1, keepdim=True)
    return torch.where(kept[(..., *[None] * (x.ndim - kept.ndim))], x, torch.finfo(x.dtype).min)
