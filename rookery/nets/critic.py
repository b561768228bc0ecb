"""Networks of deterministic policy gradients: a policy that is an action, and critics of state and action.

Both are a `Body` (observations to features) -> layers -> head. The critic's layers read the action beside the features
(Acme's D4PG; Deviates: DDPG lets it join one layer later). Policy and critic share nothing, so that each loss has its
own parameters, with images too (as in DDPG).

Torsos: "standard" is one torso without hidden layers (vectors as they are, images through a CNN); "parkour" (D4PG,
Barth-Maron et al. 2018, for a robot that sees terrain) has a torso of `net.hidden` layers for each of two groups of
observations.

Three heads for the return's distribution: its mean only, a categorical on fixed atoms, a mixture of Gaussians.
Weights start uniform in ±1/sqrt(inputs), those of the last layers in ±3e-3 (Lillicrap et al. 2015): the first policy
is near 0, the first values near the middle of their range.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from rookery.core.config import NetConfig
from rookery.core.errors import UsageError
from rookery.core.types import EnvSpec
from rookery.nets.body import Body
from rookery.nets.init import uniform
from rookery.nets.modules import Modules
from rookery.nets.torso import make_torso
from rookery.ops.distributional import Mixture, categorical_mean, mixture_mean

Activation = Literal["relu", "elu", "tanh"]
LAST = 3e-3  # bound of the last layer's first weights
STD_FLOOR = 0.01  # of a mixture's deviations, in units of half the value range: a quarter of the gap between 51 atoms
STD_START = 0.3  # in the same units
_ACTIVATIONS = {"relu": torch.relu_, "elu": torch.nn.functional.elu_, "tanh": torch.tanh_}


class TwoTorsos(nn.Module):
    """Two groups of observations, each encoded on its own; their features side by side."""

    def __init__(self, spec: EnvSpec, net: NetConfig, second: tuple[str, ...]):
        super().__init__()
        unknown, first = set(second) - set(spec.obs), [key for key in spec.obs if key not in second]
        if unknown or not first:
            problem = f"has no {sorted(unknown)}" if unknown else "has nothing else, which leaves the first torso empty"
            raise UsageError(
                f"algo.second_torso names observations for a torso of their own, and {spec.id} {problem}; "
                f"its observations are {sorted(spec.obs)}: name some of them, or none for the standard networks"
            )
        self.first, self.second = (_torso(spec, net, keys) for keys in (first, second))
        self.features = self.first.features + self.second.features
        self.map_shapes = getattr(self.first, "map_shapes", {}) | getattr(self.second, "map_shapes", {})

    def forward(self, obs: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.cat([self.first(obs), self.second(obs)], -1)

    def with_maps(self, obs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        (first, maps), (second, more) = self.first.with_maps(obs), self.second.with_maps(obs)
        return torch.cat([first, second], -1), maps | more


def _torso(spec: EnvSpec, net: NetConfig, keys: tuple[str, ...] | list[str]) -> Any:
    part = replace(spec, obs={key: spec.obs[key] for key in keys})
    if not any(leaf.kind == "image" for leaf in part.obs.values()):
        net = replace(net, torso="auto")  # a CNN that is asked for is meant for the group that has the images
    return make_torso(part, net)


def _encoder(spec: EnvSpec, net: NetConfig, second_torso: tuple[str, ...]) -> nn.Module:
    torso: nn.Module
    if second_torso:
        torso = TwoTorsos(spec, net, second_torso)
    else:
        torso = make_torso(spec, net if net.module else replace(net, hidden=()))
    if not net.module:
        uniform(torso)
    return torso


class Layers(nn.Module):
    """Linear layers, each with the activation; with `layer_norm` the first is linear, LayerNorm, tanh (Acme)."""

    def __init__(self, inputs: int, hidden: tuple[int, ...], layer_norm: bool, activation: Activation):
        super().__init__()
        sizes = [inputs, *hidden]
        self.outputs = sizes[-1]
        self.linear = Modules(nn.Linear(*pair) for pair in pairwise(sizes))  # torch's init is ±1/sqrt(inputs)
        self.norm = nn.LayerNorm(hidden[0]) if layer_norm and hidden else None
        self.activation = _ACTIVATIONS[activation]
        self.pairs = [(layer.weight, layer.bias) for layer in self.linear]  # what a call needs, without its lookup

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = iter(self.pairs)
        if self.norm is not None:
            x = F.linear(x, *next(pairs))
            x = F.layer_norm(x, x.shape[-1:], self.norm.weight, self.norm.bias).tanh_()
        for weight, bias in pairs:
            x = self.activation(F.linear(x, weight, bias))
        return x


class DeterministicPolicy(Body):
    """obs -> action in (-1, 1): `action(features)` on the features of `step` or `sequence`."""

    def __init__(
        self,
        spec: EnvSpec,
        net: NetConfig,
        hidden: tuple[int, ...],
        layer_norm: bool = True,
        activation: Activation = "relu",
        second_torso: tuple[str, ...] = (),
    ):
        super().__init__(spec, net, _encoder(spec, net, second_torso))
        self.layers = Layers(self.features, hidden, layer_norm, activation)
        self.out = last(self.layers.outputs, spec.action.size)

    def action(self, features: torch.Tensor) -> torch.Tensor:
        return F.linear(self.layers(features), self.out.weight, self.out.bias).tanh_()


class Critic(Body):
    """(obs, action) -> parameters of the return's distribution, whose form the head defines; `mean` is Q."""

    def __init__(
        self,
        spec: EnvSpec,
        net: NetConfig,
        hidden: tuple[int, ...],
        head: Callable[[int], Any],
        layer_norm: bool = True,
        activation: Activation = "relu",
        second_torso: tuple[str, ...] = (),
    ):
        """`head` is called with the number of its inputs."""
        super().__init__(spec, net, _encoder(spec, net, second_torso))
        self.layers = Layers(self.features + spec.action.size, hidden, layer_norm, activation)
        self.head = head(self.layers.outputs)

    def value(self, features: torch.Tensor, action: torch.Tensor) -> Any:
        return self.head(self.layers(torch.cat([features, action], -1)))

    def mean(self, params: Any) -> torch.Tensor:
        return self.head.mean(params)


