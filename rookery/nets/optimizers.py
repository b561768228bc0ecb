"""The optimisers by their names."""

from __future__ import annotations

from typing import Literal

from torch import nn

from rookery.nets.adam import FlatAdam
from rookery.nets.optimizer import FlatOptimizer
from rookery.nets.rmsprop import FlatAdaGrad, FlatRMSProp


def make_optimizer(
    name: Literal["adam", "rmsprop", "adagrad"],
    parameter: nn.Parameter,
    lr: float,
    eps: float,
    decay: float = 0.99,
    momentum: float = 0.0,
    centered: bool = False,
) -> FlatOptimizer:
    """`decay`, `momentum` and `centered` are rmsprop's, which is TensorFlow's."""
    if name == "adam":
        return FlatAdam(parameter, lr, eps)
    if name == "adagrad":
        return FlatAdaGrad(parameter, lr, eps)
    return FlatRMSProp(parameter, lr, decay, eps, momentum, centered)
