"""Waits that others need not share: a generator that says what it waits for, and is gone on with by whoever has time.

One that has nothing else to do waits with `wait_for`; one that has calls `next` now and then, and goes about its work.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

from rookery.pipes import channel as channels

T = TypeVar("T")
Waiting = Generator[tuple[list[channels.Channel], float], None, T]  # for a word in one of these, so many seconds


def wait_for(waiting: Waiting[T], wake: int) -> T:
    """What comes of it. `wake` is a descriptor that ends a wait early, so that clocks and signals are looked at."""
    while True:
        try:
            awaited, seconds = next(waiting)
        except StopIteration as end:
            return end.value
        channels.wait(awaited, seconds, wake=wake)
