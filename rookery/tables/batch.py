"""Unrolls side by side: from what actors have filled to the batch that the learner takes, in memory that is used again.

A few batch buffers go round: idle → filled (by the learner's thread, or by loader threads ahead of it) → trained on →
idle. Memory that is kept is not mapped and zeroed by the kernel for every batch; for a GPU it is pinned, and the copy
to it runs on a stream of its own.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from rookery.core import tree
from rookery.core.types import Arrays, Delivery, Sample
from rookery.core.unroll import Unroll, as_unroll
from rookery.tables.loader import Loader
from rookery.tables.unroll_ring import UnrollRing

FLAT = ("version", "lane")  # arrays without a time axis
WAIT = 0.05  # seconds a loader thread waits for work before it looks whether to stop


class Load(NamedTuple):
    """A batch to be put together."""

    deliveries: Sequence[Delivery]  # new unrolls, by whom they were made
    replayed: Sequence[Arrays]  # unrolls that were trained on before
    steps: int  # environment steps in the new ones


@dataclass(frozen=True, eq=False)
class Loaded:
    load: Load
    sample: Sample | None  # None: some of the data is gone


class Batches(Protocol):
    """What makes batches for a queue."""

    under_way: deque[Load]  # begun, and not taken yet
    direct: bool  # whether `now` can be called
    look: float  # seconds to wait for deliveries while a batch is under way

    @property
    def room(self) -> bool:
        """Whether another batch could be begun."""
        ...

    @property
    def ready(self) -> bool:
        """Whether the batch that was begun first can be taken."""
        ...

    def start(self, load: Load) -> None: ...
    def take(self) -> Loaded | None:
        """The batch that was begun first, or None if it is not made yet."""
        ...

    def now(self, load: Load) -> Sample:
        """The batch, made at once."""
        ...

    def give_back(self, memory: Any) -> None:
        """A batch was trained on: `keys` of its sample."""
        ...

    def stats(self) -> dict[str, float]: ...
    def close(self) -> None: ...


class Batcher:
    """Makes batches of unrolls, at once or in threads. `keys` of its samples is the memory: give it back."""

    direct, look = True, 0.001

    def __init__(self, threads: int = 0, buffers: int = 1, device: str = "cpu"):
        self._idle: deque[Arrays] = deque({} for _ in range(buffers))  # by path; made when their size is known
        self._to = None if device == "cpu" else ToDevice(device)
        # Not a SimpleQueue: its `get` may wait for ever, whatever its timeout, if another thread takes what woke it.
        self._inbox: queue.Queue[tuple[Load, Arrays]] = queue.Queue()
        self.under_way: deque[Load] = deque()  # given to threads, and not taken yet
        self._made_ahead: list[Loaded] = []  # of these, what is made; several threads finish in any order
        self._buffers = buffers
        self._threads = threads
        self._loader: Loader[Loaded] | None = None  # started with the first batch

    def now(self, load: Load) -> Sample:
        """The batch, made by the calling thread."""
        return self._made(load, self._idle.popleft() if self._idle else {})

    @property
    def room(self) -> bool:
        """Whether threads could fill another batch."""
        return self._threads > 0 and len(self._idle) > 0

    def start(self, load: Load) -> None:
        """Have a thread make the batch."""
        if self._loader is None:
            self._loader = Loader(self._work, self._buffers, self._threads, pause=0.0)
        self.under_way.append(load)
        self._inbox.put((load, self._idle.popleft()))

    @property
    def ready(self) -> bool:
        return self._first() is not None

    def take(self) -> Loaded | None:
        """The batch that was started first, or None if it is not made yet."""
        loaded = self._first()
        if loaded is not None:
            self._made_ahead.remove(loaded)
            self.under_way.popleft()
        return loaded

    def _first(self) -> Loaded | None:
        while self._loader is not None and (made := self._loader.get(0.0)) is not None:
            self._made_ahead.append(made)
        return next((made for made in self._made_ahead if made.load is self.under_way[0]), None)

    def give_back(self, memory: Arrays) -> None:
        """A batch was trained on: its memory may be filled again."""
        self._idle.append(memory)

    def stats(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        loader, self._loader = self._loader, None  # it holds this object as this object holds it
        if loader is not None:
            loader.close()
            loader.check()

    def _work(self) -> Loaded | None:
        """In a loader's thread."""
        try:
            load, memory = self._inbox.get(timeout=WAIT)
        except queue.Empty:
            return None
        return Loaded(load, self._made(load, memory))

    def _made(self, load: Load, memory: Arrays) -> Sample:
        parts = [delivery.arrays for delivery in load.deliveries] + list(load.replayed)
        arrays = side_by_side(parts, memory, self._empty)
        new = len(load.deliveries) * len(load.deliveries[0].arrays["lane"])
        return sample_of(arrays, new, load.steps, memory, self._to)

    def _empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        if self._to is None:
            return np.empty(shape, dtype)
        like = torch.from_numpy(np.empty(0, dtype))
        return torch.empty(shape, dtype=like.dtype, pin_memory=True).numpy()


def side_by_side(parts: Sequence[Arrays], memory: Arrays, empty: Callable[..., np.ndarray] = np.empty) -> Arrays:
    """The arrays of several unrolls as those of one, in `memory` where it fits; what is missing there is made."""
    arrays = {}
    for path, first in parts[0].items():
        axis = 0 if path in FLAT else 1
        shape = list(first.shape)
        shape[axis] *= len(parts)
        if path not in memory or memory[path].shape != tuple(shape):
            memory[path] = empty(tuple(shape), first.dtype)
        arrays[path] = np.concatenate([part[path] for part in parts], axis, out=memory[path])
    return arrays


def sample_of(arrays: Arrays, new: int, steps: int, keys: Any, to: Callable[[Unroll], Unroll] | None = None) -> Sample:
    """A batch of which the first `new` lanes, with so many `steps`, are trained on for the first time."""
    batch = tree.map_fields(as_unroll(arrays), tree.to_torch)
    if new < len(batch.lane):
        batch = tree.replace(batch, replayed=torch.arange(len(batch.lane)) >= new)
    versions = arrays["version"][:new].copy()
    return Sample(batch if to is None else to(batch), versions, steps, keys)


class ToDevice:
    """Copies batches to a GPU on a stream of its own; the learner's stream waits for the copy, not the processor."""

    def __init__(self, device: str):
        self._device, self._stream = torch.device(device), torch.cuda.Stream(device)

    def __call__(self, batch: Unroll) -> Unroll:
        with torch.cuda.stream(self._stream):
            moved = tree.map_fields(batch, lambda x: x.to(self._device, non_blocking=True))
        self._stream.synchronize()  # in a loader's thread: the memory may be filled again
        return moved


def live_steps(arrays: Arrays) -> int:
    return int(np.count_nonzero(arrays["live"]))


def load_of(deliveries: Sequence[Delivery], ring: UnrollRing | None) -> Load:
    """These unrolls, and what the ring adds to them from earlier ones."""
    steps = sum(live_steps(delivery.arrays) for delivery in deliveries)
    return Load(deliveries, () if ring is None else ring.mixed_with(deliveries), steps)
