"""What goes between a replay memory in parts and its parts: what is asked for, and what every answer carries.

A part is a `roles.shard.Shard`, in this process or in another one; the table in front of all of them (`shards.py`)
knows it by a handle. A handle carries out what it is asked in the order in which it was asked.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import numpy as np

from rookery.core.types import Arrays
from rookery.tables.drawn import Keys


class ShardLost(Exception):
    """A part of the memory is gone, with all it held."""


class Books(NamedTuple):
    """What a shard holds after it has done what it was asked. Counts are of all its life."""

    size: int = 0  # items
    full: bool = False  # an item had to make room: it holds as many as it ever will
    mass: float = 0.0  # what the probabilities of its items are shares of
    lowest: float = 0.0  # the smallest mass of an item, where importance weights need it
    largest: float = 0.0  # largest raw priority so far
    steps_waiting: int = 0  # environment steps of items that were never drawn
    steps_evicted: int = 0  # environment steps of items that left without being drawn
    evicted: int = 0  # items
    gone: int = 0  # items that had left when their new priorities came


class Part(NamedTuple):
    """Items that a shard has drawn."""

    columns: Arrays  # by path
    keys: Keys
    probability: np.ndarray  # [N] of each, per draw, within the shard
    fresh: int  # environment steps of those that were drawn for the first time


class Saved(NamedTuple):
    """How far a shard is with being saved, or restored."""

    busy: bool = False
    error: str = ""
    name: str = ""  # of the folder that was loaded
    steps: int | None = None  # environment steps of what was loaded; None: nothing was found
    front: dict[str, Any] | None = None  # of the table in front, as it was saved with that


class Answer(NamedTuple):
    books: Books
    value: Any = None


class Handle(Protocol):
    life: int  # how many shards in this place were lost; the next one starts empty

    @property
    def up(self) -> bool:
        """Whether there is one now."""
        ...

    def ask(self, op: str, *args: Any) -> Future[Answer]:
        """Call the method `op` of the shard. The future fails with `ShardLost` when the shard is gone."""
        ...

    def look(self) -> None:
        """Called again and again: a lost shard is reported and replaced here. Does not wait."""
        ...

    def kill(self, why: str) -> None:
        """End a shard that does not answer; it is lost then."""
        ...


class LocalShard:
    """A shard in this process, with a thread of its own. It is not replaced when it is killed."""

    def __init__(self, shard: Any):
        self._shard, self.life, self.up = shard, 0, True
        self._thread = ThreadPoolExecutor(1, "shard")

    def ask(self, op: str, *args: Any) -> Future[Answer]:
        return self._thread.submit(self._call, self.life, op, args)

    def _call(self, life: int, op: str, args: tuple[Any, ...]) -> Answer:
        answer = getattr(self._shard, op)(*args) if self.up else None
        if answer is None or life != self.life:
            raise ShardLost("the shard was killed")
        return answer

    def look(self) -> None:
        pass

    def kill(self, why: str) -> None:
        self.life, self.up = self.life + 1, False

    def close(self) -> None:
        self._thread.shutdown()
