"""A snapshot is the memory as of one moment, whatever the table does while it is read."""

import threading
import tracemalloc
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support_memory import REMOVERS, SAMPLERS
from support_parcels import STACKED, VECTOR, Maker, replay

from rookery.core.errors import StorageError
from rookery.tables import snapshot as snapshots
from rookery.tables.memory import ReplayMemory
from rookery.tables.ring import Packed
from rookery.tables.snapshot import CHUNK, Snapshot, _Part, allowance


@pytest.fixture(autouse=True)
def notes_take_nothing(monkeypatch):
    monkeypatch.setattr(snapshots, "NOTE", 0)


class Rings:
    """The least that can be saved: rings of random bytes, rings of packed rows, vectors, and numbers.

    `shapes`: name -> (rows, bytes of a row), with `packed` of them packed; `vectors`: path -> entries.
    """

    def __init__(self, shapes: dict[str, tuple[int, int]], packed: str = "", vectors: dict[str, int] | None = None):
        self.rng = np.random.default_rng(0)
        self.before_write = None
        self.memory = {
            name: Packed(*shape) if name in packed else np.zeros(shape, np.uint8) for name, shape in shapes.items()
        }
        self.vector = {path: self.rng.random(size) for path, size in (vectors or {}).items()}
        self.head = dict.fromkeys(shapes, 0)

    def arrays(self):
        return dict(self.memory)

    def used(self):
        return {name: min(self.head[name], memory.shape[0]) for name, memory in self.memory.items()}

    def vectors(self):
        return dict(self.vector)

    def numbers(self):
        return {"head": dict(self.head), "array": np.arange(5) + sum(self.head.values())}

    def overwrite(self, name: str, rows) -> None:
        """Rows of an array or a vector: a slice, or indices in any order, also twice."""
        if self.before_write is not None:
            self.before_write(name, rows)
        if name in self.vector:
            self.vector[name][rows] = self.rng.random(self.vector[name][rows].shape)
            return
        memory = self.memory[name]
        if isinstance(memory, Packed):
            memory[rows] = [self.rng.bytes(int(self.rng.integers(1, memory.shape[1]))) for _ in memory[rows]]
        else:
            memory[rows] = self.rng.integers(0, 256, memory[rows].shape)

    def append(self, name: str, count: int = 1) -> None:
        while count:
            rows = self.memory[name].shape[0]
            here = self.head[name] % rows
            now = min(count, rows - here)
            self.overwrite(name, slice(here, here + now))
            self.head[name], count = self.head[name] + now, count - now

    def copy(self) -> dict[str, Any]:
        rows = {name: list(map(bytes, self.memory[name][:used])) for name, used in self.used().items()}
        return rows | {path: vector.copy().tobytes() for path, vector in self.vector.items()}


def read(snapshot: Snapshot, between=lambda: None, size: int = 60) -> dict[str, Any]:
    """Everything, as a reader on disk would have it, put in order."""
    result = {path: vector.tobytes() for path, vector in snapshot.vectors().items()}
    for name, (_, used, _) in snapshot.shapes.items():
        rows = [b""] * used
        for first, count in snapshot.segments(name, size):
            at = first
            for chunk in snapshot.chunks(name, first, count):
                between()
                rows[at : at + len(chunk)] = map(bytes, chunk)
                at += len(chunk)
            assert at == first + count
        result[name] = rows
    return result


ACTS = st.one_of(
    st.tuples(st.just("append"), st.sampled_from("abp"), st.integers(1, 30)),
    st.tuples(st.just("overwrite"), st.sampled_from("abv"), st.lists(st.integers(0, 19), min_size=1, max_size=6)),
    st.just(("read",)),
)


