"""Frames of a replay memory: one ring per image leaf of the observation, over all actors; each frame is stored once.

Items refer to frames by row, so a frame may be part of any number of stacks and successors, and a stack is rebuilt by
one gather. Frames leave in the order they came; `Watch` knows which items have to go before them.
"""

from __future__ import annotations

import heapq
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from math import prod
from typing import Any

import numpy as np

from rookery.core.errors import CheckpointError
from rookery.tables.fast import stream

Rows = slice | np.ndarray  # a slice with start and stop, or indices
BeforeWrite = Callable[[str, Rows], None]  # called with (name of an array, rows of it) before they change

NEVER = np.iinfo(np.int64).max  # number of the zero frame: it is never overwritten
_WATCHED = 256  # items whose oldest frame is watched together


class Watch:
    """Which items need which frames. Neighbours are watched together, so that this stays small.

    With several actors an item may need older frames than the one before it, so items do not lose theirs in order.
    """

    def __init__(self) -> None:
        self._groups: list[tuple[int, int, int]] = []  # heap of (oldest frame, first item, items)
        self._open = (NEVER, 0, 0)  # the newest group, which still grows

    def add(self, oldest: int, first: int, count: int) -> None:
        """Items `first`.. need frames from `oldest` on."""
        least, begin, grown = self._open
        if begin + grown == first and grown < _WATCHED:
            self._open = (min(least, oldest), begin, grown + count)
        else:
            self.again(self._open)
            self._open = (oldest, first, count)

    def again(self, group: tuple[int, int, int]) -> None:
        if group[0] < NEVER:
            heapq.heappush(self._groups, group)

    def overdue(self, low: int) -> Iterator[tuple[int, int]]:
        """Groups (first item, items) in which one may need a frame older than `low`; they are watched no more."""
        if self._open[0] < low:
            self.again(self._open)
            self._open = (NEVER, 0, 0)
        while self._groups and self._groups[0][0] < low:
            yield heapq.heappop(self._groups)[1:]

    def state(self) -> np.ndarray:
        groups = [self._open, *self._groups]  # thousands: a list of tuples is slow to make an array of
        return np.fromiter(chain.from_iterable(groups), np.int64, 3 * len(groups)).reshape(-1, 3)

    def load(self, state: np.ndarray) -> None:
        self._open, *self._groups = map(tuple, np.asarray(state).tolist())


class Pool:
    """Arrays for batches of frames, reused as soon as no array, view or tensor refers to them.

    A batch of 512 stacks with their successors is 29 MB. To have the system map and clear new memory takes several
    times as long as to fill it. Who holds an array is known by its reference count: views and tensors refer to it.
    """

    def __init__(self) -> None:
        self._arrays: list[np.ndarray] = []

    def array(self, rows: int, size: int) -> np.ndarray:
        """An array [rows, size] of bytes; it is not handed out again while anything refers to it."""
        for array in self._arrays:
            if sys.getrefcount(array) == _IDLE and array.shape == (rows, size):
                return array
        array = np.empty((rows, size), np.uint8)
        self._arrays.append(array)
        return array


def _references() -> int:
    """References to an array that only a list holds, as a loop over the list sees them; versions of Python differ."""
    for array in [np.empty(0)]:
        count = sys.getrefcount(array)
    return count


_IDLE = _references()


