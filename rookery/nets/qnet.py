"""Networks of the DQN line: a body, and a head that is any mix of dueling, categorical and noisy.

`q_nets` returns modules in the order normalizer, body, q, epsilon | target_body, target_q: what actors need comes
first, so that the published part of a flat vector is its beginning. Targets are copies, not references;
`copy_to_targets` brings them up to date. Statistics of observations are shared by both.

Torsos and heads start as the DQN line has them, weights and biases uniform within ±1/√fan_in; cores orthogonal, as
everywhere in Rookery. (It matters: after 50,000 steps of CartPole DQN was at 150 with an orthogonal torso, and at 500
with this one.)
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from rookery.core.config import NetConfig
from rookery.core.types import EnvSpec
from rookery.nets.body import Body
from rookery.nets.init import uniform
from rookery.nets.modules import Modules, Nets
from rookery.nets.noisy import NoisyLinear
from rookery.nets.normalize import ObsNormalizer
from rookery.nets.torso import make_torso
from rookery.ops.distributional import categorical_mean

ONLINE = ("body", "q")  # what is trained, and has a target
TRUNK_SCALE = 1 / math.sqrt(2)


def q_nets(spec: EnvSpec, net: NetConfig, head: Callable[[int], nn.Module], epsilon: float) -> Nets:
    """`head` makes the head for a number of features."""
    torso = make_torso(spec, net)
    if not net.module:
        uniform(torso)
    nets = Nets({"normalizer": ObsNormalizer(spec, net.normalize_obs), "body": Body(spec, net, torso)})
    nets["q"] = head(nets["body"].features)
    nets["epsilon"] = Epsilon(epsilon)
    for name in ONLINE:
        nets[f"target_{name}"] = copy.deepcopy(nets[name]).requires_grad_(False)
    return nets


@torch.no_grad()
def copy_to_targets(nets: Nets) -> None:
    for name in ONLINE:
        online, target = nets[name], nets[f"target_{name}"]
        for source, to in ((online.parameters(), target.parameters()), (online.buffers(), target.buffers())):
            for value, place in zip(source, to):
                place.copy_(value)


class Epsilon(nn.Module):
    """The share of random actions: it follows the learner's schedule and reaches actors with the weights."""

    value: torch.Tensor

    def __init__(self, start: float):
        super().__init__()
        self.register_buffer("value", torch.tensor(start))

    def published(self) -> list[torch.Tensor]:
        return [self.value]


class QHead(nn.Module):
    """Features [..., F] -> values [..., A], or logits [..., A, Z] of their distribution over Z atoms.

    Dueling (Wang et al. 2016, eq. 9): value + advantage - mean advantage, on the logits of each atom if there are
    atoms. `stream` is the width of the hidden layer of each stream, 0 for none. With `sigma` above 0 all layers are
    noisy and take a vector of `noise` numbers, for all rows or for each. `shared_bias`: the actions have one bias.
    """

    atoms: torch.Tensor | None

    def __init__(
        self,
        inputs: int,
        actions: int,
        stream: int = 0,
        dueling: bool = False,
        atoms: torch.Tensor | None = None,
        sigma: float = 0.0,
        trunk_scale: bool = False,
        shared_bias: bool = False,
    ):
        super().__init__()
        self.actions, self.trunk_scale = actions, trunk_scale
        self.register_buffer("atoms", atoms, persistent=False)
        self.count = 1 if atoms is None else len(atoms)
        self.advantage = Stream(inputs, stream, actions * self.count, sigma, shared_bias)
        self.value = Stream(inputs, stream, self.count, sigma) if dueling else None
        self.parts = (self.advantage.noise, 0 if self.value is None else self.value.noise)
        self.noise = sum(self.parts)

    def forward(self, x: torch.Tensor, noise: torch.Tensor | None = None) -> torch.Tensor:
        if self.trunk_scale and x.requires_grad:
            x = _ScaledGradient.apply(x, TRUNK_SCALE)
        first, second = (None, None) if noise is None else noise.split(self.parts, -1)
        out = self.advantage.forward(x, first)
        axis = -1
        if self.atoms is not None:
            out, axis = out.view(*out.shape[:-1], self.actions, self.count), -2
        if self.value is None:
            return out
        value = self.value.forward(x, second)
        if axis == -2:
            value = value.unsqueeze(-2)
        return out + (value - out.mean(axis, keepdim=True))

    def means(self, out: torch.Tensor) -> torch.Tensor:
        """Values [..., A] of what `forward` returned (or [...] of what belongs to one action)."""
        return out if self.atoms is None else categorical_mean(out, self.atoms)


class Stream(nn.Module):
    """One or two linear layers, noisy or not, with a ReLU between; all outputs may share one bias."""

    def __init__(self, inputs: int, hidden: int, outputs: int, sigma: float, shared_bias: bool = False):
        super().__init__()
        sizes = [inputs, hidden, outputs] if hidden else [inputs, outputs]
        # nn.Linear starts uniform within ±1/√fan_in by itself
        layers: list[Any] = [NoisyLinear(*s, sigma) if sigma else nn.Linear(*s) for s in pairwise(sizes)]
        self.layers = Modules(layers)
        if shared_bias:
            last = layers[-1]
            last.bias = nn.Parameter(last.bias.detach()[:1].clone())
        self.shared = outputs if shared_bias else 0
        self.widths = [layer.width for layer in layers] if sigma else []
        self.noise = sum(self.widths)
        self.pairs = [(layer.weight, layer.bias) for layer in self.layers]  # what a call needs, without its lookups

    def forward(self, x: torch.Tensor, noise: torch.Tensor | None = None) -> torch.Tensor:
        if noise is None:  # the means, where there is noise
            for weight, bias in self.pairs[:-1]:
                x = torch.relu_(F.linear(x, weight, bias))
            weight, bias = self.pairs[-1]
            return F.linear(x, weight, bias.expand(self.shared) if self.shared else bias)
        first, *rest = zip(self.layers, noise.split(self.widths, -1))
        x = first[0](x, first[1])
        for layer, part in rest:
            x = layer(torch.relu_(x), part)
        return x


class _ScaledGradient(torch.autograd.Function):
    """The identity, whose gradient is multiplied: two streams send two gradients into one trunk."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * ctx.factor, None
