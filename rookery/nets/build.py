"""Actor-critic networks put together, and how learning runs them.

`actor_critic` returns modules in the order normalizer, body, policy | value_body, value: what actors need comes first,
so that the published part of a flat vector is its beginning.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from rookery.core import tree
from rookery.core.config import NetConfig
from rookery.core.types import EnvSpec, Tree
from rookery.nets.body import Body
from rookery.nets.heads import ValueHead, policy_head
from rookery.nets.modules import Nets
from rookery.nets.normalize import ObsNormalizer
from rookery.nets.torso import make_torso


class Forward(NamedTuple):
    """Of rows [..., ...]: leading axes as the observations have them."""

    params: Any  # of the policy; None if it was not wanted
    value: torch.Tensor
    code: torch.Tensor | None  # what the policy's encoder made of the observations; None if it did not run


def actor_critic(spec: EnvSpec, net: NetConfig, latent: int = 0) -> Nets:
    """The entry "value_body" is absent where policy and value share features. `latent`: see `Body`; of the policy's."""
    nets = Nets({"normalizer": ObsNormalizer(spec, net.normalize_obs)})
    nets["body"] = Body(spec, net, make_torso(spec, net), latent)
    nets["policy"] = policy_head(spec.action, nets["body"].features, net, spec.masked)
    if not is_shared(spec, net):
        nets["value_body"] = Body(spec, net, make_torso(spec, net))
    nets["value"] = ValueHead((nets["value_body"] if "value_body" in nets else nets["body"]).features)
    return nets


def is_shared(spec: EnvSpec, net: NetConfig) -> bool:
    """Whether policy and value read the same features: always so with images or recurrence."""
    return net.shared or net.core != "none" or any(leaf.kind == "image" for leaf in spec.obs.values())


def unroll_policy_value(nets: Nets, obs: Tree, state: Tree, reset: torch.Tensor | None) -> Forward:
    """Of whole unrolls, obs [T+1, B, ...]: policy parameters and codes of T rows, values of T+1, in one pass."""
    given, obs = obs, nets["normalizer"](obs)
    if "value_body" in nets:
        code = nets["body"].encode(tree.map(lambda x: x[:-1], obs))
        params = nets["policy"].params(nets["body"].behind(code, state, None)[0], given)
        return Forward(params, nets["value"](nets["value_body"].sequence(obs, {}, None)[0]), code)
    code = nets["body"].encode(obs)
    features, _ = nets["body"].behind(code, state, reset)
    return Forward(nets["policy"].params(features[:-1], given), nets["value"](features), code[:-1])


def policy_value_sequence(
    nets: Nets, obs: Tree, state: Tree, reset: torch.Tensor | None, want_policy: bool = True
) -> Forward:
    """Of obs [T, B, ...], see `Body.sequence`; without a core any leading axes, [N] too.

    If the policy is not wanted, the networks that only it needs do not run.
    """
    given, obs = obs, nets["normalizer"](obs)
    split, features, params, code = "value_body" in nets, None, None, None
    if want_policy or not split:
        code = nets["body"].encode(obs)
        features, _ = nets["body"].behind(code, state, reset)
    if want_policy:
        params = nets["policy"].params(features, given)
    if split:
        features, _ = nets["value_body"].sequence(obs, {}, None)
    return Forward(params, nets["value"](features), code)
