"""Heads: features [..., F] become a distribution over actions, or a value.

All policy heads have one interface; what `forward` returns ("params") is opaque to algorithms:
    params = head(features)
    action, logp = head.sample(params, generator)
    action, logp = head.mode(params)
    logp, entropy = head.logp_entropy(params, action)
    kl = head.kl(params, others)                       KL(params || others)
Where observations say which actions are legal, params = head.params(features, obs) makes the others impossible.
The density itself is in `ops/policy.py`. Policy weights start orthogonal with gain 0.01, so that the first policy is
nearly uniform; the value's with gain 1.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from rookery.core.config import NetConfig
from rookery.core.errors import UsageError
from rookery.core.types import MASK, ActionSpec, Tree
from rookery.nets.init import linear
from rookery.ops.legal import only_legal
from rookery.ops.policy import (
    categorical_draw,
    categorical_entropy,
    categorical_kl,
    categorical_logp,
    categorical_logp_entropy,
    gaussian_entropy,
    gaussian_kl,
    gaussian_logp,
    squashed_gaussian_logp,
)

POLICY_GAIN, VALUE_GAIN = 0.01, 1.0
LOG_STD_RANGE = (-10.0, 2.0)  # of a deviation that depends on the observation
EDGE = 1.0 - 1e-6  # tanh actions are kept this far inside, where atanh is exact enough in float32
NODES = 16  # of the quadrature behind the entropy of a squashed Gaussian


class PolicyHead(nn.Module):
    """The interface. `params` is a tensor or a tuple of tensors, each with the leading axes of the features."""

    masked = False  # whether the observations say which actions are legal

    def __init__(self, features: int, outputs: int):
        super().__init__()
        self.linear = linear(features, outputs, POLICY_GAIN)
        self.affine = (self.linear.weight, self.linear.bias)  # what a call needs, without its lookups

    def params(self, features: torch.Tensor, obs: Tree) -> Any:
        """Parameters for features of these observations, which are as the environment gave them, with the mask.

        Of observations [T+1, ...] the first T rows count where there are features of as many.
        """
        if not self.masked:
            return self.forward(features)
        return self.restricted(self.forward(features), obs[MASK][: len(features)])

    def restricted(self, params: Any, legal: torch.Tensor) -> Any:
        """Parameters with which only legal actions are possible; legal [..., choices of all branches]."""
        raise NotImplementedError

    def sample(self, params: Any, generator: torch.Generator | None) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError

    def mode(self, params: Any) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError

    def logp_entropy(self, params: Any, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError

    def kl(self, params: Any, others: Any) -> torch.Tensor:
        raise NotImplementedError


def policy_head(action: ActionSpec, features: int, net: NetConfig, masked: bool = False) -> PolicyHead:
    if action.kind in ("discrete", "multi"):
        one = action.kind == "discrete"
        head = Categorical(features, action.choices[0]) if one else MultiCategorical(features, action.choices)
        head.masked = masked
        return head
    if action.kind != "box":
        raise UsageError(f"there is no policy for actions of kind {action.kind!r}; discrete, multi and box have one")
    cls = SquashedGaussian if net.squash else Gaussian
    return cls(features, action.size, net.log_std, net.state_std)


class Categorical(PolicyHead):
    def __init__(self, features: int, n: int):
        super().__init__(features, n)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return F.linear(features, *self.affine)  # logits [..., n]

    def restricted(self, params: torch.Tensor, legal: torch.Tensor) -> torch.Tensor:
        return only_legal(params, legal)

    def sample(self, params: torch.Tensor, generator: torch.Generator | None) -> tuple[torch.Tensor, torch.Tensor]:
        return categorical_draw(params, generator)

    def mode(self, params: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        action = params.argmax(-1)
        return action, categorical_logp(params, action)

    def logp_entropy(self, params: torch.Tensor, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return categorical_logp_entropy(params, action)

    def kl(self, params: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        return categorical_kl(params, others)


class MultiCategorical(PolicyHead):
    """Independent branches from one linear layer: log-probabilities and entropies add up.

    Branches are rows of one table as wide as the widest, padded with impossible choices: one call serves them all.
    """

    places: torch.Tensor  # of the choices in the table

    def __init__(self, features: int, choices: tuple[int, ...]):
        super().__init__(features, sum(choices))
        self.shape = (len(choices), max(choices))
        places = [row * max(choices) + i for row, n in enumerate(choices) for i in range(n)]
        self.register_buffer("places", torch.tensor(places), persistent=False)
        self.padded = len(set(choices)) > 1

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        logits = F.linear(features, *self.affine)
        if self.padded:
            table = logits.new_full((*logits.shape[:-1], math.prod(self.shape)), -torch.inf)
            logits = table.index_copy(-1, self.places, logits)
        return logits.unflatten(-1, self.shape)  # [..., branches, choices]

    def restricted(self, params: torch.Tensor, legal: torch.Tensor) -> torch.Tensor:
        if self.padded:
            table = legal.new_zeros((*legal.shape[:-1], math.prod(self.shape)))
            legal = table.index_copy(-1, self.places, legal)
        return only_legal(params, legal.unflatten(-1, self.shape))

    def sample(self, params: torch.Tensor, generator: torch.Generator | None) -> tuple[torch.Tensor, torch.Tensor]:
        action, logp = categorical_draw(params, generator)
        return action, logp.sum(-1)

    def mode(self, params: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        action = params.argmax(-1)
        return action, categorical_logp(params, action).sum(-1)

    def logp_entropy(self, params: torch.Tensor, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return categorical_logp(params, action).sum(-1), categorical_entropy(params).sum(-1)

    def kl(self, params: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        return categorical_kl(params, others).sum(-1)


class Gaussian(PolicyHead):
    """Diagonal Gaussian; actions outside [-1, 1] are clipped by the environment's side, their density is not."""

    def __init__(self, features: int, size: int, log_std: float, state_std: bool):
        super().__init__(features, 2 * size if state_std else size)
        self.start, self.state_std = log_std, state_std
        if not state_std:
            self.log_std = nn.Parameter(torch.full((size,), log_std))

    def forward(self, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean = F.linear(features, *self.affine)
        if not self.state_std:
            return mean, self.log_std.expand_as(mean)
        mean, log_std = mean.chunk(2, -1)
        return mean, (log_std + self.start).clamp(*LOG_STD_RANGE)

    def sample(
        self, params: tuple[torch.Tensor, torch.Tensor], generator: torch.Generator | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        mean, log_std = params
        noise = torch.randn(mean.shape, generator=generator, device=mean.device)
        action = torch.addcmul(mean, log_std.exp(), noise)
        return action, gaussian_logp(mean, log_std, action)

    def mode(self, params: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return params[0], gaussian_logp(*params, params[0])

    def logp_entropy(
        self, params: tuple[torch.Tensor, torch.Tensor], action: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return gaussian_logp(*params, action), gaussian_entropy(params[1])

    def kl(self, params: tuple[torch.Tensor, torch.Tensor], others: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return gaussian_kl(*params, *others)


class SquashedGaussian(Gaussian):
    """tanh of a Gaussian: actions in (-1, 1), with the density of the squashed variable.

    Only the action travels, so the Gaussian variable is recovered by atanh of the action, when sampling too: the
    log-probability of a stored action is then the one it was sampled with, to the last bit.

    The entropy has no closed form. It is that of the Gaussian plus E[log(1 - tanh(x)^2)], an integral in one dimension
    per action dimension, computed by Gauss-Hermite quadrature: no noise, and a gradient for mean and deviation. (The
    Gaussian's entropy alone would reward saturating tanh; minus the log-probability of a stored action has an
    expected gradient of zero.)
    """

    nodes: torch.Tensor
    weights: torch.Tensor

    def __init__(self, features: int, size: int, log_std: float, state_std: bool):
        super().__init__(features, size, log_std, state_std)
        nodes, weights = np.polynomial.hermite_e.hermegauss(NODES)  # for the density exp(-x^2 / 2)
        self.register_buffer("nodes", torch.tensor(nodes, dtype=torch.float32), persistent=False)
        self.register_buffer("weights", torch.tensor(weights / weights.sum(), dtype=torch.float32), persistent=False)

    def sample(
        self, params: tuple[torch.Tensor, torch.Tensor], generator: torch.Generator | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        mean, log_std = params
        noise = torch.randn(mean.shape, generator=generator, device=mean.device)
        action = torch.addcmul(mean, log_std.exp(), noise).tanh().clamp(-EDGE, EDGE)
        return action, squashed_gaussian_logp(mean, log_std, _unsquash(action))

    def mode(self, params: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        action = params[0].tanh().clamp(-EDGE, EDGE)
        return action, squashed_gaussian_logp(*params, _unsquash(action))

    def logp_entropy(
        self, params: tuple[torch.Tensor, torch.Tensor], action: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        mean, log_std = params
        x = mean.unsqueeze(-1) + log_std.exp().unsqueeze(-1) * self.nodes  # [..., size, nodes]
        slope = 2 * (math.log(2) - x - F.softplus(-2 * x))  # log(1 - tanh(x)^2), stable
        entropy = gaussian_entropy(log_std) + (slope @ self.weights).sum(-1)
        return squashed_gaussian_logp(mean, log_std, _unsquash(action)), entropy


class ValueHead(nn.Module):
    def __init__(self, features: int):
        super().__init__()
        self.linear = linear(features, 1, VALUE_GAIN)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.linear(features).squeeze(-1)  # [...]


def _unsquash(action: torch.Tensor) -> torch.Tensor:
    return action.clamp(-EDGE, EDGE).atanh()