class ScalarHead(nn.Module):
    """The mean alone; parameters [N]."""

    def __init__(self, inputs: int):
        super().__init__()
        self.out = last(inputs, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.out.weight, self.out.bias).squeeze(-1)

    def mean(self, params: torch.Tensor) -> torch.Tensor:
        return params


class CategoricalHead(nn.Module):
    """Logits [N, A] over atoms evenly spaced from v_min to v_max."""

    atoms: torch.Tensor

    def __init__(self, inputs: int, atoms: int, v_min: float, v_max: float):
        super().__init__()
        self.out = last(inputs, atoms)
        self.register_buffer("atoms", torch.linspace(v_min, v_max, atoms, device="cpu"), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.out.weight, self.out.bias)

    def mean(self, params: torch.Tensor) -> torch.Tensor:
        return categorical_mean(params, self.atoms)


class MixtureHead(nn.Module):
    """A `Mixture` of K Gaussians. v_min and v_max are its unit and where it starts, no bounds.

    Deviations have a floor: where the return is certain (a terminal reward) likelihood would drive them to 0, and the
    gradient of the mean, which grows with 1 / std^2, beyond every bound.
    """

    def __init__(self, inputs: int, components: int, v_min: float, v_max: float):
        super().__init__()
        self.out = last(inputs, 3 * components)
        self.middle, self.radius = (v_max + v_min) / 2, (v_max - v_min) / 2
        with torch.no_grad():
            _, mean, std = self.out.bias.view(3, components)
            mean += torch.linspace(-0.5, 0.5, components, device="cpu") if components > 1 else 0.0
            std += math.log(math.expm1(STD_START))  # softplus makes it STD_START

    def forward(self, x: torch.Tensor) -> Mixture:
        weight, mean, std = F.linear(x, self.out.weight, self.out.bias).chunk(3, -1)
        return Mixture(
            weight.log_softmax(-1), self.middle + self.radius * mean, self.radius * (F.softplus(std) + STD_FLOOR)
        )

    def mean(self, params: Mixture) -> torch.Tensor:
        return mixture_mean(params)


def last(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.uniform_(layer.weight, -LAST, LAST)
    nn.init.uniform_(layer.bias, -LAST, LAST)
    return layer


class RandomStart(nn.Module):
    """Whether actors still act at random: a flag that is published with the weights."""

    flag: torch.Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("flag", torch.ones(()))

    @property
    def on(self) -> bool:
        return bool(self.flag)

    def published(self) -> list[torch.Tensor]:
        return [self.flag]
