"""Descriptors kept in reserve, for when an environment has leaked all others.

A checkpoint needs a few. Without this reserve a run that has no descriptors left could not save it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

COUNT = 32


class Reserve:
    """Context manager around the loop of a run; outside of it nothing is kept back."""

    def __init__(self, count: int = COUNT):
        self._count, self._wanted = count, 0
        self._kept: list[int] = []

    def __enter__(self) -> Reserve:
        self._wanted = self._count
        self._fill()
        return self

    def __exit__(self, *error: object) -> None:
        self._wanted = 0
        self._empty()

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Give them up for a while."""
        self._empty()
        try:
            yield
        finally:
            self._fill()

    def _empty(self) -> None:
        while self._kept:
            os.close(self._kept.pop())

    def _fill(self) -> None:
        """As many as there are, if there are not enough."""
        with contextlib.suppress(OSError):
            if self._wanted and not self._kept:
                self._kept.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
            while len(self._kept) < self._wanted:
                self._kept.append(os.dup(self._kept[0]))
