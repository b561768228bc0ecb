"""Unrolls whose numbers say which one they are, poisoned when they are given back; loader threads that move when told.

What several test files of the queues share.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from rookery.core.types import ActorReport, Arrays, Delivery, Sample
from rookery.tables import batch as batch_module

T, B = 3, 2
POISON = 113


def unroll(code: int, version: int = 0, lanes: int = B, recurrent: bool = False) -> Arrays:
    """Every number depends on `code`, row and lane; `code % 4` rows of the first lane are not live."""
    t, b = np.meshgrid(np.arange(T + 1), np.arange(lanes), indexing="ij")
    number = 100 * code + 10 * t + b
    live = np.ones((T, lanes), bool)
    live[: code % 4, 0] = False
    arrays = {
        "obs/frame": np.stack([number, number + 7], -1).astype(np.uint8),
        "obs/vector": number.astype(np.float32) / 3,
        "action": number[:-1] % 5,
        "reward": number[:-1].astype(np.float32),
        "terminated": number[:-1] % 2 == 0,
        "truncated": number[:-1] % 3 == 0,
        "live": live,
        "logp": -number[:-1].astype(np.float32),
        "version": np.full(lanes, version),
        "lane": 1000 * code + np.arange(lanes),
    }
    if recurrent:
        arrays["state0/core/h"] = np.arange(2 * lanes * 3, dtype=np.float32).reshape(2, lanes, 3) + code
    return arrays


def codes(sample: Sample) -> list[int]:
    """Which unrolls a batch is made of, in its order; every number of each is checked."""
    batch = sample.batch
    found = [int(lane) // 1000 for lane in batch.lane.tolist()[::B]]
    for at, code in enumerate(found):
        part, one = slice(at * B, (at + 1) * B), unroll(code)
        for name in ("reward", "live", "logp", "action"):
            np.testing.assert_array_equal(getattr(batch, name)[:, part].numpy(), one[name], err_msg=name)
        np.testing.assert_array_equal(batch.obs["frame"][:, part].numpy(), one["obs/frame"])
    return found


def steps_of(*made: int) -> int:
    """Live steps in the unrolls of these codes."""
    return sum(T * B - code % 4 for code in made)


class Source:
    """Makes unrolls 0, 1, 2, …; counts those that were not given back, and poisons those that were."""

    def __init__(self, freed: Callable[[int], object] = lambda actor: None, **shape: int) -> None:
        """`freed`: is told whose memory was given back."""
        self.made, self.out, self._freed, self._shape = 0, set[int](), freed, shape

    def __call__(self, actor: int = 0, version: int = 0, arrays: Arrays | None = None) -> Delivery:
        code, self.made = self.made, self.made + 1
        arrays = unroll(code, version, **self._shape) if arrays is None else arrays
        self.out.add(code)

        def release() -> None:
            self.out.remove(code)  # KeyError: given back twice
            for array in arrays.values():
                array.fill(POISON)
            self._freed(actor)

        return Delivery(actor, code, arrays, ActorReport(steps_of(code)), release)


class ByHand:
    """A `Loader` without threads: it works when told, and finishes in the order it is told to."""

    def __init__(self, draw: Callable, depth: int, threads: int, pause: float):
        self.threads, self._draw = threads, draw
        self.hands: list = []  # what "threads" have made and not handed over
        self.full: list = []

    def __len__(self) -> int:
        return len(self.full)

    def get(self, timeout: float):
        return self.full.pop(0) if self.full else None

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass

    def begin(self) -> None:
        self.hands.append(self._draw())

    def finish(self, which: int = 0) -> None:
        self.full.append(self.hands.pop(which))


def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every batcher that is made from now on use a `ByHand`."""
    monkeypatch.setattr(batch_module, "Loader", ByHand)


def work(batcher: batch_module.Batcher, choose: Callable[[int], int] = lambda many: 0) -> bool:
    """Have "threads" finish one of the batches that they have; `choose` says which of how many. Whether one was."""
    loader = batcher._loader
    if loader is None:
        return False
    begun = len(loader.hands) + len(loader.full) + len(batcher._made_ahead)
    for _ in range(min(len(batcher.under_way) - begun, loader.threads - len(loader.hands))):
        loader.begin()
    if not loader.hands:
        return False
    loader.finish(choose(len(loader.hands)))
    return True
