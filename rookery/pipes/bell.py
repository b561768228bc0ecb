"""A pipe that ends a wait for it, among other descriptors: in another process, or from another thread."""

from __future__ import annotations

import contextlib
import os
import threading


class Bell:
    """A pipe that wakes its reader. Rung many times before it is heard, it is heard once."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        for end in (self.reader, self.writer):
            os.set_blocking(end, False)

    def close(self) -> None:
        for end in (self.reader, self.writer):
            with contextlib.suppress(OSError):
                os.close(end)


class Alarm:
    """A bell that other threads of this process ring, also when it is about to be closed."""

    def __init__(self) -> None:
        self._bell, self._lock, self._open = Bell(), threading.Lock(), True

    def fileno(self) -> int:
        return self._bell.reader

    def ring(self) -> None:
        with self._lock:
            if self._open:
                ring(self._bell.writer)

    def hush(self) -> None:
        hush(self._bell.reader)

    def close(self) -> None:
        with self._lock:
            self._open = False
            self._bell.close()


def ring(fd: int) -> None:
    with contextlib.suppress(BlockingIOError):  # full: it has been rung often enough
        os.write(fd, b"\0")


def hush(fd: int) -> None:
    """What is rung from now on is heard by the next wait."""
    with contextlib.suppress(BlockingIOError):
        while len(os.read(fd, 4096)) == 4096:
            pass
