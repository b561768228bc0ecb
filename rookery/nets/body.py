"""From observations to features: a torso, the code of an auto-encoder and a recurrent core if there are, in this order.

All algorithms use this one module.

`step` is for acting, one row; `sequence` is for learning, [T, B, ...]. Both compute the same numbers. Observations come
in normalised: the bodies of an algorithm (policy and value, online and target) share one normalizer, which runs once
for all of them. A target network is a deep copy of a body.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rookery.core import tree
from rookery.core.config import NetConfig
from rookery.core.errors import UsageError
from rookery.core.types import EnvSpec, Tree
from rookery.nets.autoencoder import Latent
from rookery.nets.core import Core


class Body(nn.Module):
    """`features` is the width of the output. Without a core the state is {} and stays so, and resets are not read."""

    def __init__(self, spec: EnvSpec, net: NetConfig, torso: Any, latent: int = 0):
        """`torso`: see `make_torso`. `latent`: width of a code between torso and core; 0: none."""
        super().__init__()
        self.torso = torso
        self.latent = Latent(torso.features, latent) if latent else None
        self.code: int = latent or torso.features  # width of what `encode` returns
        self.core: Core | None = None
        self.features: int = self.code
        if net.core != "none":
            self.core = Core(net.core, self.code, net.core_size, net.core_layers)
            self.features = net.core_size
        self.cut = False  # no gradient passes from behind the code to the encoder
        self.frozen = False  # the encoder has no gradient at all
        self._parts = (torso, self.latent, self.core)  # what a step needs, without its lookups
        self._key, leaf = next(iter(spec.seen.obs.items()))
        self._axes = len(leaf.shape)

    def initial(self, lanes: int) -> Tree:
        """The recurrent state at an episode's start."""
        return {} if self.core is None else self.core.initial(lanes)

    def step(self, obs: Tree, state: Tree) -> tuple[torch.Tensor, Tree]:
        """obs [B, ...] and the state before them: features [B, F] and the next state."""
        torso, latent, core = self._parts
        features = torso(obs) if latent is None else latent(torso(obs))
        return (features, state) if core is None else core.step(features, state)

    def sequence(self, obs: Tree, state: Tree, reset: torch.Tensor | None) -> tuple[torch.Tensor, Tree]:
        """obs [T, B, ...] and the state before row 0: features [T, B, F] and the state behind the last row.

        `reset` [T, B] says before which rows the state is zeroed. Without a core any leading axes will do.
        """
        return self.behind(self.encode(obs), state, reset)

    def encode(self, obs: Tree) -> torch.Tensor:
        """What the torso (and the latent layer) make of obs [T, B, ...]: [T, B, code]; any leading axes will do."""
        lead = self._lead(obs)
        if self.frozen:
            with torch.no_grad():
                return self._encode(obs, lead)
        return self._encode(obs, lead)

    def _encode(self, obs: Tree, lead: torch.Size) -> torch.Tensor:
        x = self.torso(_joined(obs, lead))
        return _split(x if self.latent is None else self.latent(x), lead)

    def behind(self, code: torch.Tensor, state: Tree, reset: torch.Tensor | None) -> tuple[torch.Tensor, Tree]:
        """Features [T, B, F] of encoded observations, and the state behind the last row."""
        return self._recurrent(code.detach() if self.cut else code, state, reset)

    def sequence_and_maps(
        self, obs: Tree, state: Tree, reset: torch.Tensor | None
    ) -> tuple[torch.Tensor, Tree, dict[str, torch.Tensor]]:
        """As `sequence`, and for each image what its convolutions made of it, [T, B, C, H, W], from the same pass."""
        assert self.latent is None  # no algorithm has both maps and a code
        keys, lead = self.map_shapes, self._lead(obs)
        features, maps = self.torso.with_maps(_joined(obs, lead))
        features, state = self._recurrent(_split(features, lead), state, reset)
        return features, state, {key: _split(maps[key], lead) for key in keys}

    def burned_in(self, obs: Tree, state: Tree, reset: torch.Tensor, burn_in: int) -> torch.Tensor:
        """Features of the rows behind the first `burn_in`, which pass no gradient: they only bring the state along."""
        if burn_in:
            with torch.no_grad():
                _, state = self.sequence(tree.map(lambda x: x[:burn_in], obs), state, reset[:burn_in])
        return self.sequence(tree.map(lambda x: x[burn_in:], obs), state, reset[burn_in:])[0]

    @property
    def map_shapes(self) -> dict[str, tuple[int, int, int]]:
        """(C, H, W) of the maps of `sequence_and_maps`, by the name of the image. An error if there is none."""
        if shapes := getattr(self.torso, "map_shapes", {}):
            return shapes
        raise UsageError(
            f"the torso {type(self.torso).__name__} has no spatial map of an image, which this network needs; with "
            "image observations use net.torso 'tiny', 'nips', 'nature', 'impala' or 'resnet', or give the class of "
            "net.module `map_shapes` and `with_maps` (see docs/your-network.md)"
        )

    def _recurrent(self, features: torch.Tensor, state: Tree, reset: torch.Tensor | None) -> tuple[torch.Tensor, Tree]:
        if self.core is None:
            return features, state
        assert reset is not None
        return self.core.sequence(features, state, reset)

    def _lead(self, obs: Tree) -> torch.Size:
        """The leading (time and batch) axes of observations."""
        shape = obs[self._key].shape
        return shape[: len(shape) - self._axes]


def _joined(obs: Tree, lead: torch.Size) -> Tree:
    return tree.map(lambda x: x.flatten(0, len(lead) - 1), obs) if len(lead) > 1 else obs


def _split(x: torch.Tensor, lead: torch.Size) -> torch.Tensor:
    return x.unflatten(0, lead) if len(lead) > 1 else x
