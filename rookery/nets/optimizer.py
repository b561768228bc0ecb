"""What the optimisers of Rookery have in common: one flat parameter, numbers that schedules may change, and a state.

It has the face of `torch.optim.Optimizer` as far as the learner looks at it, which works with torch's own just as well.
Not torch's class itself: to make one takes as long as to import torch (it loads the compiler, over a second), and it
wraps every step in hooks that cost more than a small step.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn


class Optimizer(Protocol):
    param_groups: list[dict[str, Any]]  # numbers by name, "lr" among them
    defaults: dict[str, Any]

    @property
    def state(self) -> Any: ...  # parameter -> name -> tensor

    def step(self) -> Any: ...


class FlatOptimizer:
    def __init__(self, parameter: nn.Parameter, **numbers: Any):
        self.parameter, self.defaults = parameter, dict(numbers)
        self.param_groups: list[dict[str, Any]] = [{"params": [parameter], **numbers}]
        self.state: dict[nn.Parameter, dict[str, torch.Tensor]] = {parameter: {}}

    def step(self) -> None:
        raise NotImplementedError
