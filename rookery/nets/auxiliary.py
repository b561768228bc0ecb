"""Heads of UNREAL's auxiliary tasks (Jaderberg et al. 2017, arXiv:1611.05397): pixel control and reward prediction.

Only the learner uses them: they shape the features that they share with the policy, and actors never receive them.
Losses and targets are in `ops/auxiliary.py`; which rows they are trained on is the algorithm's decision.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from rookery.nets.heads import POLICY_GAIN
from rookery.nets.init import linear

CHANNELS = 32  # of the small map
STRIDE = 2
Q_GAIN = 0.1  # Q starts near 0: pixel changes are fractions of 1
HIDDEN = 128  # units of reward prediction
CLASSES = 3  # zero, positive, negative


class PixelControlHead(nn.Module):
    """Features [..., F] -> Q-values [..., actions, h, w] of the cells of a grid: dueling (Wang et al. 2016, eq. 9).

    A linear layer makes a small map, a transposed convolution makes the grid of it: for 20x20 cells from 32 x 9 x 9
    with kernel 4 and stride 2. Value and advantages are channels of one convolution.
    """

    # Deviates: the public replica (miyosuda/unreal) applies a ReLU to value and advantages. It is left out, since
    # outputs that it sets to 0 would get no gradient.

    def __init__(self, features: int, actions: int, cells: tuple[int, int]):
        super().__init__()
        assert actions >= 1 and min(cells) >= 1, (actions, cells)
        (rows, kernel_y), (columns, kernel_x) = (transposed(side, STRIDE) for side in cells)
        self.map = (rows, columns)
        self.linear = linear(features, CHANNELS * rows * columns)
        self.deconv = deconvolution(CHANNELS, 1 + actions, (kernel_y, kernel_x), STRIDE, Q_GAIN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        small = as_map(F.relu(self.linear(x.reshape(-1, x.shape[-1])), inplace=True), self.map)
        out = self.deconv(small)
        value, advantage = out[:, :1], out[:, 1:]
        q = advantage + (value - advantage.mean(1, keepdim=True))
        return q.view(*x.shape[:-1], *q.shape[1:])


class RewardHead(nn.Module):
    """Logits of the class of the next reward: [N, inputs] -> [N, 3].

    `inputs` is the width of the features of three consecutive rows, concatenated: 3 F.
    """

    def __init__(self, inputs: int):
        super().__init__()
        self.hidden = linear(inputs, HIDDEN)
        self.out = linear(HIDDEN, CLASSES, POLICY_GAIN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(F.relu(self.hidden(x), inplace=True))


def transposed(side: int, stride: int) -> tuple[int, int]:
    """A smaller side, and the kernel with which a transposed convolution of this stride makes `side` of it.

    The kernel is 2 to 3 strides wide, so that neighbours overlap; a side too short for that is one kernel.
    """
    small = max(1, side // stride - 1)
    return small, side - stride * (small - 1)


def deconvolution(inputs: int, outputs: int, kernel: tuple[int, int], stride: int, gain: float) -> nn.ConvTranspose2d:
    """A transposed convolution without padding, weights orthogonal, bias zero, in the faster memory format on CPUs."""
    layer = nn.ConvTranspose2d(inputs, outputs, kernel, stride)
    assert layer.bias is not None
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # not in torch's stubs


def as_map(x: torch.Tensor, sides: tuple[int, int]) -> torch.Tensor:
    """Outputs of a linear layer [N, h * w * CHANNELS] as a map [N, CHANNELS, h, w] in channels_last format; a view."""
    return x.view(len(x), *sides, CHANNELS).permute(0, 3, 1, 2)
