"""Weights as they travel: one flat float32 vector and a version.

The vector is the leading part of each group's flat parameters (what actors need comes first), group after group,
followed by the normaliser's derived statistics and other published buffers, so that a policy never acts with the
weights of one version and the statistics of another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from rookery.algorithms.base import Algorithm
from rookery.nets.flat import FlatParams
from rookery.nets.modules import Nets


class FlatVector:
    """Several tensors as one float32 vector."""

    def __init__(self, parts: list[torch.Tensor]):
        self._parts = parts
        self.size = sum(part.numel() for part in parts)

    @torch.no_grad()
    def read(self) -> torch.Tensor:
        """A copy of the current vector, on the CPU."""
        return torch.cat([part.flatten() for part in self._parts]).cpu()

    @torch.no_grad()
    def load(self, vector: torch.Tensor) -> None:
        at = 0
        for part in self._parts:
            part.copy_(vector[at : at + part.numel()].view_as(part))
            at += part.numel()


class Published(FlatVector):
    """The published part of an algorithm's nets, on either end of a pipe."""

    def __init__(self, algorithm: Algorithm, nets: Nets, groups: Sequence[FlatParams] | None = None):
        """`groups`: the learner's flat parameters; without them (an actor's end) the published ones get their own."""
        modules = [nets[name] for name in algorithm.published if name in nets]
        parts = _leading(modules, [FlatParams(modules)] if groups is None else groups)
        super().__init__(parts + [buffer for module in modules for buffer in _buffers(module)])


class AllWeights(FlatVector):
    """All of a learner's parameters and published buffers as one vector, and all its gradients as another.

    For workers that compute gradients: they need more than an actor does.
    """

    def __init__(self, learner: Any):
        self._flats = list(learner.flat.values())
        names = [name for name in learner.algorithm.published if name in learner.nets]
        buffers = [buffer for name in names for buffer in _buffers(learner.nets[name])]
        super().__init__([flat.data for flat in self._flats] + buffers)
        self.gradients = sum(flat.grad.numel() for flat in self._flats)

    def read_gradients(self, out: torch.Tensor) -> None:
        torch.cat([flat.grad for flat in self._flats], out=out)


def _buffers(module: nn.Module) -> list[torch.Tensor]:
    """The buffers that a module publishes besides its parameters."""
    published: Any = getattr(module, "published", None)
    return [] if published is None else list(published())


def _leading(modules: list[nn.Module], groups: Sequence[FlatParams]) -> list[torch.Tensor]:
    """Views of the published floats of each group. Both ends must lay them out alike, so the order is checked."""
    rest = [module for module in modules if next(module.parameters(), None) is not None]
    parts = []
    for flat in groups:
        own = set(flat.parameters)
        mine = [module for module in rest if own.intersection(module.parameters())]
        if mine != rest[: len(mine)]:
            raise ValueError("modules are published in another order than their groups have; list groups in that order")
        rest = rest[len(mine) :]
        parts.append(flat.data[: flat.prefix(mine)])
    if rest:
        raise ValueError(f"published modules belong to no group, so they are not trained: {rest}")
    return parts
