"""What several learners ("ranks") of one run compute together.

Every rank must call the same methods in the same order with tensors of the same shape: a rank that leaves out a call
makes the others wait. So decisions that lead to another call are made from reduced numbers, never from a rank's own.
The implementation over `torch.distributed` is a transport and not here.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Reduce(Protocol):
    """A transport inherits from this and supplies `rank`, `size`, `here`, `sum` and `gather`.

    All results are the same on every rank.
    """

    rank: int  # of this process, from 0
    size: int  # number of ranks
    here: int = 1  # ranks on this machine

    def sum(self, x: Tensor) -> Tensor:
        """Sum over ranks, for moments and counts. x may be overwritten: use the result instead."""
        ...

    def gather(self, message: bytes) -> list[bytes]:
        """One message of every rank, in the order of ranks."""
        ...

    def mean(self, x: Tensor, weight: float | Tensor) -> Tensor:
        """Weighted mean over ranks, for gradients and scalars; `weight` is the number of live rows behind x.

        What has weight 0 does not count, even if it is not finite; 0 if nothing has weight.
        """
        if weight == 0:
            x = torch.zeros_like(x)
        weight = torch.as_tensor(weight, dtype=x.dtype, device=x.device).reshape(1)
        total = self.sum(torch.cat([x.flatten() * weight, weight]))
        return (total[:-1] / torch.where(total[-1] > 0, total[-1], 1.0)).view(x.shape)

    def anywhere(self, *flags: bool) -> tuple[bool, ...]:
        """Which of these are set on at least one rank: one exchange for all of them."""
        votes = self.sum(torch.tensor([float(flag) for flag in flags]))
        return tuple(vote > 0 for vote in votes.tolist())

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on at least one rank."""
        return float(self.sum(torch.tensor([float(flag)]))) > 0

    def all(self, flag: bool) -> bool:
        """Whether the flag is set on every rank."""
        return not self.any(not flag)


class Alone(Reduce):
    """One process: everything is its own sum and mean, and costs nothing."""

    rank, size = 0, 1

    def sum(self, x: Tensor) -> Tensor:
        return x

    def gather(self, message: bytes) -> list[bytes]:
        return [message]

    def mean(self, x: Tensor, weight: float | Tensor) -> Tensor:
        return x

    def anywhere(self, *flags: bool) -> tuple[bool, ...]:
        return flags

    def any(self, flag: bool) -> bool:
        return flag

    def all(self, flag: bool) -> bool:
        return flag


ALONE = Alone()
