"""Actor-critic networks put together, and how learning runs them.

`actor_critic` returns modules in the order normalizer, body, policy | value_body, value: what actors need comes first,
so that the published part of a flat vector is its beginning.
"""

from __future__ import annotations

from typing import Any

import torch

from rookery.core import tree
from rookery.core.config import NetConfig
from rookery.core.types import EnvSpec, Tree
from rookery.nets.body import Body
from rookery.nets.heads import ValueHead, policy_head
from rookery.nets.modules import Nets
from rookery.nets.normalize import ObsNormalizer
from rookery.nets.torso import make_torso


def actor_critic(spec: EnvSpec, net: NetConfig) -> Nets:
    """The entry "value_body" is absent where policy and value share features."""
    nets = Nets({"normalizer": ObsNormalizer(spec, net.normalize_obs)})
    nets["body"] = Body(spec, net, make_torso(spec, net))
    nets["policy"] = policy_head(spec.action, nets["body"].features, net)
    if not is_shared(spec, net):
        nets["value_body"] = Body(spec, net, make_torso(spec, net))
    nets["value"] = ValueHead(nets["body"].features)
    return nets


def is_shared(spec: EnvSpec, net: NetConfig) -> bool:
    """Whether policy and value read the same features: always so with images or recurrence."""
    return net.shared or net.core != "none" or any(leaf.kind == "image" for leaf in spec.obs.values())


def unroll_policy_value(nets: Nets, obs: Tree, state: Tree, reset: torch.Tensor | None) -> tuple[Any, torch.Tensor]:
    """Of whole unrolls, obs [T+1, B, ...]: policy parameters of T rows and values of T+1, [T+1, B], in one pass."""
    obs = nets["normalizer"](obs)
    if "value_body" in nets:
        features, _ = nets["body"].sequence(tree.map(lambda x: x[:-1], obs), state, None)
        return nets["policy"](features), nets["value"](nets["value_body"].sequence(obs, {}, None)[0])
    features, _ = nets["body"].sequence(obs, state, reset)
    return nets["policy"](features[:-1]), nets["value"](features)


def policy_value_sequence(
    nets: Nets, obs: Tree, state: Tree, reset: torch.Tensor | None, want_policy: bool = True
) -> tuple[Any, torch.Tensor]:
    """Policy parameters and values of obs [T, B, ...], see `Body.sequence`; without a core any leading axes, [N] too.

    If the policy is not wanted, its parameters are None and the networks that only it needs do not run.
    """
    obs = nets["normalizer"](obs)
    split, features, params = "value_body" in nets, None, None
    if want_policy or not split:
        features, _ = nets["body"].sequence(obs, state, reset)
    if want_policy:
        params = nets["policy"](features)
    if split:
        features, _ = nets["value_body"].sequence(obs, {}, None)
    return params, nets["value"](features)
