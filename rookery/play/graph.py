"""A policy as one `nn.Module` with named inputs and outputs, so that it can be exported: a dict to a dict.

    inputs    the observations as the environment has them, with a batch axis; `action_mask` where the policy is masked;
              with a memory its state (`state_h`, ...), and `episode_start`, which zeroes the state first; with
              `net.feed_last` also `last_reward`, while the last action is part of the state
    outputs   `action` as the environment takes it, greedy; what it was chosen by (`logits`, `q`, or `mean` and `std`);
              `value` if there is one; the state for the next step (`next_state_h`, ...)

Tensors only, and no branch on values or on the batch size. Not here: files (`export.py`), the check that a file acts as
the policy does (`parity.py`). Which networks there are is read from their classes, and that check finds a mistake.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from rookery.core import tree
from rookery.core.errors import UsageError
from rookery.core.types import MASK, ActionSpec, EnvSpec, Leaf, Tree
from rookery.envs.last import ACTION, REWARD, width
from rookery.nets.body import Body
from rookery.nets.critic import DeterministicPolicy
from rookery.nets.heads import Categorical, Gaussian, MultiCategorical, PolicyHead
from rookery.nets.modules import Nets
from rookery.nets.qnet import QHead
from rookery.ops.legal import only_legal
from rookery.ops.rescale import unrescaled
from rookery.play.policy import Policy

START = "episode_start"
STATE, NEXT = "state_", "next_"  # a state comes in as state_X and goes out as next_state_X
OUTPUTS = ("action", "logits", "q", "mean", "std", "value")

Decision = tuple[torch.Tensor, dict[str, torch.Tensor], Tree]  # greedy action, what it was chosen by, next state


@dataclass(frozen=True)
class Port:
    """One input or output; `shape` is without the batch axis."""

    name: str
    dtype: str  # numpy's name
    shape: tuple[int, ...]
    about: str


class PolicyGraph(nn.Module):
    """`inputs` and `outputs` describe what goes in and comes out, in this order."""

    def __init__(self, policy: Policy):
        super().__init__()
        spec, nets = policy.spec, in_fp32(policy.nets)
        self._spec, self._decide = spec, _decider(policy, nets)
        self._last = policy.config.net.feed_last
        # In a list: networks hold their weights a second time, for quick calls, and export would write both.
        self._nets = [nets]
        self.names = {name: _free(name) for name in _own(spec, self._last)}
        self._firsts = {name: _firsts(leaf) for name, leaf in spec.obs.items()}
        self._scale = _Scale(spec.action)
        state = _initial(nets)
        if self._last:
            state = state | {ACTION: torch.zeros(1, width(spec.action))}
        self.state = {STATE + path.replace("/", "_"): path for path in tree.flatten(state)} if state else {}
        leaves = tree.flatten(state) if state else {}
        self.inputs = [*self._seen(), *self._remembered(leaves)]
        self.outputs: list[Port] = []  # known once it has run
        with torch.no_grad():
            self.outputs = [self._output(name, x) for name, x in self(self.example(2)).items()]

    def example(self, rows: int) -> dict[str, torch.Tensor]:
        """Inputs of the right form; zeros, with everything legal."""
        made = {port.name: torch.from_numpy(np.zeros((rows, *port.shape), port.dtype)) for port in self.inputs}
        for name, leaf in self._spec.obs.items():
            if name in self.names and (firsts := self._firsts[name]) is not None:
                made[self.names[name]] += firsts
            if leaf.kind == "mask":
                made[MASK] = torch.ones_like(made[MASK])
        return made

    def forward(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        spec, start = self._spec, inputs.get(START)
        obs = {name: _counted(inputs[given], self._firsts[name]) for name, given in self.names.items()}
        state = {path: _zeroed(inputs[name], start) for name, path in self.state.items()}
        if self._last:
            reward = _zeroed(inputs[REWARD], start)
            obs[ACTION] = state.pop(ACTION)
            obs[REWARD] = (reward.clamp(-1, 1) if spec.clipped else reward).unsqueeze(1)
        legal = inputs[MASK] if spec.masked else None
        action, more, after = self._decide({name: obs[name] for name in spec.seen.obs}, tree.unflatten(state), legal)
        if self._last:
            after = after | {ACTION: _shown(action, spec.action)}
        carried = tree.flatten(after) if self.state else {}
        return {
            "action": self._scale(action), **more,
            **{NEXT + name: carried[path] for name, path in self.state.items()},
        }  # fmt: skip

    def _seen(self) -> list[Port]:
        ports = [_observation(given, self._spec.obs[name]) for name, given in self.names.items()]
        if self._spec.masked:
            about = "which actions are legal; where none is, all are"
            ports.append(Port(MASK, "bool", self._spec.obs[MASK].shape, about))
        if self._last:
            ports.append(Port(REWARD, "float32", (), "reward of the last step"))
        return ports

    def _remembered(self, leaves: dict[str, torch.Tensor]) -> list[Port]:
        if not self.state:
            return []
        ports = [
            Port(name, "float32", tuple(leaves[path].shape[1:]), f"{NEXT}{name} of the last step; at first zeros")
            for name, path in self.state.items()
        ]
        return [*ports, Port(START, "bool", (), "whether an episode begins: its state is zeroed before it is used")]

    def _output(self, name: str, x: torch.Tensor) -> Port:
        return Port(name, str(x.dtype).removeprefix("torch."), tuple(x.shape[1:]), _about(name, self._spec.action))


def in_fp32(nets: Nets) -> Nets:
    """A copy that computes in float32 throughout, without gradients."""
    nets = copy.deepcopy(nets).requires_grad_(False).eval()
    for module in nets.modules():
        if hasattr(module, "bf16"):
            setattr(module, "bf16", False)  # noqa: B010 - to a type checker it is a module
    return nets


def _own(spec: EnvSpec, last: bool) -> list[str]:
    """The observations that come from the environment."""
    return [name for name in spec.seen.obs if not (last and name in (ACTION, REWARD))]


def _free(name: str) -> str:
    """The name of an observation as an input: another one if it is also that of something else."""
    taken = name in (*OUTPUTS, MASK, START, REWARD) or name.startswith((STATE, NEXT))
    return f"obs.{name}" if taken else name


def _observation(name: str, leaf: Leaf) -> Port:
    if leaf.kind not in ("discrete", "multi"):
        return Port(name, leaf.dtype, leaf.shape, "an image" if leaf.kind == "image" else "numbers")
    counts = leaf.n if leaf.kind == "discrete" else list(leaf.counts)
    return Port(name, "int64", leaf.shape, f"integers of {counts} values, counted from {list(leaf.starts) or 0}")


def _about(name: str, action: ActionSpec) -> str:
    return {
        "action": "greedy, as the environment takes it",
        "logits": "of the choices" + (" of all branches in a row" if action.kind == "multi" else ""),
        "q": "values of all actions, legal or not",
        "mean": "of the Gaussian, before it is scaled to the bounds",
        "std": "of the Gaussian, before it is scaled to the bounds",
        "value": "of the observation, in units of the rewards that were learnt from",
    }.get(name, f"{name.removeprefix(NEXT)} of the next step")


def _firsts(leaf: Leaf) -> torch.Tensor | None:
    return torch.tensor(leaf.starts).reshape(leaf.shape) if leaf.starts else None


def _counted(x: torch.Tensor, firsts: torch.Tensor | None) -> torch.Tensor:
    return x if firsts is None else x - firsts


def _zeroed(x: torch.Tensor, start: torch.Tensor | None) -> torch.Tensor:
    assert start is not None
    return torch.where(start.reshape(-1, *[1] * (x.dim() - 1)), torch.zeros_like(x), x)


def _shown(action: torch.Tensor, spec: ActionSpec) -> torch.Tensor:
    """Actions [B, ...] in Rookery's form as the next observation shows them, as `envs/last.py` does."""
    if spec.kind == "box":
        return action
    parts = action.reshape(-1, len(spec.choices)).unbind(1)
    return torch.cat([(x.unsqueeze(1) == torch.arange(n)).float() for x, n in zip(parts, spec.choices)], 1)


