"""Action values evaluated by numpy, as `quick.py` evaluates policies, and the epsilon-greedy choice among them.

For 8 rows of CartPole 36 µs instead of 87.
"""

from __future__ import annotations

import numpy as np
import torch

from rookery.core.legal import all_if_none, nth
from rookery.core.types import Tree
from rookery.nets.modules import Nets
from rookery.nets.qnet import QHead, Stream
from rookery.nets.quick import QuickBody, arrays


class QuickQ(QuickBody):
    """Covers every kind of head."""

    def __init__(self, nets: Nets):
        super().__init__(nets)
        head = nets["q"]
        self._advantage = _QuickStream(head.advantage)
        self._value = None if head.value is None else _QuickStream(head.value)
        self._parts = head.parts[0]
        self._atoms = None if head.atoms is None else head.atoms.numpy()

    @classmethod
    def fits(cls, nets: Nets) -> bool:
        return super().fits(nets) and type(nets["q"]) is QHead

    def values(self, obs: Tree, noise: torch.Tensor | None = None) -> np.ndarray:
        """Values [B, A] of observations [B, ...], with noise [B, K] for a noisy head."""
        x, first, second = self.features(obs), None, None
        if noise is not None:
            drawn = noise.numpy()
            first, second = drawn[:, : self._parts], drawn[:, self._parts :]
        out = self._advantage(x, first)
        value = None if self._value is None else self._value(x, second)
        if self._atoms is None:
            return out if value is None else out + (value - out.mean(1, keepdims=True))
        out = out.reshape(len(out), -1, len(self._atoms))
        if value is not None:
            out = out + (value[:, None] - out.mean(1, keepdims=True))
        odds = np.exp(out - out.max(2, keepdims=True))
        return odds @ self._atoms / odds.sum(2)


class _QuickStream:
    def __init__(self, stream: Stream):
        self._layers = [arrays(*pair) for pair in stream.pairs]
        self._sigmas = [arrays(x.weight_sigma, x.bias_sigma) for x in stream.layers] if stream.noise else []

    def __call__(self, x: np.ndarray, noise: np.ndarray | None) -> np.ndarray:
        at, last = 0, len(self._layers) - 1
        for number, (weight, bias) in enumerate(self._layers):
            y = x @ weight
            y += bias
            if noise is not None:
                sigma, bias_sigma = self._sigmas[number]
                middle, end = at + weight.shape[0], at + sum(weight.shape)
                y += noise[:, middle:end] * ((x * noise[:, at:middle]) @ sigma + bias_sigma)
                at = end
            x = y if number == last else np.maximum(y, 0, out=y)
        return x


class EpsilonGreedy:
    """With probability epsilon any of the choices, the greedy one too; every row flips its own coin."""

    def __init__(self, choices: int):
        self._choices = choices
        self._prepare(1)

    def __call__(
        self,
        greedy: np.ndarray,
        epsilon: float | np.ndarray,
        generator: torch.Generator,
        legal: np.ndarray | None = None,
    ) -> np.ndarray:
        """Actions [B] from the greedy ones [B]; epsilon is a number or [B]. `legal` [B, A]: what may be drawn."""
        if len(greedy) != len(self._coin):
            self._prepare(len(greedy))
        self._noise.uniform_(generator=generator)
        if legal is not None:
            return np.where(self._coin < epsilon, nth(all_if_none(legal, (self._choices,)), self._draw), greedy)
        # A draw has 24 bits and is less than 1, and so its product with the choices, rounded, is less than these.
        return np.where(self._coin < epsilon, (self._draw * self._choices).astype(np.int64), greedy)

    def _prepare(self, lanes: int) -> None:
        """Memory for the noise, which costs more to get than to fill."""
        self._noise = torch.empty(2, lanes)
        self._coin, self._draw = self._noise.numpy()
