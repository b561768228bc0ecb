"""A replay memory as of one moment, read by a background thread while the memory goes on changing.

Taking a snapshot copies the small state and nothing else. The bulk arrays are read later in chunks of a few megabytes,
and the table announces every row it is about to overwrite: a chunk that was not read yet is copied aside first. So what
is read is exact, and only what is overwritten meanwhile is held twice. Where it goes is the reader's affair.

Two threads: the table's own, which takes the snapshot and calls `_keep`, and the reader's. They share one lock, which
is held for the copy of one chunk at most.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

from rookery.errors import StorageError

CHUNK = 4 << 20  # bytes
LEAST_HELD = 256 << 20  # bytes that a snapshot may always hold aside


class Table(Protocol):
    """What a replay table offers to those who save it."""

    before_write: Callable[[str, int, int], None] | None  # called with (name, first row, rows) before rows change

    def arrays(self) -> dict[str, np.ndarray]: ...  # views [rows, bytes], uint8
    def used(self) -> dict[str, int]: ...  # rows of each that were ever written; those behind need not be kept
    def state(self) -> dict[str, Any]: ...  # all the rest, copied
    def check_state(
        self, state: dict[str, Any], used: dict[str, int]
    ) -> None: ...  # CheckpointError: not of this table
    def load(self, state: dict[str, Any]) -> None: ...  # once the arrays have been filled
    def check_records(self) -> None: ...  # CheckpointError: the arrays hold what cannot be used


class _Array:
    """One bulk array: `pending[c]` is 1 while chunk c is neither read nor held aside."""

    def __init__(self, memory: np.ndarray, used: int, chunk: int):
        assert memory.ndim == 2 and memory.dtype == np.uint8, (memory.shape, memory.dtype)
        self.memory, self.rows, self.used, self.width = memory, len(memory), used, memory.shape[1]
        self.per_chunk = max(1, chunk // max(self.width, 1))
        self.pending = bytearray(b"\1") * -(-used // self.per_chunk)
        self.last_written: int | None = None  # chunk

    def chunk(self, number: int) -> np.ndarray:
        first = number * self.per_chunk
        return self.memory[first : min(first + self.per_chunk, self.used)]


class Snapshot:
    """Taken in the table's thread, between two of its operations; only one at a time.

    `most_held` is how many bytes may be held aside (default: a quarter of the memory, and at least 256 MiB). Beyond
    that the snapshot is given up and its reader told: better no copy of the memory than no memory left to train in.
    """

    def __init__(self, table: Table, chunk: int = CHUNK, most_held: int | None = None):
        before = getattr(table.before_write, "__self__", None)
        if table.before_write is not None and not (isinstance(before, Snapshot) and before.closed):
            raise RuntimeError("a snapshot of this table is still being read; close it first")
        used = table.used()
        self._state: dict[str, Any] | None = table.state()
        self._arrays = {name: _Array(memory, used[name], chunk) for name, memory in table.arrays().items()}
        # name -> (rows, rows in use, bytes of a row)
        self.shapes = {name: (array.rows, array.used, array.width) for name, array in self._arrays.items()}
        self.bytes = sum(used * width for _, used, width in self.shapes.values())
        self.held = 0  # bytes held aside now
        self._most_held = max(self.bytes // 4, LEAST_HELD) if most_held is None else most_held
        self._aside: dict[tuple[str, int], np.ndarray] = {}
        self._left = sum(len(array.pending) for array in self._arrays.values())  # chunks to read
        self._over = ""  # why there is nothing to read any more
        self._lock = threading.Lock()
        self._finish()
        # A finished snapshot stays there as a call that does nothing, until the next one takes its place: taken out by
        # the reader's thread, it could go between the table's look at it and the call.
        table.before_write = self._keep

    @property
    def closed(self) -> bool:
        """All has been read, or the snapshot was closed or given up: the table may change without a look back."""
        return bool(self._over)

    @property
    def state(self) -> dict[str, Any]:
        """What is not in the arrays; to be had until `close`."""
        if self._state is None:
            raise StorageError(self._over)
        return self._state

    def segments(self, name: str, size: int) -> list[tuple[int, int]]:
        """(first row, rows) of the parts of about `size` bytes to read one after the other; together all rows in use.

        They begin where the table is writing at this moment. A ring is overwritten from there on, and a reader that
        is faster than the writer stays ahead of it, so that next to nothing is held aside.
        """
        if not self.shapes[name][1]:
            return []
        array = self._array(name)
        step = max(1, size // max(array.width * array.per_chunk, 1)) * array.per_chunk  # whole chunks
        begin = min((array.last_written or 0) * array.per_chunk, array.used)
        ranges = ((begin, array.used), (0, begin))
        return [(first, min(step, stop - first)) for start, stop in ranges for first in range(start, stop, step)]

    def chunks(self, name: str, first: int = 0, rows: int | None = None) -> Iterator[np.ndarray]:
        """The rows of a segment (all in use by default), each [n, bytes] and valid until the next; every one once."""
        stop = self.shapes[name][1] if rows is None else first + rows
        if stop <= first:
            return
        array = self._array(name)
        assert first % array.per_chunk == 0 and stop <= array.used, (name, first, rows)
        buffer = np.empty((array.per_chunk, array.width), np.uint8)
        for number in range(first // array.per_chunk, -(-stop // array.per_chunk)):
            yield self._read(name, number, buffer)

    def close(self) -> None:
        """Let go of everything; a reader that is not through gets a StorageError. From any thread."""
        with self._lock:
            self._end("the snapshot of the replay memory was closed before all was read")
            self._state = None

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _array(self, name: str) -> _Array:
        arrays = self._arrays
        if not arrays:
            raise StorageError(self._over)
        return arrays[name]

    def _read(self, name: str, number: int, buffer: np.ndarray) -> np.ndarray:
        with self._lock:
            array = self._array(name)
            chunk = self._aside.pop((name, number), None)
            if chunk is not None:
                self.held -= chunk.nbytes
            else:
                assert array.pending[number], f"chunk {number} of {name} was read before"
                source = array.chunk(number)
                chunk = buffer[: len(source)]
                np.copyto(chunk, source)
                array.pending[number] = 0
            self._left -= 1
            self._finish()
            return chunk

    def _finish(self) -> None:
        if not self._left:
            self._end("all of this snapshot was read before")

    def _keep(self, name: str, first: int, rows: int) -> None:
        """In the table's thread: rows are about to be overwritten."""
        array = self._arrays.get(name)
        if array is None or rows <= 0:
            return
        begin, end = first // array.per_chunk, (first + rows - 1) // array.per_chunk + 1
        array.last_written = end - 1
        if 1 not in array.pending[begin:end]:  # without the lock: a chunk that is not pending never is again
            return
        with self._lock:
            for number in range(begin, min(end, len(array.pending))):
                if self._arrays and array.pending[number]:
                    self._hold(name, number, array)

    def _hold(self, name: str, number: int, array: _Array) -> None:
        source = array.chunk(number)
        if self.held + source.nbytes > self._most_held:
            self._end(
                f"{self.held >> 20} MiB of the replay memory were overwritten before they reached the disk, and more "
                "is not held aside: the disk is too slow for so many new steps. Use a faster one, or "
                "--algo.replay.save false"
            )
            return
        try:
            self._aside[name, number] = source.copy()
        except MemoryError:
            self._end("there is no memory left to hold a part of the replay memory that was about to be overwritten")
            return
        self.held += source.nbytes
        array.pending[number] = 0

    def _end(self, why: str) -> None:
        self._over = self._over or why
        self._arrays, self._aside, self.held = {}, {}, 0
