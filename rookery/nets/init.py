"""Initial weights. Of the actor-critic family: orthogonal with a gain, biases zero. Of those with replay: uniform."""

from __future__ import annotations

import math
from typing import TypeVar

from torch import nn

HIDDEN_GAIN = math.sqrt(2)
Layer = TypeVar("Layer", nn.Linear, nn.Conv2d)


def orthogonal(layer: Layer, gain: float) -> Layer:
    assert layer.bias is not None
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def linear(inputs: int, outputs: int, gain: float = HIDDEN_GAIN) -> nn.Linear:
    return orthogonal(nn.Linear(inputs, outputs), gain)


def uniform(module: nn.Module) -> None:
    """Weights and biases of all layers within ±1/√fan_in: torch's own, and that of the papers on DQN and DDPG."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            layer.reset_parameters()
