"""Convolutional encoders of images, from the smallest images to the deepest network.

- `tiny`: for images of a few pixels, such as 10x10 MinAtar and 7x7 grid worlds. It halves the resolution only once.
- `compact`: two layers for frames of half the usual size, 42x42: half as expensive as RLlib's for that size.
- `nips`: the shallow network of A3C, UNREAL and IMPALA (first in Mnih et al. 2013, at a NIPS workshop).
- `nature`: DQN, Mnih et al. 2015.
- `impala`: the deep residual network of IMPALA, Espeholt et al. 2018.
- `resnet`: the residual network of DD-PPO with GroupNorm, Wijmans et al. 2020 (`resnet.py`).

Images arrive as they are stored: uint8 or float, (C, H, W), (H, W, C) or (H, W). uint8 pixels are divided by 255,
floats are taken as they are. Convolutions run in channels_last memory format, which on CPUs is the faster one in
training (Nature, 256 frames of 4x84x84, one thread: 0.20 s against 0.26 s forward and backward).
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from rookery.core.config import NetConfig
from rookery.core.errors import UsageError
from rookery.core.types import Leaf
from rookery.nets.init import HIDDEN_GAIN, linear, orthogonal
from rookery.nets.resnet import ResNet

CHUNK = 64  # images per pass on a CPU: their activations fit its cache, and memory is reused instead of mapped again
MIN_PIXELS = {"nature": 36, "nips": 20, "compact": 10}  # per side: with fewer, the last convolution has no output


def cnn(leaf: Leaf, net: NetConfig) -> Encoder:
    """The encoder of an image leaf: [N, *leaf.shape] -> [N, features]."""
    channels, height, width, last = layout(leaf)
    kind = net.torso
    if kind == "auto":
        kind = "nature" if min(height, width) >= MIN_PIXELS["nature"] else "tiny"
    least = MIN_PIXELS.get(kind, 1)
    if min(height, width) < least:
        raise UsageError(
            f"torso {kind!r} needs {least}x{least} pixels or more and this image has {height}x{width}; "
            "use torso 'tiny', 'impala' or 'auto'"
        )
    stack, map_shape = _stack(kind, (channels, height, width))
    encoder = Encoder(stack, map_shape, last, net.features, net.standardize)
    if kind == "tiny" and min(height, width) >= MIN_PIXELS["nature"]:  # chosen by name: `auto` takes nature here
        warnings.warn(
            f"torso 'tiny' is for images of a few pixels: it halves the resolution only once, so its map of this "
            f"{height}x{width} image has {math.prod(encoder.map_shape):,} values and is slow; use 'nips' or 'nature'",
            stacklevel=2,
        )
    return encoder


class Encoder(nn.Module):
    """Image in, convolutions, one linear layer if `features` is its width and not 0, features out."""

    def __init__(
        self, stack: nn.Module, map_shape: tuple[int, int, int], last: bool, features: int, standardize: bool = False
    ):
        super().__init__()
        self.standardize = standardize
        self.last = last
        self.map_shape = map_shape  # what the stack makes of an image: (C, H, W)
        size = math.prod(map_shape)
        self.stack = stack.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # not in torch's stubs
        self.linear = linear(size, features) if features else None
        self.features = features or size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._features(self._convolved(x))

    def with_map(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Features [N, F], and the output of the convolutions [N, C, H, W]: a view, nothing is computed for it."""
        y = self._convolved(x)
        channels, height, width = self.map_shape
        return self._features(y), y.view(-1, height, width, channels).permute(0, 3, 1, 2)

    def _features(self, y: torch.Tensor) -> torch.Tensor:
        return y if self.linear is None else F.relu(self.linear(y), inplace=True)

    def _convolved(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_cpu and not torch.compiler.is_exporting() and len(x) > CHUNK:  # an export is of any number of rows
            return torch.cat([self._convolve(part) for part in x.chunk(math.ceil(len(x) / CHUNK))])
        return self._convolve(x)

    def _convolve(self, x: torch.Tensor) -> torch.Tensor:
        pixels = self._pixels(x)
        y = self.stack(_standardized(pixels) if self.standardize else pixels)
        return y.permute(0, 2, 3, 1).flatten(1)  # as it lies in memory: rows, columns, channels

    def _pixels(self, x: torch.Tensor) -> torch.Tensor:
        """Floats [N, C, H, W] in channels_last format. Reordering bytes first, then converting, is the fast order."""
        if x.dim() == 3:
            x = x.unsqueeze(1)
        elif not self.last:
            x = torch.stack(x.unbind(1), -1).permute(0, 3, 1, 2)
        else:
            x = x.permute(0, 3, 1, 2)
        return x.float().mul_(1 / 255) if x.dtype == torch.uint8 else x.float()


def _standardized(x: torch.Tensor) -> torch.Tensor:
    """Each image [N, C, H, W] with mean 0 and deviation 1; one without contrast becomes 0."""
    rows = x.permute(0, 2, 3, 1)  # as it lies in memory: a tenth of the time
    return F.layer_norm(rows, rows.shape[1:], eps=1e-6).permute(0, 3, 1, 2)


class Residual(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(F.relu(self.first(F.relu(x)), inplace=True))


class Convolutions(nn.Module):
    """Convolutions with ReLU, called without the detour over modules: 0.1 ms of 1.6 ms for four frames."""

    def __init__(self, channels: int, layers: list[tuple[int, int, int, int]]):
        super().__init__()
        self.layers = nn.ModuleList()
        self.calls = []
        for width, kernel, stride, padding in layers:
            layer = nn.Conv2d(channels, width, kernel, stride, padding)
            self.layers.append(layer)
            self.calls.append((layer.weight, layer.bias, stride, padding))
            channels = width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for call in self.calls:
            x = F.conv2d(x, *call).relu_()
        return x


def _tiny(channels: int) -> nn.Module:
    return Convolutions(channels, [(32, 3, 1, 1), (64, 3, 2, 1)])


def _nips(channels: int) -> nn.Module:
    return Convolutions(channels, [(16, 8, 4, 0), (32, 4, 2, 0)])


def _compact(channels: int) -> nn.Module:
    return Convolutions(channels, [(16, 6, 3, 0), (32, 4, 2, 0)])


def _nature(channels: int) -> nn.Module:
    return Convolutions(channels, [(32, 8, 4, 0), (64, 4, 2, 0), (64, 3, 1, 0)])


def _impala(channels: int) -> nn.Module:
    layers: list[nn.Module] = []
    for width in (16, 32, 32):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.MaxPool2d(3, 2, padding=1)]
        layers += [Residual(width), Residual(width)]
        channels = width
    return nn.Sequential(*layers, nn.ReLU(inplace=True))


STACKS = {"tiny": _tiny, "compact": _compact, "nips": _nips, "nature": _nature, "impala": _impala}


def _stack(kind: str, image: tuple[int, int, int]) -> tuple[nn.Module, tuple[int, int, int]]:
    """Convolutions with their initial weights, and the shape (C, H, W) of what they make of an image."""
    if kind == "resnet":
        resnet = ResNet(*image)
        return resnet, resnet.map_shape
    stack = STACKS[kind](image[0])
    for module in stack.modules():
        if isinstance(module, nn.Conv2d):
            orthogonal(module, HIDDEN_GAIN)
    return stack, _outputs(stack, image)


def _outputs(stack: nn.Module, image: tuple[int, int, int]) -> tuple[int, int, int]:
    """(C, H, W) that convolutions and pools, one behind the other, make of an image; nothing is computed for it."""
    channels, height, width = image
    for layer in stack.modules():
        if isinstance(layer, nn.Conv2d | nn.MaxPool2d):
            kernel, stride, padding = (_pair(size) for size in (layer.kernel_size, layer.stride, layer.padding))
            sides = zip((height, width), kernel, stride, padding)
            height, width = ((side + 2 * p - k) // s + 1 for side, k, s, p in sides)
        if isinstance(layer, nn.Conv2d):
            channels = layer.out_channels
    return channels, height, width


def _pair(size: Any) -> tuple[int, int]:
    return size if isinstance(size, tuple) else (size, size)


def layout(leaf: Leaf) -> tuple[int, int, int, bool]:
    """Channels, height, width, and whether channels come last: the smaller of first and last axis is the channels."""
    if len(leaf.shape) == 2:
        return 1, *leaf.shape, False
    if len(leaf.shape) != 3:
        raise UsageError(f"an image has 2 or 3 axes, not shape {leaf.shape}; give the leaf kind 'vector' or net.module")
    first, _, last = leaf.shape
    if last < first:
        return last, leaf.shape[0], leaf.shape[1], True
    return first, leaf.shape[1], leaf.shape[2], False