@settings(max_examples=300, deadline=None)
@given(
    fill=st.tuples(st.integers(0, 60), st.integers(0, 60), st.integers(0, 40)),
    chunk=st.integers(1, 90),
    size=st.integers(1, 200),
    acts=st.lists(ACTS, max_size=30),
)
def test_what_is_read_is_what_was_there(fill, chunk, size, acts):
    """Whatever is overwritten before, between and in the middle of the reader's copies."""
    table = Rings({"a": (20, 7), "b": (33, 10), "p": (15, 9)}, packed="p", vectors={"v": 20, "none": 0})
    for name, count in zip("abp", fill):
        table.append(name, count)
    expected, numbers = table.copy(), table.numbers()
    snapshot, acts = Snapshot(table, chunk), iter([*acts, None])

    def change() -> None:
        """The table goes on until it is time to read."""
        for act in acts:
            match act:
                case ("append", name, count):
                    table.append(name, count)
                case ("overwrite", name, rows):
                    table.overwrite(name, np.array(rows))
                case ("read",) | None:
                    return

    with interrupted(change):
        found = read(snapshot, change, size)
    assert found == expected
    assert snapshot.numbers["head"] == numbers["head"] and np.array_equal(snapshot.numbers["array"], numbers["array"])
    assert snapshot.closed and snapshot.held == 0


@contextmanager
def interrupted(change):
    """The table changes right before and right after each copy of a reader, while the chunk still counts as unread."""

    def copy(part, number, buffer):
        change()
        chunk = real(part, number, buffer)
        change()
        return chunk

    real = _Part.copy
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Part, "copy", copy)
        yield


def test_only_what_is_overwritten_is_held_and_only_until_it_is_read():
    table = Rings({"a": (40, 10)})
    table.append("a", 40)
    snapshot = Snapshot(table, 100)  # four chunks of ten rows
    assert snapshot.held == 0 and snapshot.bytes == 400
    table.append("a", 3)
    table.append("a", 4)
    assert snapshot.held == 70  # rows 0 to 6, and not the rest of their chunk
    table.append("a", 5)
    assert snapshot.held == 120  # up to row 11
    chunks = snapshot.chunks("a")
    next(chunks)
    assert snapshot.held == 20
    next(chunks)
    assert snapshot.held == 0
    table.append("a", 8)  # up to row 19: read before
    assert snapshot.held == 0
    next(chunks)
    table.append("a", 10)
    assert snapshot.held == 0
    assert not snapshot.closed
    assert next(chunks).tobytes() == table.memory["a"][30:].tobytes()
    assert snapshot.closed


def test_rows_that_were_never_in_use_are_neither_read_nor_held():
    table = Rings({"a": (1000, 10), "none": (5, 3)})
    table.append("a", 7)
    snapshot = Snapshot(table, 30)
    table.append("a", 500)
    assert snapshot.shapes == {"a": (1000, 7, 10), "none": (5, 0, 3)} and snapshot.bytes == 70
    assert snapshot.held == 0
    assert snapshot.segments("none", 10) == [] == list(snapshot.chunks("none"))
    assert sum(len(chunk) for chunk in snapshot.chunks("a")) == 7
    assert snapshot.segments("none", 10) == [] == list(snapshot.chunks("none"))


def test_an_empty_memory_is_read_at_once():
    table = Rings({"a": (10, 3), "b": (10, 3)})
    snapshot = Snapshot(table)
    assert snapshot.closed and read(snapshot) == {"a": [], "b": []} and snapshot.numbers["head"] == {"a": 0, "b": 0}
    table.append("a", 30)
    assert snapshot.held == 0


@given(
    rows=st.integers(1, 50), used=st.integers(0, 50), width=st.integers(1, 20), chunk=st.integers(1, 100),
    size=st.integers(1, 300), writes=st.lists(st.integers(1, 9), max_size=5),
)  # fmt: skip
def test_segments_are_all_rows_once_and_of_bounded_size(rows, used, width, chunk, size, writes):
    table = Rings({"a": (rows, width)})
    table.append("a", min(used, rows))
    snapshot = Snapshot(table, chunk)
    for count in writes:
        table.append("a", count)
    segments = snapshot.segments("a", size)
    read = sorted(row for first, count in segments for row in range(first, first + count))
    assert read == list(range(min(used, rows)))
    assert all(count * width <= max(size, chunk, width) for _, count in segments)
    wraps = sum(second[0] != first[0] + first[1] for first, second in pairwise(segments))
    assert wraps <= 1


