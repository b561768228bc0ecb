"""A replay memory as of one moment, read by a background thread while the memory goes on changing.

Taking a snapshot copies a few numbers and nothing that grows with the memory. The arrays are read later, chunk by
chunk, and the table announces every row it is about to overwrite: as long as the row's chunk was not read, its old
value is noted. A reader copies a chunk as it is now and then puts the noted rows back, the oldest note last. So what is
read is exact, and only what is overwritten meanwhile is held twice. The reader decides where it goes.

Two threads: the table's own, which takes the snapshot and calls `_keep`, and the reader's. They share one lock, which
is held to note rows or to fetch the notes, never for the copy of a chunk: a row that changes in the middle of the copy
was noted before it changed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from rookery.core.errors import StorageError
from rookery.core.wording import setting
from rookery.tables.ring import BeforeWrite, Packed, Rows

CHUNK = 4 << 20  # bytes
LEAST_HELD = 64 << 20  # bytes that a snapshot may always hold aside
HELD_SHARE = 16  # one part in so many of a larger memory
NOTE = 300  # bytes that a note takes beside the rows in it
PACKED_SEGMENT = 32 << 20  # bytes of packed rows per file: all of them are referred to while the file is written
BUFFERS = 2 * CHUNK + PACKED_SEGMENT  # bytes of memory that saving takes at most, beside what the snapshot holds


def allowance(memory: int) -> int:
    """Bytes that a snapshot of a memory of so many bytes may hold aside."""
    return max(memory // HELD_SHARE, LEAST_HELD)


class Table(Protocol):
    """What a replay table offers to those who save it. All of it is in `arrays`, `vectors` and `numbers`."""

    before_write: BeforeWrite | None  # called before rows of an array or a vector change

    def arrays(self) -> dict[str, np.ndarray | Packed]: ...  # views [rows, bytes], uint8
    def used(self) -> dict[str, int]: ...  # rows of each that were ever written; those behind need not be kept
    def vectors(self) -> dict[str, np.ndarray]: ...  # parts of the state that grow with the memory, by path; views
    def numbers(self) -> dict[str, Any]: ...  # the state without them, copied
    def state(self) -> dict[str, Any]: ...  # the state with copies of them
    def check_state(
        self, state: dict[str, Any], used: dict[str, int]
    ) -> None: ...  # CheckpointError: not of this table
    def load(self, state: dict[str, Any]) -> None: ...  # once the arrays have been filled
    def check_records(self) -> None: ...  # CheckpointError: the arrays hold what cannot be used


class _Part:
    """One array or vector: `pending[c]` is 1 while chunk c was not read, `notes[c]` are its rows overwritten since."""

    def __init__(self, memory: np.ndarray | Packed, used: int, size: int, chunk: int):
        self.memory, self.used = memory, used
        self.per_chunk = max(1, chunk * used // max(size, 1))  # rows; of packed ones the mean size counts
        self.chunk_bytes = max(1, size * self.per_chunk // max(used, 1))
        self.pending = bytearray(b"\1") * -(-used // self.per_chunk)
        self.notes: dict[int, list[tuple[Rows, Any, int]]] = {}  # rows, what was there, its bytes
        self.last_written: int | None = None  # chunk

    def split(self, rows: Rows) -> Iterator[tuple[int, Rows]]:
        """Those of the rows that were in use, by chunk."""
        if isinstance(rows, slice):
            stop = min(rows.stop, self.used)
            for number in range(rows.start // self.per_chunk, -(-stop // self.per_chunk)):
                first = number * self.per_chunk
                yield number, slice(max(rows.start, first), min(stop, first + self.per_chunk))
        else:
            rows = rows[rows < self.used]  # a copy: the caller may use its array again
            numbers = rows // self.per_chunk
            for number in np.unique(numbers).tolist():
                yield number, rows[numbers == number]

    def old(self, rows: Rows) -> tuple[Any, int]:
        """What is in these rows now, and its bytes."""
        if isinstance(self.memory, Packed):
            assert isinstance(rows, slice), rows
            packed = self.memory[rows]
            return packed, sum(map(len, packed))
        values = self.memory[rows]
        if isinstance(rows, slice):
            return values.copy(), values.nbytes
        return values, values.nbytes + rows.nbytes

    def copy(self, number: int, buffer: np.ndarray | None) -> np.ndarray | list[bytes]:
        first = number * self.per_chunk
        rows = self.memory[first : min(first + self.per_chunk, self.used)]
        if isinstance(rows, list):
            return rows
        if buffer is None:
            return rows.copy()
        np.copyto(buffer[: len(rows)], rows)
        return buffer[: len(rows)]

    def undo(self, number: int, chunk: Any, notes: list[tuple[Rows, Any, int]]) -> None:
        first = number * self.per_chunk
        for rows, values, _ in reversed(notes):
            chunk[slice(rows.start - first, rows.stop - first) if isinstance(rows, slice) else rows - first] = values


class Snapshot:
    """Taken in the table's thread, between two of its operations; only one at a time.

    `most_held` is how many bytes may be held aside (default: `allowance`). Beyond that the snapshot is given up and its
    reader told: better no copy of the memory than no memory left to train in.
    """

    def __init__(self, table: Table, chunk: int = CHUNK, most_held: int | None = None):
        before = getattr(table.before_write, "__self__", None)
        if table.before_write is not None and not (isinstance(before, Snapshot) and before.closed):
            raise RuntimeError("a snapshot of this table is still being read; close it first")
        used, arrays, vectors = table.used(), table.arrays(), table.vectors()
        self._numbers: dict[str, Any] | None = table.numbers()
        # name -> (rows, rows in use, bytes of a row); name -> bytes of all rows of one that is packed
        self.shapes = {name: (array.shape[0], used[name], array.shape[1]) for name, array in arrays.items()}
        self.packed = {name: array.bytes for name, array in arrays.items() if isinstance(array, Packed)}
        sizes = {name: self.packed.get(name, used * width) for name, (_, used, width) in self.shapes.items()}
        parts = {name: _Part(array, used[name], sizes[name], chunk) for name, array in arrays.items()}
        for path, vector in vectors.items():  # in one chunk: its rows change in any order
            parts[path] = _Part(vector, len(vector), vector.nbytes, vector.nbytes)
        self._vectors = {path: (len(vector), vector.dtype) for path, vector in vectors.items()}
        self._parts = {name: part for name, part in parts.items() if part.used}
        self.bytes = sum(sizes.values())  # of the arrays
        self.held = 0  # bytes held aside now
        self._most_held = allowance(self.bytes) if most_held is None else most_held
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
    def numbers(self) -> dict[str, Any]:
        """The numbers of the memory; available until `close`."""
        if self._numbers is None:
            raise StorageError(self._over)
        return self._numbers

    def vectors(self) -> dict[str, np.ndarray]:
        """The table's vectors by path, once. To be read first: their rows change most often."""
        found = self._vectors.items()
        return {path: self._read(path, 0) if size else np.empty(0, dtype) for path, (size, dtype) in found}

    def segments(self, name: str, size: int) -> list[tuple[int, int]]:
        """(first row, rows) of the parts of about `size` bytes to read one after the other; together all rows in use.

        They begin where the table is writing at this moment. A ring is overwritten from there on, and a reader that
        is faster than the writer stays ahead of it, so that next to nothing is held aside.
        """
        if not self.shapes[name][1]:
            return []
        part = self._part(name)
        step = max(1, size // part.chunk_bytes) * part.per_chunk  # whole chunks
        begin = min((part.last_written or 0) * part.per_chunk, part.used)
        ranges = ((begin, part.used), (0, begin))
        return [(first, min(step, stop - first)) for start, stop in ranges for first in range(start, stop, step)]

    def chunks(self, name: str, first: int = 0, rows: int | None = None) -> Iterator[Any]:
        """The rows of a segment (all in use by default), each [n, bytes] and valid until the next; every one once.

        Chunks of packed rows are lists of bytes objects.
        """
        stop = self.shapes[name][1] if rows is None else first + rows
        if stop <= first:
            return
        part = self._part(name)
        assert first % part.per_chunk == 0 and stop <= part.used, (name, first, rows)
        buffer = None if name in self.packed else np.empty((part.per_chunk, self.shapes[name][2]), np.uint8)
        for number in range(first // part.per_chunk, -(-stop // part.per_chunk)):
            yield self._read(name, number, buffer)

    def close(self) -> None:
        """Let go of everything; a reader that is not through gets a StorageError. From any thread."""
        with self._lock:
            self._end("the snapshot of the replay memory was closed before all was read")
            self._numbers = None

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _part(self, name: str) -> _Part:
        part = self._parts.get(name)
        if part is None:
            raise StorageError(self._over or f"all of {name} was read before")
        return part

    def _read(self, name: str, number: int, buffer: np.ndarray | None = None) -> Any:
        """A chunk as of the moment of the snapshot."""
        part = self._part(name)
        chunk = part.copy(number, buffer)
        with self._lock:
            self._part(name)  # not given up meanwhile
            assert part.pending[number], f"chunk {number} of {name} was read before"
            part.pending[number] = 0
            notes = part.notes.pop(number, [])
            self.held -= sum(size for *_, size in notes)
            if 1 not in part.pending:
                del self._parts[name]
                self._finish()
        part.undo(number, chunk, notes)
        return chunk

    def _finish(self) -> None:
        if not self._parts:
            self._end("all of this snapshot was read before")

    def _keep(self, name: str, rows: Rows) -> None:
        """In the table's thread: rows are about to be overwritten."""
        part = self._parts.get(name)
        if part is None:  # all of it was read
            return
        for number, some in part.split(rows):
            part.last_written = number
            if part.pending[number]:  # without the lock: a chunk that is not pending never is again
                with self._lock:
                    if self._parts and part.pending[number]:
                        self._note(part, number, some)

    def _note(self, part: _Part, number: int, rows: Rows) -> None:
        try:
            values, size = part.old(rows)
            size += NOTE
        except MemoryError:
            self._end("there is no memory left to hold a part of the replay memory that was about to be overwritten")
            return
        if self.held + size > self._most_held:
            self._end(
                f"{self.held >> 20} MiB of the replay memory were overwritten before they reached the disk, and more "
                "is not held aside: the disk is too slow for so many new steps. Use a faster one, or leave the memory "
                f"out ({setting('algo.replay.save', False)})"
            )
            return
        part.notes.setdefault(number, []).append((rows, values, size))
        self.held += size

    def _end(self, why: str) -> None:
        self._over = self._over or why
        self._parts, self.held = {}, 0
