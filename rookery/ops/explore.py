"""The ladder of epsilons that many environments share (Ape-X: Horgan et al. 2018, section 4.1).

Acting epsilon-greedily is in `nets/quick_q.py`, since it is done in numpy; noise on continuous actions is not here.
"""

from __future__ import annotations

import torch
from torch import Tensor


def epsilon_ladder(lanes: int, epsilon: float = 0.4, alpha: float = 7.0) -> Tensor:
    """[lanes] float32: epsilon^(1 + alpha i / (lanes - 1)), from the boldest environment to the one nearest to greedy.

    One environment alone is the boldest.
    """
    assert lanes >= 1, lanes
    exponent = 1 + alpha * torch.arange(lanes, dtype=torch.float64) / max(lanes - 1, 1)
    return (epsilon**exponent).float()