def test_reading_begins_where_the_table_writes_and_stays_ahead_of_it():
    table = Rings({"a": (1000, 10)})
    table.append("a", 1730)
    snapshot = Snapshot(table, 100)
    table.append("a", 2)
    first = snapshot.segments("a", 200)[0]
    assert first[0] == 730
    most = 0

    def change() -> None:  # eight rows for every ten that are read
        nonlocal most
        table.append("a", 8)
        most = max(most, snapshot.held)

    read(snapshot, change, 200)
    assert most <= 200  # what was written while a chunk was read


def test_one_snapshot_at_a_time():
    table = Rings({"a": (10, 3)})
    table.append("a", 10)
    first = Snapshot(table)
    with pytest.raises(RuntimeError, match="still being read"):
        Snapshot(table)
    assert read(first) == table.copy()
    with Snapshot(table, 6) as second:
        table.append("a", 10)
        assert second.held == 30 and first.held == 0
    assert second.closed and second.held == 0
    third = Snapshot(table)
    assert read(third) == table.copy()


def test_a_hook_that_is_not_a_snapshots_is_left_alone():
    table = Rings({"a": (10, 3)})
    table.before_write = lambda *_: None
    with pytest.raises(RuntimeError, match="still being read"):
        Snapshot(table)


def test_a_closed_snapshot_tells_its_reader_and_holds_nothing():
    table = Rings({"a": (10, 3)})
    table.append("a", 10)
    snapshot = Snapshot(table, 6)
    chunks = snapshot.chunks("a")
    next(chunks)
    table.append("a", 10)
    assert snapshot.held == 24  # without the chunk that was read
    snapshot.close()
    assert snapshot.held == 0
    with pytest.raises(StorageError, match="closed before"):
        next(chunks)
    for attempt in (lambda: snapshot.segments("a", 9), lambda: list(snapshot.chunks("a")), lambda: snapshot.numbers):
        with pytest.raises(StorageError, match="closed before"):
            attempt()
    table.append("a", 10)
    assert snapshot.held == 0


def test_nothing_is_read_twice():
    table = Rings({"a": (10, 3)})
    table.append("a", 10)
    snapshot = Snapshot(table, 6)
    next(snapshot.chunks("a"))
    with pytest.raises(AssertionError, match="read before"):
        next(snapshot.chunks("a"))
    list(snapshot.chunks("a", 2))
    with pytest.raises(StorageError, match="read before"):
        next(snapshot.chunks("a"))


def test_a_snapshot_that_would_hold_too_much_is_given_up_and_the_table_goes_on():
    table = Rings({"a": (100, 10)})
    table.append("a", 100)
    snapshot = Snapshot(table, 100, most_held=300)
    chunks = snapshot.chunks("a", 90)
    table.append("a", 30)
    assert snapshot.held == 300 and not snapshot.closed
    table.append("a", 1)
    assert snapshot.held == 0 and snapshot.closed
    with pytest.raises(StorageError, match="too slow"):
        next(chunks)
    table.append("a", 200)
    assert read(Snapshot(table, 100)) == table.copy()


def test_when_there_is_no_memory_left_the_snapshot_is_given_up_and_not_the_run(monkeypatch):
    def old(part, rows):
        raise MemoryError

    table = Rings({"a": (100, 10)})
    table.append("a", 100)
    snapshot = Snapshot(table, 100)
    monkeypatch.setattr(_Part, "old", old)
    table.append("a", 1)
    with pytest.raises(StorageError, match="no memory left"):
        next(snapshot.chunks("a"))


def peak(work) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_taking_one_copies_no_bulk_memory_and_reading_one_chunk_at_a_time():
    table = Rings({"a": (4096, 8192)})  # 32 MiB
    table.head["a"] = 4096
    taken = []
    assert peak(lambda: taken.append(Snapshot(table))) < 1 << 20
    assert peak(lambda: sum(len(chunk) for chunk in taken[0].chunks("a"))) < CHUNK + (1 << 20)
    assert taken[0].closed


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("remover", REMOVERS)
def test_taking_one_of_a_replay_table_copies_nothing_that_grows_with_it(sampler, remover, compress):
    """It is taken under the lock that everybody waits for."""
    spec = VECTOR if remover == "inverse" else STACKED
    memory = {"capacity": 200_000, "sampler": sampler, "remover": remover, "compress": compress}
    maker = Maker(spec, replay(**memory), 4000, 4000, 0, [0], 9)
    table, taken = ReplayMemory(maker.plan, maker.shapes, spec, 1, 0), []
    for _ in range(5):
        table.insert(maker.make(4000, 4000)[0], 0)
    whole = sum(vector.nbytes for vector in table.vectors().values())
    assert whole > 3_000_000
    assert peak(lambda: taken.append(Snapshot(table))) < 60_000
    vectors = taken[0].vectors()
    assert sum(vector.nbytes for vector in vectors.values()) == whole
    assert all(np.array_equal(vector, vectors[path]) for path, vector in table.vectors().items())


