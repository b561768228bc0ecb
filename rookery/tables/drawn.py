"""What is drawn from a replay memory: which items, and the batch that is made of them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rookery.core.types import Sequences, Transitions


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
