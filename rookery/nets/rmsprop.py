"""The optimisers of the DQN line over one flat parameter: RMSProp as TensorFlow has it, and AdaGrad (Gorila).

RMSProp goes by one name and is two things. TensorFlow's, with which A3C, IMPALA and Ape-X were tuned, has epsilon
inside the root and a mean square that starts at 1; PyTorch's has it outside and starts at 0. With epsilon 0.1 and
decay 0.99, their first steps differ by a factor of five. "Centered" subtracts the square of the mean gradient (Graves
2013), as DQN does.

A square that starts at 1 makes the first steps small, gradients being small: a warm-up of some 1 / (1 - decay) steps.
"""

from __future__ import annotations

import torch
from torch import nn

from rookery.nets.optimizer import FlatOptimizer


class FlatRMSProp(FlatOptimizer):
    """p -= lr g / sqrt(E[g²] (- E[g]²) + eps), through a momentum if there is one."""

    def __init__(
        self,
        parameter: nn.Parameter,
        lr: float,
        decay: float = 0.99,
        eps: float = 1e-5,
        momentum: float = 0.0,
        centered: bool = False,
        start: float = 1.0,
    ):
        super().__init__(parameter, lr=lr, decay=decay, eps=eps, momentum=momentum, centered=centered, start=start)

    @torch.no_grad()
    def step(self) -> None:
        parameter, group = self.parameter, self.param_groups[0]
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None  # `FlatParams` has set it for good
        if not state:
            state["square"] = torch.full_like(parameter, group["start"])
            if group["centered"]:
                state["mean"] = torch.zeros_like(parameter)
            if group["momentum"]:
                state["momentum"] = torch.zeros_like(parameter)
        square = state["square"].mul_(group["decay"]).addcmul_(gradient, gradient, value=1 - group["decay"])
        if group["centered"]:
            mean = state["mean"].lerp_(gradient, 1 - group["decay"])
            # Rounding may leave less than nothing of a variance of 0.
            root = torch.addcmul(square, mean, mean, value=-1).clamp_(min=0).add_(group["eps"]).sqrt_()
        else:
            root = (square + group["eps"]).sqrt_()
        if group["momentum"]:
            # The learning rate is inside the momentum, so that a changed rate does not touch steps already taken.
            parameter.sub_(state["momentum"].mul_(group["momentum"]).addcdiv_(gradient, root, value=group["lr"]))
        else:
            parameter.addcdiv_(gradient, root, value=-group["lr"])


class FlatAdaGrad(FlatOptimizer):
    """p -= lr g / (sqrt(sum of all g²) + eps) (Duchi et al. 2011): steps only ever become smaller."""

    def __init__(self, parameter: nn.Parameter, lr: float, eps: float = 1e-10):
        super().__init__(parameter, lr=lr, eps=eps)

    @torch.no_grad()
    def step(self) -> None:
        parameter, group = self.parameter, self.param_groups[0]
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None  # `FlatParams` has set it for good
        if not state:
            state["sum"] = torch.zeros_like(parameter)
        total = state["sum"].addcmul_(gradient, gradient)
        parameter.addcdiv_(gradient, total.sqrt().add_(group["eps"]), value=-group["lr"])
