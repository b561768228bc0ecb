"""The visual network of DD-PPO, Wijmans et al. 2020: a residual network of half width with GroupNorm, `resnet`.

The layout is ResNet-18 (He et al. 2016) with 32, 64, 128 and 256 channels instead of 64 to 512, and the compression of
Habitat's implementation: a convolution that leaves about 2,048 values of any image, instead of a global average. There
is no BatchNorm: a row must give the same numbers when it is acted on and when it is learnt from, whatever else is in
its batch.

The input depends on the shorter side of the image:

- from 128 pixels on, 2x2 pixels are averaged first, as Habitat does with all images;
- from 64 pixels on, a 7x7 convolution with stride 2 and a 3x3 max-pool with stride 2 come first;
- below 64 pixels, a 3x3 convolution with stride 1 takes their place, or little would be left to look at.

Below 64 pixels the first stage therefore works at full resolution: a 42x42 image costs more than one of 84x84.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

WIDTHS = (32, 64, 128, 256)  # channels of the stages; each but the first halves the resolution
BLOCKS = 2  # per stage
GROUPS = 16  # of every GroupNorm but the last: half of the first stage's channels
COMPRESSED = 2048  # values that the compression leaves of an image, about
AVERAGED, POOLED = 128, 64  # pixels of the shorter side from which on the input is reduced


class ResNet(nn.Module):
    """Images [N, C, H, W] -> maps [N, *map_shape]."""

    # Deviates: the paper's main results are with ResNet-50. This is ResNet-18, Habitat's default.
    def __init__(self, channels: int, height: int, width: int):
        super().__init__()
        side = min(height, width)
        self.averaged, self.pooled = side >= AVERAGED, side >= POOLED
        self.stem = _conv(channels, WIDTHS[0], 7, 2) if self.pooled else _conv(channels, WIDTHS[0], 3)
        self.stem_norm = nn.GroupNorm(GROUPS, WIDTHS[0])
        self.stages = nn.Sequential(_stage(WIDTHS[0], WIDTHS[0], 1), *(_stage(*pair, 2) for pair in pairwise(WIDTHS)))
        rows, columns = (self._side(pixels) for pixels in (height, width))
        compressed = max(1, round(COMPRESSED / (rows * columns)))
        self.compression = _conv(WIDTHS[-1], compressed, 3)
        self.compression_norm = nn.GroupNorm(1, compressed)
        self.map_shape = (compressed, rows, columns)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.averaged:
            x = F.avg_pool2d(x, 2)
        x = F.relu(self.stem_norm(self.stem(x)), inplace=True)
        if self.pooled:
            x = F.max_pool2d(x, 3, 2, padding=1)
        return F.relu(self.compression_norm(self.compression(self.stages(x))), inplace=True)

    def _side(self, pixels: int) -> int:
        """How many rows or columns are left of so many pixels."""
        pixels = pixels // 2 if self.averaged else pixels
        for _ in range(2 * self.pooled + len(WIDTHS) - 1):
            pixels = (pixels + 1) // 2  # padded: the half, rounded up
        return pixels


class Block(nn.Module):
    """Two convolutions beside a shortcut, which is a 1x1 convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.first, self.first_norm = _conv(inputs, outputs, 3, stride), nn.GroupNorm(GROUPS, outputs)
        self.second, self.second_norm = _conv(outputs, outputs, 3), nn.GroupNorm(GROUPS, outputs)
        self.shortcut: nn.Module | None = None
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(_conv(inputs, outputs, 1, stride), nn.GroupNorm(GROUPS, outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.first_norm(self.first(x)), inplace=True)
        y = self.second_norm(self.second(y))
        return F.relu(y + (x if self.shortcut is None else self.shortcut(x)), inplace=True)


def _stage(inputs: int, outputs: int, stride: int) -> nn.Module:
    return nn.Sequential(Block(inputs, outputs, stride), *(Block(outputs, outputs, 1) for _ in range(BLOCKS - 1)))


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """Padded, without a bias: the GroupNorm behind it has one. Kaiming's normal weights."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    # Deviates: Habitat's `layer_init` passes the gain of a ReLU as the slope of a leaky one, so that weights are
    # smaller by sqrt(3). Outputs are the same, since a GroupNorm follows.
    nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
    return conv
