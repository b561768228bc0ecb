"""A torso of your own: residual layers instead of the plain MLP.

    rookery train ppo --env CartPole-v1 --net.module examples.own_network:Residual
"""

import torch
from torch import nn

from rookery.core.config import NetConfig
from rookery.core.types import EnvSpec


class Residual(nn.Module):
    """Observations [N, ...] become features [N, width]; the width is the first of `net.hidden`, one block for each."""

    def __init__(self, spec: EnvSpec, net: NetConfig):
        super().__init__()
        self.keys = [name for name, leaf in spec.obs.items() if leaf.kind == "vector"]
        self.features = net.hidden[0]  # the width of the output: Rookery builds core and heads on it
        inputs = sum(torch.Size(spec.obs[key].shape).numel() for key in self.keys)
        self.first = nn.Linear(inputs, self.features)
        self.blocks = nn.ModuleList(nn.Linear(self.features, self.features) for _ in net.hidden)

    def forward(self, obs: dict[str, torch.Tensor]) -> torch.Tensor:
        x = self.first(torch.cat([obs[key].flatten(1) for key in self.keys], 1))
        for block in self.blocks:
            x = x + block(torch.tanh(x))
        return torch.tanh(x)
