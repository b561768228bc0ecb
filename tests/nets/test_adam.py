"""FlatAdam is torch's Adam, step for step and bit for bit, and its state is interchangeable."""

from __future__ import annotations

import copy

import torch
from torch import nn

from rookery.nets.adam import FlatAdam


def test_it_takes_the_steps_of_torchs_adam_also_after_an_exchange_of_state():
    start, gradients = torch.randn(1000, generator=torch.Generator().manual_seed(1)), torch.randn(6, 1000)
    mine, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    a, b = FlatAdam(mine, lr=1e-2, eps=1e-5), torch.optim.Adam([theirs], lr=1e-2, eps=1e-5, fused=True)
    for number, gradient in enumerate(gradients):
        mine.grad, theirs.grad = gradient.clone(), gradient.clone()
        if number == 3:
            for optimizer in (a, b):
                optimizer.param_groups[0]["lr"] = 1e-3
            b.state[theirs] = copy.deepcopy(a.state[mine])
        a.step()
        b.step()
        assert torch.equal(mine, theirs), f"step {number}"
    assert a.state[mine]["step"] == 6
