"""A small policy evaluated by numpy: acting with a perceptron on a handful of rows is all overhead, and numpy has less.

For 8 rows of CartPole, torch takes about 100 µs to get from observations to actions and numpy 50. The arrays are views
of the parameters, so that there is nothing to keep up to date. Only the commonest case is covered: one float vector, no
core, categorical actions, features of the policy's own; everything else acts through the modules.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from rookery.nets.heads import Categorical
from rookery.nets.torso import Torso

TINY = np.finfo(np.float32).tiny


class QuickPolicy:
    def __init__(self, nets: nn.ModuleDict):
        torso, normalizer = nets["torso"], nets["normalizer"]
        self.key = torso.plain_key
        self._tanh = torso.vector.activation is torch.tanh_
        self._first = torso.vector.pairs[0][0]
        self._at = self._first.data_ptr()
        head = nets["policy"].linear
        *self._layers, self._head = [
            (weight.detach().numpy().T, bias.detach().numpy())
            for weight, bias in (*torso.vector.pairs, (head.weight, head.bias))
        ]
        self._prepare(1, head.out_features)
        self._scale = [buffer.numpy() for buffer in normalizer.published()]

    @staticmethod
    def fits(nets: nn.ModuleDict) -> bool:
        """Whether these nets are of the kind that is covered here."""
        torso = nets["torso"]
        return (
            type(torso) is Torso
            and torso.plain_key is not None
            and not torso.bf16
            and len(torso.vector.layers) > 0
            and torso.vector.layers[0].weight.is_cpu
            and type(nets["policy"]) is Categorical
            and "core" not in nets
            and "value_torso" in nets
        )

    @property
    def stale(self) -> bool:
        """Whether the parameters have moved to other memory since the views were taken."""
        return self._first.data_ptr() != self._at

    def act(self, obs: np.ndarray, generator: torch.Generator | None) -> tuple[np.ndarray, np.ndarray]:
        """Actions [B] and their log-probabilities [B] for observations [B, F]; greedy without a generator."""
        x = obs
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
        weight, bias = self._head
        logits = x @ weight
        logits += bias
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
