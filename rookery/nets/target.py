"""A target policy that follows the one that learns, and the weight of the KL divergence between the two."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch import nn

from rookery.nets.modules import Nets

UP, DOWN = 1.5, 0.5  # how the weight adapts (Schulman et al. 2017, section 4, as in RLlib)


def target_of(nets: Nets, names: Iterable[str]) -> Nets:
    """Copies of some nets, which no gradient reaches."""
    return Nets({name: copy.deepcopy(nets[name]).requires_grad_(False) for name in names})


@torch.no_grad()
def copy_nets(nets: Nets, target: Nets) -> None:
    """Parameters and buffers: a torso of a user may have statistics of its own."""
    for name, module in target.items():
        online = nets[name]
        for to, now in ((module.parameters(), online.parameters()), (module.buffers(), online.buffers())):
            for place, value in zip(to, now):
                place.copy_(value)


class KLCoefficient(nn.Module):
    """The weight of the KL divergence in the loss; part of the checkpoint."""

    value: torch.Tensor

    def __init__(self, start: float):
        super().__init__()
        self.register_buffer("value", torch.tensor(float(start)))

    def adapt(self, kl: float, target: float) -> None:
        """More weight if the divergence is above twice the target, less if below half of it."""
        if kl > 2 * target:
            self.value.mul_(UP)
        elif kl < 0.5 * target:
            self.value.mul_(DOWN)
