"""Puts whole batches together out of unrolls, beside the learner's process: what reaches the learner is one object.

It may keep a ring of earlier unrolls and add some of them to each batch (`unroll_ring.py`): with several aggregators,
each has a part of the ring. No transport.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np

from rookery.core.seeding import seed_of
from rookery.core.types import ActorReport, Arrays, Delivery
from rookery.tables.batch import side_by_side
from rookery.tables.unroll_ring import UnrollRing


@dataclass(frozen=True)
class AggregatorSetup:
    ring: int  # earlier unrolls that it keeps; 0: none
    proportion: float  # of them, for each new one
    seed: int
    index: int

    def builtins(self) -> dict[str, Any]:
        return msgspec.to_builtins(self)


class Gathered(NamedTuple):
    arrays: Arrays  # of a batch
    new: int  # lanes of it that are new: the first ones
    kept: int  # unrolls in the ring
    replayed: np.ndarray  # [R] versions of the unrolls that were added from it


class Aggregator:
    def __init__(self, setup: Mapping[str, Any]):
        """`setup`: an `AggregatorSetup` as plain values."""
        own = msgspec.convert(setup, AggregatorSetup)
        seed = seed_of(own.seed, "aggregator", own.index)
        self._ring = UnrollRing(own.ring, own.proportion, seed) if own.ring else None

    def gather(self, actors: Sequence[int], *unrolls: Arrays) -> Gathered:
        """The batch of these unrolls, each made by one of `actors`."""
        earlier: list[Arrays] = []
        if self._ring is not None:
            made = zip(actors, unrolls, strict=True)
            earlier = self._ring.mixed_with([Delivery(a, 0, arrays, ActorReport(0), _nothing) for a, arrays in made])
        arrays = side_by_side([*unrolls, *earlier], {})
        replayed = np.array([int(unroll["version"][0]) for unroll in earlier], np.int64)
        new = sum(len(unroll["lane"]) for unroll in unrolls)
        return Gathered(arrays, new, 0 if self._ring is None else len(self._ring), replayed)


def _nothing() -> None:
    pass
