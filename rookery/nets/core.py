"""Recurrent cores: GRU and LSTM with resets inside a sequence.

State leaves are [lanes, layers, size], lanes first, so that unrolls concatenate. `step` acts, `sequence` trains, and
both compute the same numbers. A reset at row t zeroes the state *before* row t is read. "No core" is not a kind:
`build.py` leaves the core out.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from rookery.types import Tree


class Core(nn.Module):
    def __init__(self, kind: Literal["gru", "lstm"], input_size: int, size: int, layers: int = 1):
        super().__init__()
        self.kind, self.size, self.layers, self.features = kind, size, layers, size
        self.leaves = ("h", "c") if kind == "lstm" else ("h",)
        self.rnn = (nn.LSTM if kind == "lstm" else nn.GRU)(input_size, size, layers)
        for name, parameter in self.rnn.named_parameters():
            if "weight" in name:
                nn.init.orthogonal_(parameter)
            else:
                nn.init.zeros_(parameter)

    def initial(self, lanes: int) -> Tree:
        device = self.rnn.weight_ih_l0.device
        return {leaf: torch.zeros(lanes, self.layers, self.size, device=device) for leaf in self.leaves}

    def step(self, x: torch.Tensor, state: Tree) -> tuple[torch.Tensor, Tree]:
        """x [B, F] and state -> y [B, H] and the next state."""
        y, state = self._run(x.unsqueeze(0), state)
        return y.squeeze(0), state

    def sequence(self, x: torch.Tensor, state: Tree, reset: torch.Tensor) -> tuple[torch.Tensor, Tree]:
        """x [T, B, F] and the state before row 0 -> y [T, B, H] and the state after the last row."""
        rows = reset.any(1).nonzero().flatten().tolist()
        cuts = sorted({0, *rows, len(x)})
        outputs = []
        for start, stop in zip(cuts, cuts[1:]):
            if start in rows:
                keep = (~reset[start]).to(x.dtype)[:, None, None]
                state = {leaf: value * keep for leaf, value in state.items()}
            y, state = self._run(x[start:stop], state)
            outputs.append(y)
        return torch.cat(outputs), state

    def _run(self, x: torch.Tensor, state: Tree) -> tuple[torch.Tensor, Tree]:
        hidden = tuple(state[leaf].transpose(0, 1).contiguous() for leaf in self.leaves)
        y, hidden = self.rnn(x, hidden if len(hidden) == 2 else hidden[0])
        hidden = hidden if isinstance(hidden, tuple) else (hidden,)
        return y, {leaf: value.transpose(0, 1) for leaf, value in zip(self.leaves, hidden)}
