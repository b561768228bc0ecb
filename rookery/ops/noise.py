"""Noise added to continuous actions: independent (Ape-X, D4PG) or with a memory (DDPG), and its spread over many lanes.

The caller keeps the state per environment, resets it, and keeps actions within bounds.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOWEST = 1 / 32  # of the ladder, as a share of its top


def noise_ladder(lanes: int, scale: float) -> Tensor:
    """[lanes] float32: scale * LOWEST^(i / (lanes - 1)), from the boldest environment to the one nearest to greedy.

    As with Ape-X's epsilons the steps are equal factors and one environment alone is the boldest.
    """
    assert lanes >= 1, lanes
    return (scale * LOWEST ** (torch.arange(lanes, dtype=torch.float64) / max(lanes - 1, 1))).float()


def ornstein_uhlenbeck(noise: Tensor, theta: float, scale: float | Tensor, normal: Tensor) -> Tensor:
    """The next noise: drawn back to 0 by the share theta, then pushed; Uhlenbeck & Ornstein 1930 with a step of 1.

    noise and normal (standard normal) are [B, A]; in the long run its deviation is scale / sqrt(theta (2 - theta)).
    """
    assert noise.shape == normal.shape, (noise.shape, normal.shape)
    return noise * (1 - theta) + normal * scale
