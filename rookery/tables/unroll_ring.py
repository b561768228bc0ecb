"""Unrolls of earlier batches, kept whole: with their log-probabilities, versions and start states, frames as bytes.

A replayed unroll is trained on beside new ones; V-trace corrects for the policy that made it (IMPALA with replay,
Espeholt et al. 2018, section 5.2.2). With several shards (one for each group of actors) every shard is a ring of its
own: the oldest unroll of a shard makes room for a new one of its actors.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

import numpy as np

from rookery.core.types import Arrays, Delivery


class UnrollRing:
    def __init__(self, slots: int, proportion: float, seed: int, shards: int = 1):
        assert slots >= shards >= 1, (slots, shards)
        self.proportion = proportion
        self._shards: list[deque[Arrays]] = [deque(maxlen=slots // shards) for _ in range(shards)]
        self._owed = 0.0  # replayed unrolls that are due
        self._rng = random.Random(seed)
        self._lags = np.zeros(0, np.int64)  # of the replayed unrolls in the last batch

    def __len__(self) -> int:
        return sum(len(shard) for shard in self._shards)

    def mixed_with(self, deliveries: Sequence[Delivery]) -> list[Arrays]:
        """Earlier unrolls to train on beside these new ones, which join the ring."""
        self._owed += self.proportion * len(deliveries)
        count = int(self._owed)
        self._owed -= count  # what an empty ring cannot give is not made up for
        drawn = self._draw(count)
        for delivery in deliveries:
            copy = {path: array.copy() for path, array in delivery.arrays.items()}
            self._shards[delivery.actor % len(self._shards)].append(copy)
        return drawn

    def _draw(self, count: int) -> list[Arrays]:
        """Uniformly over all shards, none twice."""
        kept = [arrays for shard in self._shards for arrays in shard]
        return self._rng.sample(kept, min(count, len(kept)))

    def trained(self, replayed: Sequence[Arrays], version: int) -> None:
        """A batch with these unrolls is trained on now, by weights of this version."""
        self._lags = np.array([version - int(arrays["version"][0]) for arrays in replayed], np.int64)

    def stats(self) -> dict[str, float]:
        """How full the ring is, and how old the replayed unrolls of the last batch were, in updates."""
        lags = self._lags if len(self._lags) else np.zeros(1, np.int64)
        return {
            "ring": float(len(self)), "replayed": float(len(self._lags)),
            "replayed_lag_mean": float(lags.mean()), "replayed_lag_max": float(lags.max()),
        }  # fmt: skip
