"""Torsos: a dict of observations [N, ...] becomes one feature vector per row, [N, features].

Each leaf is encoded by its kind: an image by a CNN, vectors and one-hot integers (concatenated first) by one MLP; the
results are concatenated. Leading time and batch axes are the caller's to flatten. Not here: observation statistics
(`normalize.py`), recurrence (`core.py`).

Orthogonal weights with gain sqrt(2), zero biases.
"""

from __future__ import annotations

import importlib
import platform
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from rookery.core.config import NetConfig
from rookery.core.errors import RookeryError, UsageError
from rookery.core.frames import with_frames
from rookery.core.types import EnvSpec, Leaf
from rookery.nets.cnn import cnn
from rookery.nets.init import linear
from rookery.nets.modules import Modules
from rookery.nets.one_hot import one_hot
from rookery.nets.own import check_own

PLAIN = ("vector", "float32", 1)  # kind, dtype and axes of an observation that goes into the MLP as it is


def make_torso(spec: EnvSpec, net: NetConfig) -> Any:
    """The torso that `net` asks for: ours, or the class named in `net.module`, called as Class(spec, net).

    It is an nn.Module with an attribute `features`. It does not see which actions are legal.
    """
    spec = spec.seen
    if not net.module:
        return Torso(spec, net)
    path, _, name = net.module.partition(":")
    try:
        cls = getattr(importlib.import_module(path), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(
            f"net.module {net.module!r} cannot be imported ({error}); "
            'give "package.module:Class" of a class that is importable from here'
        ) from error
    try:
        torso = cls(spec, net)
    except RookeryError:
        raise
    except Exception as error:
        words = f"torso {net.module!r} raised when it was made: {type(error).__name__}: {error}"
        raise UsageError(with_frames(words, error)) from error
    if not isinstance(getattr(torso, "features", None), int):
        raise UsageError(f"torso {net.module!r} has no integer attribute `features`, the width of its output; add it")
    check_own(torso, spec, net.module)
    return torso


class Torso(nn.Module):
    features: int

    def __init__(self, spec: EnvSpec, net: NetConfig):
        super().__init__()
        images = {key: leaf for key, leaf in spec.obs.items() if leaf.kind == "image" and net.torso != "mlp"}
        flat = {key: leaf for key, leaf in spec.obs.items() if key not in images}
        if net.torso not in ("auto", "mlp") and not images:
            raise UsageError(
                f"torso {net.torso!r} is for images and {spec.id} has none ({_shapes(spec)}); use torso 'mlp' or 'auto'"
            )
        self.bf16 = net.precision == "bf16"
        self.image_keys, self.flat_leaves = tuple(images), tuple(flat.items())
        self.images = Modules(cnn(leaf, net) for leaf in images.values())
        self.map_shapes = {key: encoder.map_shape for key, encoder in zip(self.image_keys, self.images)}
        self.features = sum(encoder.features for encoder in self.images)
        if flat:
            self.vector = MLP(sum(leaf.width for leaf in flat.values()), net)
            self.features += self.vector.features
        # The common cases, known in advance, so that a call does not loop over leaves: acting is all overhead.
        plain = [key for key, leaf in spec.obs.items() if (leaf.kind, leaf.dtype, len(leaf.shape)) == PLAIN]
        self.plain_key = plain[0] if plain and len(spec.obs) == 1 else None

    def forward(self, obs: dict[str, torch.Tensor]) -> torch.Tensor:
        if self.bf16:
            with torch.autocast(next(iter(obs.values())).device.type, torch.bfloat16):
                return self._encode(obs).float()
        return self._encode(obs)

    def with_maps(self, obs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Features [N, F] and, for each image, the output of its convolutions [N, C, H, W], before it is flattened."""
        with torch.autocast(next(iter(obs.values())).device.type, torch.bfloat16, enabled=self.bf16):
            pairs = {key: encoder.with_map(obs[key]) for key, encoder in zip(self.image_keys, self.images)}
            features = self._joined([features for features, _ in pairs.values()], obs)
        return features.float(), {key: x.float() for key, (_, x) in pairs.items()}

    def _encode(self, obs: dict[str, torch.Tensor]) -> torch.Tensor:
        if self.plain_key is not None:
            return self.vector.forward(obs[self.plain_key])
        return self._joined([encoder(obs[key]) for key, encoder in zip(self.image_keys, self.images)], obs)

    def _joined(self, parts: list[torch.Tensor], obs: dict[str, torch.Tensor]) -> torch.Tensor:
        """The features of the images, and beside them those of everything else."""
        if self.flat_leaves:
            flat = [_flat(obs[key], leaf) for key, leaf in self.flat_leaves]
            parts.append(self.vector(flat[0] if len(flat) == 1 else torch.cat(flat, 1)))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def bf16_is_emulated(device: str) -> bool:
    """Whether this processor has no bf16 arithmetic, so that bf16 costs about ten times as much as fp32."""
    if device != "cpu" or platform.machine() not in ("x86_64", "AMD64"):
        return False
    return not torch.cpu._is_avx512_bf16_supported()


class MLP(nn.Module):
    """Linear layers, each followed by the activation. nn.Sequential spends half of a small network's time on calls."""

    def __init__(self, inputs: int, net: NetConfig):
        super().__init__()
        sizes = [inputs, *net.hidden]
        self.features = sizes[-1]
        self.layers = Modules(linear(*pair) for pair in pairwise(sizes))
        self.activation = torch.tanh_ if net.activation == "tanh" else torch.relu_
        self.pairs = [(layer.weight, layer.bias) for layer in self.layers]  # what a call needs, without its lookup

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight, bias in self.pairs:
            x = self.activation(F.linear(x, weight, bias))
        return x


def _flat(x: torch.Tensor, leaf: Leaf) -> torch.Tensor:
    """One row of floats per observation."""
    if leaf.kind in ("discrete", "multi"):
        return one_hot(x, leaf)
    x = x.reshape(x.shape[0], -1)
    return x.float() / 255 if leaf.dtype == "uint8" and leaf.kind == "image" else x.float()


def _shapes(spec: EnvSpec) -> str:
    return ", ".join(f"{key}: {leaf.kind} {leaf.shape}" for key, leaf in spec.obs.items())
