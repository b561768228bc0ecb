"""Small networks evaluated by numpy: acting with a perceptron on a handful of rows is all overhead, numpy has less.

For 8 rows of CartPole, torch takes about 100 µs to get from observations to actions and numpy 50. The arrays are views
of the parameters, so that there is nothing to keep up to date. Only the commonest case is covered: one float vector, no
core; for policies also categorical actions and features of their own. Everything else acts through the modules.

`QuickBody` is what policies and action values (`quick_q.py`) have in common, `Quick` chooses between numpy and modules.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import numpy as np
import torch

from rookery.core.types import MASK, Tree
from rookery.nets.heads import Categorical
from rookery.nets.modules import Nets
from rookery.nets.torso import Torso

TINY, LOWEST = np.finfo(np.float32).tiny, np.finfo(np.float32).min
T = TypeVar("T", bound="QuickBody")


class Quick(Generic[T]):
    """The numpy version of the nets an algorithm acts with, made when it is first asked for."""

    def __init__(self, kind: type[T]):
        self._kind = kind
        self._nets: Nets | None = None
        self._quick: T | None = None

    def of(self, nets: Nets) -> T | None:
        """None: these nets are not covered and act through their modules."""
        if nets is not self._nets or (self._quick is not None and self._quick.stale):
            self._nets, self._quick = nets, self._kind(nets) if self._kind.fits(nets) else None
        return self._quick


class QuickBody:
    """Normalizer and body of small nets."""

    def __init__(self, nets: Nets):
        torso = nets["body"].torso
        self._key = torso.plain_key
        self._tanh = torso.vector.activation is torch.tanh_
        self._first = torso.vector.pairs[0][0]
        self._at = self._first.data_ptr()
        self._layers = [arrays(*pair) for pair in torso.vector.pairs]
        self._scale = [buffer.numpy() for buffer in nets["normalizer"].published()]

    @classmethod
    def fits(cls, nets: Nets) -> bool:
        """Whether these nets are of the kind that is covered here."""
        torso = nets["body"].torso
        return (
            type(torso) is Torso
            and torso.plain_key is not None
            and not torso.bf16
            and len(torso.vector.pairs) > 0
            and torso.vector.pairs[0][0].is_cpu
            and nets["body"].core is None
            and nets["body"].latent is None
        )

    @property
    def stale(self) -> bool:
        """Whether the parameters have moved to other memory since the views were taken."""
        return self._first.data_ptr() != self._at

    def features(self, obs: Tree) -> np.ndarray:
        """Of observations [B, ...], [B, F]."""
        x = obs[self._key].numpy()
        if self._scale:
            scale, shift, low, high = self._scale
            x = np.minimum(np.maximum(x * scale + shift, low), high)
        for weight, bias in self._layers:
            x = x @ weight
            x += bias
            if self._tanh:
                np.tanh(x, out=x)
            else:
                np.maximum(x, 0, out=x)
        return x


class QuickPolicy(QuickBody):
    def __init__(self, nets: Nets):
        super().__init__(nets)
        head = nets["policy"].linear
        self._head, self._masked = arrays(head.weight, head.bias), nets["policy"].masked
        self._prepare(1, head.out_features)

    @classmethod
    def fits(cls, nets: Nets) -> bool:
        return super().fits(nets) and type(nets["policy"]) is Categorical and "value_body" in nets

    def act(self, obs: Tree, generator: torch.Generator | None) -> tuple[np.ndarray, np.ndarray]:
        """Actions [B] and their log-probabilities [B] for observations [B, ...]; greedy without a generator."""
        weight, bias = self._head
        logits = self.features(obs) @ weight
        logits += bias
        if self._masked:
            logits = lowered(logits, obs[MASK].numpy())
        logits -= logits.max(1, keepdims=True)
        odds = np.exp(logits)
        if generator is None:
            action = odds.argmax(1)
        else:  # a race of exponential clocks, as in ops.policy.categorical_draw
            if len(odds) != len(self._rows):
                self._prepare(*odds.shape)
            self._noise.exponential_(generator=generator)
            action = (odds / np.maximum(self._clocks, TINY, out=self._clocks)).argmax(1)
        rows = self._rows if len(self._rows) == len(action) else np.arange(len(action))
        return action, logits[rows, action] - np.log(odds.sum(1))

    def _prepare(self, lanes: int, choices: int) -> None:
        """Memory for the noise, which costs more to get than to fill."""
        self._noise = torch.empty(lanes, choices)
        self._clocks, self._rows = self._noise.numpy(), np.arange(lanes)


def lowered(x: np.ndarray, legal: np.ndarray) -> np.ndarray:
    """`ops.legal.only_legal` in numpy: x [B, A], and the lowest number where legal [B, A] does not say so."""
    return np.where(legal | ~legal.any(1, keepdims=True), x, LOWEST)


def arrays(weight: torch.Tensor, bias: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Views of a layer's numbers, as x @ weight + bias takes them."""
    return weight.detach().numpy().T, bias.detach().numpy()
