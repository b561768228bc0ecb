"""Actor-critic networks put together, and the two ways algorithms run them: one step to act, sequences to learn.

`actor_critic` returns modules in the order normalizer, torso, core, policy | value_torso, value: what actors need
comes first, so that the published part of a flat vector is its beginning.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rookery.core import tree
from rookery.core.config import NetConfig
from rookery.core.types import EnvSpec, Tree
from rookery.nets.core import Core
from rookery.nets.heads import ValueHead, policy_head
from rookery.nets.normalize import ObsNormalizer
from rookery.nets.torso import make_torso


def actor_critic(spec: EnvSpec, net: NetConfig) -> nn.ModuleDict:
    """Entries "core" (without recurrence) and "value_torso" (when shared) are absent."""
    nets = nn.ModuleDict({"normalizer": ObsNormalizer(spec, net.normalize_obs), "torso": make_torso(spec, net)})
    features = nets["torso"].features
    if net.core != "none":
        nets["core"] = Core(net.core, features, net.core_size, net.core_layers)
        features = net.core_size
    nets["policy"] = policy_head(spec.action, features, net)
    if not is_shared(spec, net):
        nets["value_torso"] = make_torso(spec, net)
    nets["value"] = ValueHead(features)
    return nets


def is_shared(spec: EnvSpec, net: NetConfig) -> bool:
    """Whether policy and value read the same features: always so with images or recurrence."""
    return net.shared or net.core != "none" or any(leaf.kind == "image" for leaf in spec.obs.values())


def initial_state(nets: nn.ModuleDict, lanes: int) -> Tree:
    return nets["core"].initial(lanes) if "core" in nets else {}


def policy_step(nets: nn.ModuleDict, obs: Tree, state: Tree) -> tuple[Any, Tree]:
    """One row of acting, obs [B, ...]: the policy head's parameters and the next recurrent state."""
    features, state = features_step(nets, obs, state)
    return nets["policy"](features), state


def features_step(nets: nn.ModuleDict, obs: Tree, state: Tree) -> tuple[torch.Tensor, Tree]:
    """What the heads read, for one row of acting, and the next recurrent state."""
    normalizer = nets["normalizer"]
    features = nets["torso"](normalizer(obs) if normalizer.keys else obs)
    return nets["core"].step(features, state) if "core" in nets else (features, state)


def policy_value_sequence(
    nets: nn.ModuleDict,
    obs: Tree,
    state: Tree,
    reset: torch.Tensor | None,
    want_policy: bool = True,
    want_value: bool = True,
) -> tuple[Any, torch.Tensor | None]:
    """Policy parameters and values of obs [T, B, ...]; without a core any leading axes, [N, ...] too.

    `state` is the recurrent state before row 0; `reset` [T, B] says where it is zeroed (both unused without a core).
    What is not wanted is None, and its networks do not run.
    """
    normalizer = nets["normalizer"]
    lead = normalizer.lead(obs)
    if len(lead) > 1:
        obs = tree.map(lambda x: x.flatten(0, len(lead) - 1), obs)
    obs = normalizer(obs)
    split = "value_torso" in nets
    features = nets["torso"](obs) if want_policy or not split else None
    if features is not None:
        features = _lead(features, lead)
    if "core" in nets:
        features, _ = nets["core"].sequence(features, state, reset)
    params = nets["policy"](features) if want_policy else None
    if not want_value:
        return params, None
    return params, nets["value"](_lead(nets["value_torso"](obs), lead) if split else features)


def _lead(x: torch.Tensor, lead: torch.Size) -> torch.Tensor:
    return x.unflatten(0, lead) if len(lead) > 1 else x
