"""Parameters of several modules as views of one vector, their gradients as views of another.

The optimiser, the norm clip, the all-reduce and publishing then each touch one tensor. Autograd adds into a gradient
that exists and replaces one that does not, so the views stay valid as long as `.grad` is not None: clear gradients
with `FlatParams.zero_grad()` only. Moving or casting a module (`.to()`) after this would break the views: move it
before. A deep copy of a module is an ordinary module again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

ALIGN = 16  # floats: each parameter starts on a cache line of 64 bytes, as the kernels like it


class FlatParams:
    """Re-points the parameters of `modules`, in order and each one once."""

    def __init__(self, modules: Iterable[nn.Module]):
        self._ends: dict[nn.Parameter, int] = {}  # in order: where the (padded) room of each parameter ends
        end = 0
        for module in modules:
            for name, parameter in module.named_parameters():
                if parameter in self._ends:
                    continue
                if parameter.dtype != torch.float32:
                    place = f"{type(module).__name__}.{name}"
                    raise ValueError(f"parameter {place} is {parameter.dtype}; FlatParams holds float32 only")
                end += math.ceil(parameter.numel() / ALIGN) * ALIGN
                self._ends[parameter] = end
        home = next(iter(self._ends)).device if self._ends else torch.device("cpu")
        self.data = torch.zeros(end, device=home)
        self.grad = torch.zeros(end, device=home)
        with torch.no_grad():
            start = 0
            for parameter, stop in self._ends.items():
                value = _view(self.data, start, parameter)
                value.copy_(parameter)
                gradient = _view(self.grad, start, parameter)
                parameter.data = value
                parameter.grad = gradient
                start = stop
        self.parameters = list(self._ends)
        self.parameter = nn.Parameter(self.data)
        self.parameter.grad = self.grad

    @staticmethod
    def room(modules: Iterable[nn.Module]) -> int:
        """Floats that the parameters of these modules take."""
        return sum(math.ceil(p.numel() / ALIGN) * ALIGN for module in modules for p in module.parameters())

    def zero_grad(self) -> None:
        self.grad.zero_()

    def prefix(self, modules: Iterable[nn.Module]) -> int:
        """Number of leading floats that hold exactly the parameters of `modules`, which must come first."""
        wanted = list(dict.fromkeys(p for module in modules for p in module.parameters()))
        leading = list(self._ends)[: len(wanted)]
        if len(wanted) != len(leading) or any(a is not b for a, b in zip(wanted, leading)):
            raise ValueError(
                "these modules are not the leading ones of this FlatParams in its order; list the published ones first"
            )
        return self._ends[leading[-1]] if leading else 0


def _view(flat: torch.Tensor, start: int, like: torch.Tensor) -> torch.Tensor:
    room = flat[start : start + like.numel()]
    if like.dim() == 4 and not like.is_contiguous() and like.is_contiguous(memory_format=torch.channels_last):
        o, i, h, w = like.shape
        return room.view(o, h, w, i).permute(0, 3, 1, 2)
    return room.view(like.shape)
