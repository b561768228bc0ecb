"""What several ranks tell each other after each minibatch, in one collective.

One vector: the gradients of all groups, times the weight of the minibatch on this rank (its live rows); then the
weight, the stopping criterion times the weight, a flag "do not apply this", and a flag for each group that has a loss.
All ranks get the same sums, and what they decide from these alone is the same everywhere. In one process none of this
runs.

The vector is float32: the weights of all ranks together must stay below 2^24 rows to be added exactly.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from rookery.core.reduce import Reduce
from rookery.core.types import LossOutput
from rookery.nets.flat import FlatParams


class Verdict(NamedTuple):
    stop: float  # mean of LossOutput.stop over the rows of all ranks
    faulty: bool  # some rank's gradient must not be applied
    due: tuple[str, ...]  # groups that have a gradient


class Exchange:
    def __init__(self, reduce: Reduce, flat: dict[str, FlatParams]):
        self._reduce, self._flat = reduce, flat
        self._sizes = [each.grad.numel() for each in flat.values()]
        self._vector = torch.zeros(sum(self._sizes) + 3 + len(flat), device=next(iter(flat.values())).grad.device)

    @torch.no_grad()
    def __call__(self, output: LossOutput, faulty: bool) -> Verdict:
        """Turn the gradients in `flat` into means over the rows of all ranks, and say what all ranks know now."""
        *parts, numbers = self._vector.split([*self._sizes, 3 + len(self._flat)])
        weight = torch.as_tensor(output.weight, dtype=numbers.dtype, device=numbers.device)
        for (group, flat), part in zip(self._flat.items(), parts):
            if group in output.losses:
                torch.mul(flat.grad, weight, out=part)
            else:
                part.zero_()
        due = [float(group in output.losses) for group in self._flat]
        numbers.copy_(torch.tensor([0.0, 0.0, float(faulty), *due]))
        numbers[0] = weight
        if output.stop is not None:
            numbers[1] = output.stop * weight

        *parts, numbers = self._reduce.sum(self._vector).split([*self._sizes, 3 + len(self._flat)])
        rows, stop, faults, *due = numbers.tolist()
        rows = rows or 1.0  # no live row anywhere: the sums are 0
        for flat, part in zip(self._flat.values(), parts):
            torch.div(part, rows, out=flat.grad)
        return Verdict(stop / rows, faults > 0, tuple(group for group, ranks in zip(self._flat, due) if ranks))
