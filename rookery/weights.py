"""Weights as they travel: one flat float32 vector and a version.

The vector is the leading part of the flat parameters (what actors need comes first) followed by the normaliser's
derived statistics, so that a policy never acts with the weights of one version and the statistics of another.
"""

from __future__ import annotations

import torch
from torch import nn

from rookery.algorithms.base import Algorithm
from rookery.nets.flat import FlatParams


class Published:
    """The published part of an algorithm's nets, on either end of a pipe."""

    def __init__(self, algorithm: Algorithm, nets: nn.ModuleDict, flat: FlatParams | None = None):
        modules = [nets[name] for name in algorithm.published if name in nets]
        self._flat = FlatParams(modules) if flat is None else flat
        self._count = self._flat.prefix(modules)
        self._buffers = [b for module in modules if hasattr(module, "published") for b in module.published()]
        self.size = self._count + sum(b.numel() for b in self._buffers)

    @torch.no_grad()
    def read(self) -> torch.Tensor:
        """A copy of the current vector, on the CPU."""
        return torch.cat([self._flat.data[: self._count], *(b.flatten() for b in self._buffers)]).cpu()

    @torch.no_grad()
    def load(self, vector: torch.Tensor) -> None:
        self._flat.data[: self._count].copy_(vector[: self._count])
        at = self._count
        for buffer in self._buffers:
            buffer.copy_(vector[at : at + buffer.numel()].view_as(buffer))
            at += buffer.numel()
