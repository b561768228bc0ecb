"""Noisy linear layers (Fortunato et al. 2018): exploration by weights that carry learnt noise, factorised Gaussian.

    y = (w + s ⊙ (f_out f_inᵀ)) x + b + t ⊙ f_out,   f(x) = sgn(x) √|x| of Gaussian noise

Noise is data: a layer has none of its own, is given some, and without any computes with its means. It is never made
into a matrix: s ⊙ (f_out f_inᵀ) x = f_out ⊙ (s (f_in ⊙ x)), which costs a second product but lets every row of a batch
have a noise of its own.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn


def factors(*shape: int, generator: torch.Generator | None) -> torch.Tensor:
    """f of Gaussian noise, on the CPU like the generators."""
    noise = torch.randn(*shape, generator=generator)
    return noise.abs().sqrt_().copysign_(noise)


class NoisyLinear(nn.Module):
    """Means start uniform within ±1/√fan_in, deviations at sigma/√fan_in."""

    def __init__(self, inputs: int, outputs: int, sigma: float = 0.5):
        super().__init__()
        self.inputs, self.outputs = inputs, outputs
        self.width = inputs + outputs  # numbers of noise, those of the inputs first
        bound = 1 / math.sqrt(inputs)
        self.weight = nn.Parameter(torch.empty(outputs, inputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(outputs).uniform_(-bound, bound))
        self.weight_sigma = nn.Parameter(torch.full((outputs, inputs), sigma * bound))
        self.bias_sigma = nn.Parameter(torch.full((outputs,), sigma * bound))

    def forward(self, x: torch.Tensor, noise: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., inputs] -> [..., outputs]; noise [width], one for all rows, or [..., width], one for each."""
        y = F.linear(x, self.weight, self.bias)
        if noise is None:
            return y
        noise_in, noise_out = noise.split((self.inputs, self.outputs), -1)
        return torch.addcmul(y, noise_out, F.linear(x * noise_in, self.weight_sigma, self.bias_sigma))