class FrameRing:
    """Frames of one image leaf, of all actors, in the order they came.

    Actors number their frames from 0; over all actors a frame has the number `head` had when it came, and lies in row
    number % rows until `rows` further frames have come. Row `rows` is the zero frame.
    """

    def __init__(self, key: str, rows: int, shape: tuple[int, ...], reach: int, dtype: str = "uint8"):
        self.name, self.rows, self.shape, self.dtype = f"frames/{key}", rows, shape, np.dtype(dtype)
        self._bytes = prod(shape) * self.dtype.itemsize  # of a frame
        self.head = 0
        # Every parcel holds at least one row of its actor, so no item refers to more parcels than it has rows to
        # reach back; a few more cost nothing.
        self._spans_kept = reach + 4
        self._spans: dict[int, list[list[int]]] = {}  # actor -> [its number, count, number over all] of late parcels
        self.watch = Watch()
        self._pool = Pool()
        self._allocate()

    def _allocate(self) -> None:
        self.memory = np.zeros((self.rows + 1, self._bytes), np.uint8)

    def array(self) -> np.ndarray | Packed:
        """The frames, without the zero frame: [rows, bytes]."""
        return self.memory[:-1]

    def write(self, frames: np.ndarray, actor: int, first: int, before_write: BeforeWrite | None) -> None:
        """Append `frames`, which their actor numbers from `first` on."""
        spans, count = self._spans.setdefault(actor, []), len(frames)
        if spans and first != spans[-1][0] + spans[-1][1]:
            raise ValueError(
                f"actor {actor} numbers its frames from {first} on, and {sum(spans[-1][:2])} was due: "
                "call forget() when an actor is restarted"
            )
        if not count:
            return
        if spans and spans[-1][2] + spans[-1][1] == self.head:
            spans[-1][1] += count
        else:
            spans.append([first, count, self.head])
            del spans[: -self._spans_kept]
        for here, there in runs(self.head % self.rows, count, self.rows):
            if before_write is not None:
                before_write(self.name, there)
            self._put(there, frames[here])
        self.head += count

    def _put(self, rows: slice, frames: np.ndarray) -> None:
        self.memory[rows].view(self.dtype)[:] = frames.reshape(len(frames), -1)

    def forget(self, actor: int) -> None:
        self._spans.pop(actor, None)

    def locate(self, actor: int, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rows int32 of frames [M, K] by their actor's numbers, and the oldest of each item [M].

        An item whose frames are not all here any more has an oldest frame of -1.
        """
        spans = self._spans.get(actor) or [[0, 0, 0]]
        if numbers.size and (numbers.max() >= spans[-1][0] + spans[-1][1] or numbers.min() < -1):
            seen = f"{numbers.min()}..{numbers.max()}"
            raise ValueError(f"items of actor {actor} refer to frames {seen}; it has sent {sum(spans[-1][:2])}")
        first, _, start = np.array(spans).T  # without gaps: a number from the first on is in the last span below it
        at = first.searchsorted(numbers, "right") - 1
        found = numbers + (start - first)[at]
        found[(at < 0) | (found < self.head - self.rows)] = -1
        rows = found % self.rows
        zero = numbers < 0
        rows[zero], found[zero] = self.rows, NEVER
        return rows.astype(np.int32), found.min(axis=1, initial=NEVER)

    def ages(self, rows: np.ndarray) -> np.ndarray:
        """Numbers over all actors of the frames that lie in `rows` now."""
        rows = rows.astype(np.int64)
        return np.where(rows == self.rows, NEVER, self.head - 1 - (self.head - 1 - rows) % self.rows)

    def prepare(self, frames: int) -> None:
        """Get ready to gather so many at once."""
        stream.prepare(frames * self._bytes)

    def gather(self, wanted: Sequence[np.ndarray]) -> list[np.ndarray]:
        """For each array of rows, all of one shape, the frames: [..., *shape]."""
        return self._whole(self.memory, np.stack(wanted))

    def _whole(self, frames: np.ndarray, rows: np.ndarray) -> list[np.ndarray]:
        """Frames [F, bytes] at rows [W, ...], as W arrays that share their memory."""
        out = self._pool.array(rows.size, self._bytes)
        stream.copy(frames, rows.reshape(len(rows), -1), out)
        return list(out.view(self.dtype).reshape(*rows.shape, *self.shape))

    def state(self) -> dict[str, Any]:
        spans = [[actor, *span] for actor, spans in self._spans.items() for span in spans]
        return {
            "head": self.head,
            "spans": np.array(spans, np.int64).reshape(-1, 4),
            "watch": self.watch.state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.head = int(state["head"])
        self._spans = {}
        for actor, *span in np.asarray(state["spans"]).tolist():
            self._spans.setdefault(actor, []).append(span)
        self.watch.load(state["watch"])


class Packed:
    """Rows of different sizes, each a bytes object: as an array [rows, bytes] of which slices are lists."""

    def __init__(self, rows: int, unpacked: int):
        self.shape = (rows, unpacked)
        self.bytes = 0  # of all rows together
        self._rows = [b""] * rows

    def __getitem__(self, rows: slice) -> list[bytes]:
        return self._rows[rows]

    def __setitem__(self, rows: slice, packed: list[bytes]) -> None:
        old = self._rows[rows]
        assert len(old) == len(packed), (rows, len(packed))
        self.bytes += sum(map(len, packed)) - sum(map(len, old))
        self._rows[rows] = packed

    def unpack(self, row: int) -> bytes:
        try:
            whole = zlib.decompressobj().decompress(self._rows[row], self.shape[1])  # never more than that
        except zlib.error:
            whole = b""
        if len(whole) != self.shape[1]:
            raise CheckpointError(
                f"a compressed frame of the replay memory is damaged (row {row}): the memory was loaded from a file "
                "that Rookery did not write. Remove the run's replay folder to go on with an empty memory"
            )
        return whole


class PackedRing(FrameRing):
    """A frame ring that keeps each frame compressed on its own, as a bytes object: rows differ in size.

    Measured on five Atari games at 84x84 (zlib, level 1): frames shrink 5 to 30 times; one takes 30 to 85 us to
    compress and 15 to 30 us to restore. A batch of 32 transitions at stack 4 needs about 200 of them, 5 ms instead of
    0.1 ms. More than the memory is saved only where the memory would not fit.
    """

    def _allocate(self) -> None:
        self.packed = Packed(self.rows, self._bytes)

    def array(self) -> Packed:
        return self.packed

    def _put(self, rows: slice, frames: np.ndarray) -> None:
        self.packed[rows] = [zlib.compress(np.ascontiguousarray(frame).data, 1) for frame in frames]

    def gather(self, wanted: Sequence[np.ndarray]) -> list[np.ndarray]:
        rows = np.stack(wanted)
        every, inverse = np.unique(rows, return_inverse=True)
        raw = np.zeros((len(every), self._bytes), np.uint8)
        for line, row in zip(raw, every.clip(0, self.rows).tolist()):
            if row < self.rows:  # the zero frame is not stored
                line[:] = np.frombuffer(self.packed.unpack(row), np.uint8)
        return self._whole(raw, inverse.reshape(rows.shape).astype(np.int32))


def runs(first: int, count: int, rows: int) -> list[tuple[slice, slice]]:
    """(what is written, where) for `count` things that go to a ring of `rows` from row `first` on."""
    if first + count <= rows:
        return [(slice(0, count), slice(first, first + count))]
    cut = rows - first
    return [(slice(0, cut), slice(first, rows)), (slice(cut, count), slice(0, count - cut))]