class _Scale:
    """`ActionSpec.to_env` on tensors, in the shape that the environment has."""

    def __init__(self, spec: ActionSpec):
        self._spec = spec
        if spec.kind != "box":
            self._starts = torch.tensor(spec.starts).reshape(spec.shape) if any(spec.starts) else None
            return
        self._low = torch.tensor([-torch.inf if x is None else x for x in spec.low])
        self._high = torch.tensor([torch.inf if x is None else x for x in spec.high])
        self._bounded = self._low.isfinite() & self._high.isfinite()
        self._from = torch.where(self._bounded, self._low, 0.0)
        self._span = torch.where(self._bounded, self._high - self._low, 0.0)

    def __call__(self, action: torch.Tensor) -> torch.Tensor:
        if self._spec.kind != "box":
            return action if self._starts is None else action + self._starts
        scaled = torch.where(self._bounded, self._from + (action + 1) / 2 * self._span, action)
        scaled = torch.minimum(torch.maximum(scaled, self._low), self._high)
        return scaled.reshape(-1, *self._spec.box_shape)


# How each family of networks decides: observations as networks see them, state, what is legal -> a decision.


def _decider(policy: Policy, nets: Nets) -> Callable[[Tree, Tree, torch.Tensor | None], Decision]:
    if _is(nets, "body", Body) and _is(nets, "policy", PolicyHead):
        return lambda obs, state, legal: _actor_critic(nets, obs, state, legal)
    if _is(nets, "body", Body) and _is(nets, "q", QHead):
        rescaled = getattr(policy.config.algo, "rescale", False)
        return lambda obs, state, legal: _action_values(nets, obs, state, legal, rescaled)
    if _is(nets, "policy", DeterministicPolicy):
        return lambda obs, state, legal: _deterministic(nets, obs, state)
    raise UsageError(
        f"{policy.config.algorithm} has networks that cannot be exported: expected are the entries 'body' and 'policy' "
        f"(a PolicyHead) or 'q' (a QHead), or a DeterministicPolicy, and it has {', '.join(nets)}"
    )


