"""Shared memory of one run: anonymous segments, and the three structures in them.

`Slots` hold unrolls while they travel from an actor to the learner, `WeightBoard` holds the newest weights, `Pulse`
holds one heartbeat per worker. Numbers of slots travel over a channel; the data does not.

A segment is a memory file without a name, handed to a child as an open descriptor: no other user can open it, and it
is gone with the last process that holds it, however that process ends. Nothing here waits for a peer or decides who may
write; the layout is given by the caller.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import tempfile
import threading
import time
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from rookery.core.errors import StorageError
from rookery.core.machine import Machine, amount

LINE = 64  # bytes of a cache line: two workers never write to the same one

_lock = threading.Lock()


def _fence() -> None:
    """Order the stores and loads before against those after, on processors that would reorder them (ARM).

    Python has no fence; a lock's release followed by a lock's acquire is one, at a fraction of a microsecond.
    """
    with _lock:
        pass
    with _lock:
        pass


def aligned(size: int) -> int:
    return -(-size // LINE) * LINE


class Segment:
    """Shared memory of fixed size, all pages present from the start.

    `reserve` gives a descriptor to start children with before the size is known, `allocate` the memory behind it;
    `create` is both. Arrays made of it keep the mapping alive: `close` gives up our descriptor and our reference, and
    the memory is freed with the last array. It is therefore safe at any time, with arrays in use or without.
    """

    def __init__(self, fd: int, name: str):
        self.fd = fd
        self.name = name
        self.size = 0
        self.buffer: mmap.mmap | None = None

    @classmethod
    def create(cls, size: int, name: str, machine: Machine | None = None) -> Segment:
        segment = cls.reserve(name)
        segment.allocate(size, machine)
        return segment

    @classmethod
    def reserve(cls, name: str) -> Segment:
        """A segment without memory as yet."""
        try:
            return cls(_anonymous_file(name), name)
        except OSError as error:
            raise StorageError(f"shared memory for {name}: the system refuses: {error}") from error

    def allocate(self, size: int, machine: Machine | None = None) -> None:
        """Get `size` bytes of zeros, once; or raise now with what is missing, instead of SIGBUS later."""
        if size <= 0 or self.size:
            raise ValueError(f"shared memory for {self.name}: cannot become {size} bytes, is {self.size}")
        have, source = (machine or Machine()).memory(shared=True)
        if size > have:
            raise _shortage(size, self.name, f"have {amount(have)} ({source})")
        try:
            _allocate(self.fd, size)
            self.buffer = mmap.mmap(self.fd, size)
        except (OSError, ValueError, OverflowError) as error:
            raise _shortage(size, self.name, f"the system refuses: {error}") from error
        self.size = size
        self.array((size,), "uint8")[:: mmap.PAGESIZE] = 0  # touched: every page is mapped before the run starts

    @classmethod
    def attach(cls, fd: int, size: int) -> Segment:
        """The segment behind a descriptor that came from the parent; takes the descriptor over."""
        actual = os.fstat(fd).st_size
        if actual != size:
            raise ValueError(f"descriptor {fd} is a segment of {actual} bytes, not of {size}")
        segment = cls(fd, f"descriptor {fd}")
        segment.buffer, segment.size = mmap.mmap(fd, size), size
        return segment

    def array(self, shape: tuple[int, ...], dtype: str, offset: int = 0) -> np.ndarray:
        """A writable view of the memory from `offset` on."""
        if self.buffer is None:
            raise ValueError(f"shared memory for {self.name} is closed, or was never allocated")
        count = math.prod(shape)
        if offset < 0 or offset + count * np.dtype(dtype).itemsize > self.size:
            raise ValueError(f"{dtype}{list(shape)} at {offset} does not fit a segment of {self.size} bytes")
        if count == 0:  # frombuffer refuses to make empty arrays
            return np.empty(shape, dtype)
        return np.frombuffer(self.buffer, dtype, count, offset).reshape(shape)

    def words(self, code: Literal["q", "d"], count: int) -> memoryview[Any]:
        """The first 8-byte words ("q" integers, "d" floats) as Python numbers: the quickest access to a single one."""
        if self.buffer is None:
            raise ValueError(f"shared memory for {self.name} is closed, or was never allocated")
        if 8 * count > self.size:
            raise ValueError(f"{count} words do not fit a segment of {self.size} bytes")
        return memoryview(self.buffer)[: 8 * count].cast(code)

    def close(self) -> None:
        # The map is dropped, not closed: closing it under an array would be a BufferError at best.
        self.buffer = None
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):  # a constructor that failed; an interpreter that ends
            self.close()


def _anonymous_file(name: str) -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create(f"rookery-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.fchmod(fd, 0o600)
        return fd
    with tempfile.TemporaryFile(prefix="rookery-") as file:  # mode 0600, unlinked before another process can open it
        return os.dup(file.fileno())


def _allocate(fd: int, size: int) -> None:
    if not hasattr(os, "posix_fallocate"):
        os.ftruncate(fd, size)
        return
    os.posix_fallocate(fd, 0, size)
    with contextlib.suppress(ImportError, AttributeError, OSError):  # a temporary file cannot be sealed
        import fcntl

        # The seal forbids shrinking: a mapped page stays valid.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)


def _shortage(size: int, name: str, why: str) -> StorageError:
    return StorageError(
        f"shared memory for {name}: need {amount(size)}, {why}; "
        "use fewer actors, fewer environments per actor or a smaller buffer, or raise the memory limit"
    )


class Field(msgspec.Struct, frozen=True):
    """One array of a slot."""

    shape: tuple[int, ...]
    dtype: str
    offset: int  # from the start of the slot


class Layout(msgspec.Struct, frozen=True):
    """Where everything is. Travels in a message as it is, and `Slots` takes what arrives."""

    count: int
    stride: int  # bytes from one slot to the next
    fields: dict[str, Field]

    @property
    def size(self) -> int:
        """Bytes of the whole: one header line per slot, then the slots."""
        return self.count * (LINE + self.stride)


class Stamp(NamedTuple):
    """The header of a slot: who filled it with what."""

    state: int
    actor: int
    incarnation: int
    sequence: int
    version: int  # of the weights that acted
    rows: int  # written so far, kept current: what is lost if the writer dies now


_STATE, _ROWS = 0, 5  # positions in Stamp
_WORDS = LINE // 8  # of a header


class Slots:
    """Fixed slots for unrolls. One writer at a time owns a slot; (actor, incarnation, sequence) names its content.

    A slot that was being written when its actor died, or that a former incarnation filled, is not `valid`.
    """

    FREE, WRITING, FULL = 0, 1, 2

    def __init__(self, segment: Segment, layout: Layout | dict[str, Any]):
        layout = msgspec.convert(layout, Layout)  # as it came in a message
        self._header = segment.words("q", layout.count * _WORDS)
        start = layout.count * LINE
        self._arrays: list[dict[str, np.ndarray]] = [
            {
                name: segment.array(field.shape, field.dtype, start + slot * layout.stride + field.offset)
                for name, field in layout.fields.items()
            }
            for slot in range(layout.count)
        ]

    @staticmethod
    def layout(shapes: dict[str, tuple[tuple[int, ...], str]], count: int) -> Layout:
        """Places for `count` slots of the named (shape, dtype), each array on a cache line of its own."""
        if count < 1:
            raise ValueError(f"at least one slot is needed, not {count}")
        fields: dict[str, Field] = {}
        offset = 0
        for name, (shape, dtype) in shapes.items():
            kind = np.dtype(dtype)
            if kind.hasobject:
                raise ValueError(f"{name}: Python objects ({dtype}) cannot live in shared memory")
            fields[name] = Field(tuple(int(n) for n in shape), kind.str, offset)
            offset += aligned(math.prod(shape) * kind.itemsize)
        return Layout(count, max(offset, LINE), fields)

    def arrays(self, i: int) -> dict[str, np.ndarray]:
        """The arrays of slot i: the same objects at every call."""
        return self._arrays[i]

    def stamp(self, i: int) -> Stamp:
        return Stamp(*self._header[i * _WORDS : i * _WORDS + len(Stamp._fields)])

    def begin(self, i: int, actor: int, incarnation: int, sequence: int, version: int) -> None:
        at, header = i * _WORDS, self._header
        header[at + _STATE] = self.WRITING  # first: a half-changed stamp never looks full
        _fence()
        header[at + 1], header[at + 2], header[at + 3], header[at + 4] = actor, incarnation, sequence, version
        header[at + _ROWS] = 0

    def progress(self, i: int, rows: int) -> None:
        self._header[i * _WORDS + _ROWS] = rows

    def rows(self, i: int) -> int:
        """How far the present writer has come; 0 in a free slot."""
        return self._header[i * _WORDS + _ROWS]

    def finish(self, i: int) -> None:
        _fence()  # the data before the word that says it is there
        self._header[i * _WORDS + _STATE] = self.FULL

    def valid(self, i: int, actor: int, incarnation: int, sequence: int) -> bool:
        """Whole, and the very unroll that was announced."""
        at, header = i * _WORDS, self._header
        found = (header[at + _STATE], header[at + 1], header[at + 2], header[at + 3])
        _fence()
        return found == (self.FULL, actor, incarnation, sequence)

    def release(self, i: int, poison: bool = False) -> None:
        """Free the slot; with `poison`, fill it so that a late reader shows: NaN, 0xA5…, True."""
        if poison:
            for array in self._arrays[i].values():
                if array.dtype.kind in "fc":
                    array.fill(np.nan)
                elif array.dtype.kind == "b":
                    array.fill(True)
                elif array.size:
                    array.reshape(-1).view(np.uint8).fill(0xA5)
        _fence()
        self._header[i * _WORDS + _ROWS] = 0  # a next owner that dies before it begins has written nothing
        self._header[i * _WORDS + _STATE] = self.FREE


class WeightBoard:
    """The newest weights: one flat float32 vector with a version, written by one process, read by many.

    Two buffers, used in turn. `latest` counts publications and is raised when a vector is whole; `begin` of a buffer
    is raised before it is overwritten. A reader that copied while the writer came round to the same buffer sees
    `begin` moved, and copies again. A writer that dies in the middle leaves the other buffer, which is whole.
    """

    _LATEST, _VERSION, _BEGIN, _STAMP, _FLOATS = 0, 1, 2, 4, 6  # words; versions are stored plus one: 0 is "none"

    def __init__(self, segment: Segment):
        """The board takes the whole segment; the first vector decides on the length."""
        self._header = segment.words("q", _WORDS)
        stride = (segment.size - LINE) // (2 * LINE) * LINE
        self._room = [segment.array((stride // 4,), "float32", LINE + side * stride) for side in (0, 1)]

    @staticmethod
    def size(floats: int) -> int:
        """Bytes of a board."""
        return LINE + 2 * aligned(4 * floats)

    def version(self) -> int:
        """Version of the newest whole vector, -1 before the first."""
        return self._header[self._VERSION] - 1

    def publish(self, vector: np.ndarray, version: int) -> None:
        self._check(vector, self._header[self._FLOATS])
        if version <= self.version():
            raise ValueError(f"version {version} does not follow version {self.version()}")
        header = self._header
        count = header[self._LATEST] + 1
        side = count & 1
        header[self._BEGIN + side] = count
        _fence()
        np.copyto(self._room[side][: vector.size], vector)
        header[self._FLOATS] = vector.size
        header[self._STAMP + side] = version + 1
        _fence()
        header[self._LATEST] = count
        header[self._VERSION] = version + 1

    def pull(self, into: np.ndarray, newer_than: int = -1, timeout: float = 5.0) -> int:
        """Copy the newest vector; returns the version that `into` now holds.

        If nothing is newer than `newer_than`, `into` is untouched and `newer_than` is returned. After a TimeoutError
        (a writer that overtook every copy) the content of `into` is not to be used.
        """
        if self.version() <= newer_than:
            return newer_than
        header = self._header
        self._check(into, header[self._FLOATS])
        room = [side[: into.size] for side in self._room]
        until = time.monotonic() + timeout
        while True:
            count = header[self._LATEST]
            side = count & 1
            _fence()
            version = header[self._STAMP + side] - 1
            np.copyto(into, room[side])
            _fence()
            if header[self._BEGIN + side] == count:
                return version
            if time.monotonic() > until:
                raise TimeoutError(f"weights were overwritten during every copy of the last {timeout:g} s")
            os.sched_yield()

    def _check(self, vector: np.ndarray, floats: int) -> None:
        fits = vector.size == floats or (floats == 0 and vector.size <= self._room[0].size)
        if not fits or vector.ndim != 1 or vector.dtype != np.float32:
            raise ValueError(f"weights are float32[{floats or '…'}], not {vector.dtype}{list(vector.shape)}")


class Pulse:
    """One heartbeat per worker: when it last moved, and how many environment steps it has made.

    `time.monotonic` is one clock for all processes of a machine, so that the parent compares with its own.
    """

    def __init__(self, segment: Segment):
        """For as many workers as the segment holds."""
        workers = segment.size // LINE
        self._at = segment.words("d", workers * _WORDS)
        self._steps = segment.words("q", workers * _WORDS)

    @staticmethod
    def size(workers: int) -> int:
        """Bytes for so many workers."""
        return workers * LINE

    def beat(self, worker: int, steps: int | None = None) -> None:
        self._at[worker * _WORDS] = time.monotonic()
        if steps is not None:
            self._steps[worker * _WORDS + 1] = steps

    def cut(self, worker: int, sequence: int) -> None:
        """Have a worker cut the unroll of this number short; another one is not concerned."""
        self._steps[worker * _WORDS + 2] = sequence + 1

    def is_cut(self, worker: int, sequence: int) -> bool:
        return self._steps[worker * _WORDS + 2] == sequence + 1

    def last(self, worker: int) -> tuple[float, int]:
        """(time, steps) of the last beat; (0.0, 0) before the first."""
        return self._at[worker * _WORDS], self._steps[worker * _WORDS + 1]

    def age(self, worker: int) -> float:
        """Seconds since the last beat."""
        return time.monotonic() - self._at[worker * _WORDS]
