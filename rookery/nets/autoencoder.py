"""An auto-encoder around the features of a policy: `Latent` encodes them, `Decoder` reconstructs the observation.

Luo et al. 2019 ("Accelerating Distributed Deep RL", RLDM) put an auto-encoder into the policy to make its input small,
and published no architecture: this one is ours. The encoder is the torso that the policy has anyway, then `Latent`.
Only the learner decodes; actors never receive the decoder. It is not a variational auto-encoder: there is no noise and
no prior. Where the gradient of the reconstruction stops, and its weight, are the algorithm's decision.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from rookery.core.types import EnvSpec, Leaf
from rookery.nets.auxiliary import CHANNELS, as_map, deconvolution, transposed
from rookery.nets.cnn import layout
from rookery.nets.heads import VALUE_GAIN
from rookery.nets.init import HIDDEN_GAIN, linear
from rookery.nets.modules import Modules
from rookery.nets.one_hot import one_hot
from rookery.ops.auxiliary import reconstruction_loss

HIDDEN = 64  # units of the layer in front of a vector
LARGE = 36  # pixels per side from which on an image is decoded as a large one
MIDDLE = 16  # channels between the small map and the patches of a large image


class Latent(nn.Module):
    """Features [..., F] -> a code [..., features] in (-1, 1).

    tanh bounds the code, so that reconstruction cannot be improved by its scale and the heads behind it have inputs of
    known size without a LayerNorm; a ReLU would leave half of a small code unused.
    """

    def __init__(self, inputs: int, features: int):
        super().__init__()
        self.linear = linear(inputs, features)
        self.features = features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Decoder(nn.Module):
    """A code [N, latent] -> every leaf of the observation, and how far off it is.

    Images are predicted in their own layout; bytes as floats in [0, 1], without a squashing function. Vectors are
    predicted as they come in: normalise them before. Integers are predicted as one-hot vectors [N, *shape, n].

    With `newest`, only the newest frame of a stack is predicted, [N, H, W]: the others were the newest one before.
    """

    def __init__(self, spec: EnvSpec, latent: int, hidden: int = HIDDEN, newest: bool = True):
        super().__init__()
        spec = spec.seen
        self.leaves = spec.obs
        self.newest = {key for key, leaf in spec.obs.items() if newest and leaf.stack > 1}
        self.decoders = Modules(self._decoder(key, latent, hidden) for key in spec.obs)

    def forward(self, latent: torch.Tensor) -> dict[str, torch.Tensor]:
        assert latent.ndim == 2, latent.shape
        return {key: decoder(latent) for key, decoder in zip(self.leaves, self.decoders)}

    def loss(self, latent: torch.Tensor, obs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Half the mean squared error of each row, [N]: mean over the elements of a leaf, then over leaves."""
        target = self.target(obs)
        losses = [reconstruction_loss(predicted, target[key]) for key, predicted in self(latent).items()]
        return torch.stack(losses).mean(0)

    @torch.no_grad()
    def target(self, obs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What `forward` should return for observations [N, ...]."""
        return {key: self._target(key, obs[key]) for key in self.leaves}

    def _target(self, key: str, x: torch.Tensor) -> torch.Tensor:
        leaf = self.leaves[key]
        if leaf.kind == "discrete":
            return F.one_hot(x.long(), leaf.n).float()
        if leaf.kind == "multi":
            return one_hot(x, leaf)
        if leaf.kind == "vector":
            return x.float()
        x = x[:, -1] if key in self.newest else x
        return x.float() / 255 if x.dtype == torch.uint8 else x.float()

    def _decoder(self, key: str, latent: int, hidden: int) -> nn.Module:
        leaf = self.leaves[key]
        if leaf.kind == "image":
            return ImageDecoder(leaf.shape[1:] if key in self.newest else leaf.shape, latent)
        shape = {"discrete": (*leaf.shape, leaf.n), "multi": (leaf.width,)}.get(leaf.kind, leaf.shape)
        return FlatDecoder(shape, latent, hidden)


class FlatDecoder(nn.Module):
    """[N, latent] -> [N, *shape], by one hidden layer."""

    def __init__(self, shape: tuple[int, ...], latent: int, hidden: int):
        super().__init__()
        self.shape = shape
        self.hidden = linear(latent, hidden)
        self.out = linear(hidden, math.prod(shape), VALUE_GAIN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.hidden(x))).view(len(x), *self.shape)


class ImageDecoder(nn.Module):
    """[N, latent] -> [N, *shape], an image of layout (C, H, W), (H, W, C) or (H, W).

    For large images it is torso `nips` in reverse: a linear layer, a transposed convolution with stride 2 from 32 to
    16 channels, patches of 4x4 pixels. For small ones: a linear layer and patches of 2x2 pixels.

    Patches do not overlap: each is a linear function of the channels at one place. That is a transposed convolution
    whose kernel is its stride, computed as a matrix product, which is faster on a CPU: 6 ms instead of 26 ms for 512
    images of 42x42, forward and backward on one thread (52 ms with a kernel of 8). All of the decoder takes 27 ms
    then; torso `nips` takes 21 ms, `nature` 41 ms.
    """

    def __init__(self, shape: tuple[int, ...], latent: int):
        super().__init__()
        self.channels, height, width, self.last = layout(Leaf(shape, "uint8", "image"))
        self.axes, self.image = len(shape), (height, width)
        self.patch = 4 if min(self.image) >= LARGE else 2
        self.grid = (math.ceil(height / self.patch), math.ceil(width / self.patch))
        self.map, inputs, self.deconv = self.grid, CHANNELS, None
        if self.patch == 4:
            (rows, kernel_y), (columns, kernel_x) = (transposed(side, 2) for side in self.grid)
            self.map, inputs = (rows, columns), MIDDLE
            self.deconv = deconvolution(CHANNELS, MIDDLE, (kernel_y, kernel_x), 2, HIDDEN_GAIN)
        self.linear = linear(latent, CHANNELS * math.prod(self.map))
        self.pixels = linear(inputs, self.channels * self.patch**2, VALUE_GAIN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = as_map(F.relu(self.linear(x), inplace=True), self.map)
        if self.deconv is not None:
            y = F.relu(self.deconv(y), inplace=True)
        return self._joined(self.pixels(y.permute(0, 2, 3, 1)))

    def _joined(self, patches: torch.Tensor) -> torch.Tensor:
        """Patches [N, rows, columns, C * patch * patch] side by side, and of that the centre: [N, *shape]."""
        size, (height, width) = self.patch, self.image
        rows, columns = self.grid[0] * size, self.grid[1] * size
        top, left = (rows - height) // 2, (columns - width) // 2
        y = patches.unflatten(3, (self.channels, size, size))
        if self.last:
            y = y.permute(0, 1, 4, 2, 5, 3).reshape(len(y), rows, columns, self.channels)
            return y[:, top : top + height, left : left + width]
        y = y.permute(0, 3, 1, 4, 2, 5).reshape(len(y), self.channels, rows, columns)
        y = y[:, :, top : top + height, left : left + width]
        return y.squeeze(1) if self.axes == 2 else y
