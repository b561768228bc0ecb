"""Initial weights of the actor-critic family: orthogonal with a gain, biases zero."""

from __future__ import annotations

import math

from torch import nn

HIDDEN_GAIN = math.sqrt(2)


def orthogonal(layer: nn.Linear | nn.Conv2d, gain: float) -> nn.Linear | nn.Conv2d:
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def linear(inputs: int, outputs: int, gain: float = HIDDEN_GAIN) -> nn.Linear:
    return orthogonal(nn.Linear(inputs, outputs), gain)
