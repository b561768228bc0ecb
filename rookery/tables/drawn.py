"""What is drawn from a replay memory: which items, the batch that is made of them, and their importance weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from rookery.core.config import ReplayConfig
from rookery.core.types import Arrays, Sequences, Transitions


class Keys(NamedTuple):
    """Which items were drawn: slots may be taken by others later, ids are never used again."""

    slot: np.ndarray  # [N] int64
    id: np.ndarray  # [N] int64


class Picked(NamedTuple):
    """Items that are to be copied out."""

    keys: Keys
    probability: np.ndarray  # [N] of each, per draw
    weight: np.ndarray  # [N] float32, importance weights
    steps: np.ndarray  # [N] environment steps of each that are drawn for the first time

    @property
    def fresh(self) -> int:
        return int(self.steps.sum())


class Drawn(NamedTuple):
    batch: Transitions | Sequences
    keys: Keys
    fresh: int


def importance_weights(
    memory: ReplayConfig, probability: np.ndarray, progress: float, size: int, lowest: Callable[[], float]
) -> np.ndarray:
    """(N P)^-beta of a memory of N = `size` items (Schaul et al. 2016, §3.4), float32; `progress` anneals beta.

    Over the largest there is: `batch` in this batch, `memory` that of the lowest P in the whole memory, `raw` over 1.
    """
    if memory.sampler == "uniform":
        return np.ones(len(probability), np.float32)
    if memory.weights == "batch":
        unit = probability.min()
    else:
        unit = lowest() if memory.weights == "memory" else 1 / size
    end = memory.beta if memory.beta_end is None else memory.beta_end
    beta = memory.beta + (end - memory.beta) * min(max(progress, 0.0), 1.0)
    ratio = (probability / unit).astype(np.float32)
    return np.exp(np.log(ratio) * np.float32(-beta))  # as a power, but vector code


def as_batch(columns: Arrays, weight: np.ndarray, sequences: bool) -> Transitions | Sequences:
    """Columns by path, "obs/image", as a batch of tensors that share their memory."""
    fields: dict[str, Any] = {"state": {}} if sequences else {}
    for path, column in columns.items():
        *parents, name = path.split("/")
        node = fields
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = torch.from_numpy(column)
    kind = Sequences if sequences else Transitions
    return kind(**fields, weight=torch.from_numpy(weight))