def _is(nets: Nets, name: str, kind: type) -> bool:
    return name in nets and isinstance(nets[name], kind)


def _initial(nets: Nets) -> Tree:
    body = nets["body"] if "body" in nets else nets["policy"]
    return body.initial(1)


def _actor_critic(nets: Nets, obs: Tree, state: Tree, legal: torch.Tensor | None) -> Decision:
    obs, head = nets["normalizer"](obs), nets["policy"]
    features, state = nets["body"].step(obs, state)
    params = head(features)
    if legal is not None:
        params = head.restricted(params, legal)
    more = _told(head, params)
    if "value" in nets:
        more["value"] = nets["value"](nets["value_body"].step(obs, {})[0] if "value_body" in nets else features)
    return head.mode(params)[0], more, state


def _told(head: PolicyHead, params: Any) -> dict[str, torch.Tensor]:
    if isinstance(head, Categorical):
        return {"logits": params}
    if isinstance(head, MultiCategorical):
        return {"logits": params.flatten(-2).index_select(-1, head.places)}
    return {"mean": params[0], "std": params[1].exp()} if isinstance(head, Gaussian) else {}


def _action_values(nets: Nets, obs: Tree, state: Tree, legal: torch.Tensor | None, rescaled: bool) -> Decision:
    features, state = nets["body"].step(nets["normalizer"](obs), state)
    q = nets["q"].means(nets["q"](features))
    action = (q if legal is None else only_legal(q, legal)).argmax(-1)
    return action, {"q": unrescaled(q) if rescaled else q}, state


def _deterministic(nets: Nets, obs: Tree, state: Tree) -> Decision:
    features, state = nets["policy"].step(nets["normalizer"](obs), state)
    return nets["policy"].action(features), {}, state