def test_one_row_of_a_chunk_costs_one_row():
    """Where rows are overwritten in any order, whole chunks would soon be the whole memory."""
    table = Rings({"a": (1000, 10)}, vectors={"v": 1000})
    table.append("a", 1000)
    snapshot = Snapshot(table, 1000)
    table.overwrite("a", np.arange(0, 1000, 100))
    assert snapshot.held == 10 * (10 + 8)  # a row, and its number
    table.overwrite("v", np.array([5, 7]))
    assert snapshot.held == 10 * (10 + 8) + 2 * (8 + 8)


def test_what_many_small_notes_take_counts_too(monkeypatch):
    monkeypatch.setattr(snapshots, "NOTE", 300)
    table = Rings({"a": (10_000, 10)}, vectors={"v": 1000})
    table.append("a", 10_000)
    taken = [Snapshot(table)]

    def write() -> None:
        for _ in range(1000):
            table.append("a", 1)
            table.overwrite("v", table.rng.integers(0, 1000, 3))

    real = peak(write)
    assert 0.7 * real < taken[0].held < 1.5 * real


def test_packed_rows_are_held_as_they_are():
    table = Rings({"p": (50, 10)}, packed="p")
    table.append("p", 50)
    assert table.memory["p"].bytes == sum(map(len, table.memory["p"][:50]))
    first = sum(map(len, table.memory["p"][:3]))
    snapshot = Snapshot(table, 100)
    assert snapshot.bytes == table.memory["p"].bytes and snapshot.packed == {"p": snapshot.bytes}
    table.append("p", 3)
    assert snapshot.held == first
    sizes = [sum(map(len, chunk)) for chunk in snapshot.chunks("p")]
    assert sum(sizes) == snapshot.bytes and len(sizes) > 2 and snapshot.held == 0


def test_a_snapshot_that_was_given_up_has_no_vectors_either():
    table = Rings({"a": (100, 10)}, vectors={"v": 100})
    table.append("a", 100)
    snapshot = Snapshot(table, 100, most_held=300)
    table.append("a", 40)
    assert snapshot.closed
    with pytest.raises(StorageError, match="too slow"):
        snapshot.vectors()


def test_vectors_are_read_once():
    table = Rings({"a": (10, 3)}, vectors={"v": 4})
    table.append("a", 10)
    snapshot = Snapshot(table)
    snapshot.vectors()
    with pytest.raises(StorageError, match="all of v was read before"):
        snapshot.vectors()


def test_how_much_may_be_held():
    assert allowance(1000) == 64 << 20 and allowance(160 << 30) == 10 << 30


def test_reading_in_another_thread_is_exact_while_the_table_writes():
    table = Rings({"a": (3000, 11), "b": (500, 1000), "p": (900, 50)}, packed="p", vectors={"v": 5000})
    table.append("a", 4000)
    table.append("b", 400)
    table.append("p", 1000)
    held = 0
    for chunk in (1000, 3001, 20_000, 100_000):
        expected = table.copy()
        snapshot = Snapshot(table, chunk)
        results, changes = [], threading.Semaphore(0)

        def work(snapshot=snapshot, results=results, changes=changes) -> None:
            results.append(read(snapshot, lambda: changes.acquire(timeout=60), 50_000))  # a change for every chunk

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        while thread.is_alive():
            table.append("a", 7)
            table.append("b", 3)
            table.overwrite("b", table.rng.integers(0, 400, 9))
            table.append("p", 2)
            table.overwrite("v", table.rng.integers(0, 5000, 300))
            held += snapshot.held
            changes.release()
        assert results == [expected]
    assert held > 0
