"""Recurrent cores: GRU and LSTM with resets inside a sequence.

State leaves are [lanes, layers, size], lanes first, so that unrolls concatenate. `step` acts, `sequence` trains, and
both compute the same numbers. A reset at row t zeroes the state *before* row t is read. "No core" is not a kind:
`body.py` leaves the core out.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from rookery.core.types import Tree

PACK_ABOVE = 0.25  # share of rows at which some lane resets; beyond, packing is faster than cutting (measured)


def resets(live: torch.Tensor) -> torch.Tensor:
    """live [T, B] -> [T+1, B]: the state is zeroed before each row that follows a dead one."""
    return torch.cat([torch.zeros_like(live[:1]), ~live])


def resets_at_start(live: torch.Tensor) -> torch.Tensor:
    """As `resets`, but only before live rows: for sequences of one episode, which may begin with missing (dead) rows.

    Behind the episode's end the state runs on. No loss reads it there, and a reset costs: it cuts the sequence.
    """
    reset = torch.zeros(len(live) + 1, live.shape[1], dtype=torch.bool, device=live.device)
    torch.logical_and(live[1:], ~live[:-1], out=reset[1:-1])
    return reset


class Core(nn.Module):
    """Orthogonal weights with gain 1, zero biases."""

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
        self.cells = self.rnn.all_weights  # per layer: w_ih, w_hh, b_ih, b_hh

    def initial(self, lanes: int) -> Tree:
        """The state at an episode's start."""
        device = next(self.rnn.parameters()).device
        return {leaf: torch.zeros(lanes, self.layers, self.size, device=device) for leaf in self.leaves}

    def step(self, x: torch.Tensor, state: Tree) -> tuple[torch.Tensor, Tree]:
        """x [B, F] and state -> y [B, H] and the next state. Cells cost a third of an nn.LSTM call of length 1."""
        steps = []
        old = zip(*(state[leaf].unbind(1) for leaf in self.leaves))
        for weights, hidden in zip(self.cells, old):
            new = torch.lstm_cell(x, hidden, *weights) if len(hidden) == 2 else (torch.gru_cell(x, *hidden, *weights),)
            x = new[0]
            steps.append(new)
        return x, {leaf: _stack(parts) for leaf, parts in zip(self.leaves, zip(*steps))}

    def sequence(self, x: torch.Tensor, state: Tree, reset: torch.Tensor) -> tuple[torch.Tensor, Tree]:
        """x [T, B, F] and the state before row 0 -> y [T, B, H] and the state after the last row.

        Two ways to the same numbers. Few rows with resets: cut time at these rows, one fused call per segment. Many:
        cut each lane at its own resets and run all the pieces side by side as one packed sequence.
        """
        assert reset.shape == x.shape[:2], (reset.shape, x.shape)
        rows = reset.any(1).nonzero().flatten().tolist()
        if len(rows) > PACK_ABOVE * len(x):
            return self._packed(x, state, reset)
        return self._segments(x, state, reset, rows)

    def _segments(
        self, x: torch.Tensor, state: Tree, reset: torch.Tensor, rows: list[int]
    ) -> tuple[torch.Tensor, Tree]:
        hidden = self._hidden(state)
        outputs = []
        for start, stop in pairwise(sorted({0, *rows, len(x)})):
            if start in rows:
                keep = (~reset[start]).to(x.dtype).unsqueeze(1)
                hidden = tuple(value * keep for value in hidden)
            y, hidden = self._run(x[start:stop], hidden)
            outputs.append(y)
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0], self._state(hidden)

    def _packed(self, x: torch.Tensor, state: Tree, reset: torch.Tensor) -> tuple[torch.Tensor, Tree]:
        T, B = reset.shape
        time = torch.arange(T, device=x.device).unsqueeze(1).expand(T, B)
        begins = reset.clone()
        begins[0] = True
        piece = begins.t().flatten().cumsum(0).view(B, T).t() - 1  # [T, B] number of the piece, lane after lane
        place = time - torch.where(begins, time, 0).cummax(0).values  # [T, B] row within the piece
        length = piece.flatten().bincount()
        order = length.argsort(descending=True, stable=True)
        rank = order.argsort()  # packed sequences want the longest first
        sizes = place.flatten().bincount()  # pieces that are still running, per row
        target = (sizes.cumsum(0) - sizes)[place] + rank[piece]  # [T, B] row of the packed data
        target = target.flatten()
        packed = PackedSequence(x.flatten(0, 1).index_select(0, target.argsort()), sizes.cpu())

        first, last = rank[piece[0]], rank[piece[-1]]  # [B]
        keep = (~reset[0]).to(x.dtype).unsqueeze(1)
        hidden = tuple(
            value.new_zeros(self.layers, len(length), self.size).index_copy(1, first, value * keep)
            for value in self._hidden(state)
        )
        y, hidden = self._run(packed, hidden)
        y = y.data.index_select(0, target).view(T, B, self.size)
        return y, self._state(tuple(value.index_select(1, last) for value in hidden))

    def _run(self, x: torch.Tensor | PackedSequence, hidden: tuple[torch.Tensor, ...]) -> tuple:
        if self.kind == "lstm":
            return self.rnn(x, hidden)
        y, h = self.rnn(x, hidden[0])
        return y, (h,)

    def _hidden(self, state: Tree) -> tuple[torch.Tensor, ...]:
        """torch's layout: [layers, lanes, size]."""
        return tuple(state[leaf].transpose(0, 1).contiguous() for leaf in self.leaves)

    def _state(self, hidden: tuple[torch.Tensor, ...]) -> Tree:
        return {leaf: value.transpose(0, 1) for leaf, value in zip(self.leaves, hidden)}


def _stack(layers: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return layers[0].unsqueeze(1) if len(layers) == 1 else torch.stack(layers, 1)
