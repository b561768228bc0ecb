"""Parameters of several modules as views of one vector, their gradients as views of another.

The optimiser, the norm clip, the all-reduce and publishing then each touch one tensor. Autograd adds into a gradient
that exists and replaces one that does not, so the views live as long as nobody sets `.grad` to None: clear gradients
with `FlatParams.zero_grad()` only. Moving or casting a module (`.to()`) after this would break the views; say where
the parameters shall live with `device`. A deep copy of a module is an ordinary module again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import nn

ALIGN = 16  # floats: each parameter starts on a cache line of 64 bytes, as the kernels like it


class FlatParams:
    """Re-points the parameters of `modules`, in order and each one once; names in a mapping become prefixes."""

    def __init__(
        self,
        modules: Iterable[nn.Module] | Mapping[str, nn.Module] | nn.ModuleDict,
        device: torch.device | str | None = None,
    ):
        named = _named_modules(modules)
        if device is not None:
            for module in named.values():
                module.to(device)
        self._views: dict[str, nn.Parameter] = {}
        self._ends: dict[nn.Parameter, int] = {}  # in order: where the (padded) room of each parameter ends
        end = 0
        for prefix, module in named.items():
            for name, parameter in module.named_parameters():
                if parameter in self._ends:
                    continue
                if parameter.dtype != torch.float32:
                    raise ValueError(f"parameter {prefix}.{name} is {parameter.dtype}; FlatParams holds float32 only")
                end += math.ceil(parameter.numel() / ALIGN) * ALIGN
                self._ends[parameter] = end
                self._views[f"{prefix}.{name}"] = parameter
        home = next(iter(self._ends)).device if self._ends else torch.device(device or "cpu")
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

    def zero_grad(self) -> None:
        self.grad.zero_()

    def prefix(self, modules: Iterable[nn.Module] | Mapping[str, nn.Module] | nn.ModuleDict) -> int:
        """Number of leading floats that hold exactly the parameters of `modules`, which must come first."""
        wanted = list(dict.fromkeys(p for module in _named_modules(modules).values() for p in module.parameters()))
        leading = list(self._ends)[: len(wanted)]
        if len(wanted) != len(leading) or any(a is not b for a, b in zip(wanted, leading)):
            raise ValueError(
                "these modules are not the leading ones of this FlatParams in its order; list the published ones first"
            )
        return self._ends[leading[-1]] if leading else 0

    def load(self, vector: torch.Tensor, n: int) -> None:
        """Take the first n floats from `vector`; the rest stays."""
        assert vector.numel() >= n <= self.data.numel(), (vector.shape, n, self.data.shape)
        self.data[:n].copy_(vector[:n])

    def named(self) -> dict[str, torch.Tensor]:
        """The parameters by name, as views of `data`: read them for a checkpoint, `copy_` into them to restore."""
        return {name: parameter.detach() for name, parameter in self._views.items()}


def _named_modules(modules: Iterable[nn.Module] | Mapping[str, nn.Module] | nn.ModuleDict) -> dict[str, nn.Module]:
    if isinstance(modules, (Mapping, nn.ModuleDict)):
        return dict(modules.items())
    return {str(i): module for i, module in enumerate(modules)}


def _view(flat: torch.Tensor, start: int, like: torch.Tensor) -> torch.Tensor:
    room = flat[start : start + like.numel()]
    if like.dim() == 4 and not like.is_contiguous() and like.is_contiguous(memory_format=torch.channels_last):
        o, i, h, w = like.shape
        return room.view(o, h, w, i).permute(0, 3, 1, 2)
    return room.view(like.shape)
