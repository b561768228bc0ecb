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
    start: float = 1.0,
) -> FlatOptimizer:
    """`decay`, `momentum`, `centered` and `start` (of the mean square) are rmsprop's, which is TensorFlow's."""
    if name == "adam":
        return FlatAdam(parameter, lr, eps)
    if name == "adagrad":
        return FlatAdaGrad(parameter, lr, eps)
    if name == "rmsprop":
        return FlatRMSProp(parameter, lr, decay, eps, momentum, centered, start)
    raise ValueError(f"there is no optimiser {name!r}; use 'adam', 'rmsprop' or 'adagrad'")
