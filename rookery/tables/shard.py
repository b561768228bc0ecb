"""What goes between a replay memory in parts and its parts: what is asked for, and what every answer carries.

A part is a `roles.shard.Shard`, mostly in another process; the table in front of all of them (`shards.py`) knows it as
a `service.Service`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from rookery.core.types import Arrays
from rookery.tables.drawn import Keys


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
