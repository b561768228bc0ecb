"""A snapshot is the memory as of one moment, whatever the table does while it is read."""

import threading
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rookery.errors import StorageError
from rookery.replay.snapshot import CHUNK, Snapshot, _Array


class Rings:
    """The least that can be saved: rings of random bytes, and a state. name -> (rows, bytes of a row)."""

    def __init__(self, shapes: dict[str, tuple[int, int]], seed: int = 0):
        self.rng = np.random.default_rng(seed)
        self.before_write = None
        self.memory = {name: np.zeros(shape, np.uint8) for name, shape in shapes.items()}
        self.head = dict.fromkeys(shapes, 0)

    def arrays(self):
        return dict(self.memory)

    def used(self):
        return {name: min(self.head[name], len(memory)) for name, memory in self.memory.items()}

    def state(self):
        return {"head": dict(self.head), "array": np.arange(5) + sum(self.head.values())}

    def overwrite(self, name: str, first: int, count: int) -> None:
        if self.before_write is not None:
            self.before_write(name, first, count)
        self.memory[name][first : first + count] = self.rng.integers(0, 256, (count, self.memory[name].shape[1]))

    def append(self, name: str, count: int = 1) -> None:
        while count:
            rows = len(self.memory[name])
            here = self.head[name] % rows
            now = min(count, rows - here)
            self.overwrite(name, here, now)
            self.head[name], count = self.head[name] + now, count - now

    def copy(self) -> dict[str, bytes]:
        return {name: self.memory[name][:used].tobytes() for name, used in self.used().items()}


def read(snapshot: Snapshot, between=lambda: None, size: int = 60) -> dict[str, bytes]:
    """Everything, as a reader on disk would have it, put in order."""
    result = {}
    for name, (_, used, width) in snapshot.shapes.items():
        rows = np.zeros((used, width), np.uint8)
        for first, count in snapshot.segments(name, size):
            at = first
            for chunk in snapshot.chunks(name, first, count):
                between()
                rows[at : at + len(chunk)] = chunk
                at += len(chunk)
            assert at == first + count
        result[name] = rows.tobytes()
    return result


ACTS = st.one_of(
    st.tuples(st.just("append"), st.sampled_from("ab"), st.integers(1, 30)),
    st.tuples(st.just("overwrite"), st.sampled_from("ab"), st.floats(0, 1), st.integers(1, 4)),  # as "inverse" does
    st.tuples(st.just("read"), st.integers(1, 5)),
)


@settings(max_examples=300, deadline=None)
@given(
    fill=st.tuples(st.integers(0, 60), st.integers(0, 60)),
    chunk=st.integers(1, 90),
    size=st.integers(1, 200),
    acts=st.lists(ACTS, max_size=30),
)
def test_what_is_read_is_what_was_there(fill, chunk, size, acts):
    table = Rings({"a": (20, 7), "b": (33, 10)})
    table.append("a", fill[0])
    table.append("b", fill[1])
    expected, state = table.copy(), table.state()
    snapshot, acts = Snapshot(table, chunk), iter([*acts, None])

    def change() -> None:
        """The table goes on until it is time to read."""
        for act in acts:
            match act:
                case ("append", name, count):
                    table.append(name, count)
                case ("overwrite", name, where, count):
                    rows = len(table.memory[name])
                    first = int(where * (rows - 1))
                    table.overwrite(name, first, min(count, rows - first))
                case ("read", _) | None:
                    return

    change()
    assert read(snapshot, change, size) == expected
    assert snapshot.state["head"] == state["head"] and np.array_equal(snapshot.state["array"], state["array"])
    assert snapshot.closed and snapshot.held == 0


def test_only_what_is_overwritten_is_held_and_only_until_it_is_read():
    table = Rings({"a": (40, 10)})
    table.append("a", 40)
    snapshot = Snapshot(table, 100)  # four chunks of ten rows
    assert snapshot.held == 0 and snapshot.bytes == 400
    table.append("a", 3)
    table.append("a", 4)
    assert snapshot.held == 100  # rows 0 to 6: one chunk, once
    table.append("a", 5)
    assert snapshot.held == 200  # up to row 11
    chunks = snapshot.chunks("a")
    next(chunks)
    assert snapshot.held == 100
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
    assert snapshot.held == 10  # the last chunk was not full: row 6 is in it
    assert snapshot.segments("none", 10) == [] == list(snapshot.chunks("none"))
    assert sum(len(chunk) for chunk in snapshot.chunks("a")) == 7
    assert snapshot.segments("none", 10) == [] == list(snapshot.chunks("none"))


def test_an_empty_memory_is_read_at_once():
    table = Rings({"a": (10, 3), "b": (10, 3)})
    snapshot = Snapshot(table)
    assert snapshot.closed and read(snapshot) == {"a": b"", "b": b""} and snapshot.state["head"] == {"a": 0, "b": 0}
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
    assert most <= 200  # the chunk under way when the reading began, and the next


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
    assert snapshot.held == 24
    snapshot.close()
    assert snapshot.held == 0
    with pytest.raises(StorageError, match="closed before"):
        next(chunks)
    for attempt in (lambda: snapshot.segments("a", 9), lambda: list(snapshot.chunks("a")), lambda: snapshot.state):
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
    class Poor(np.ndarray):
        def copy(self, order="C"):
            raise MemoryError

    table = Rings({"a": (100, 10)})
    table.append("a", 100)
    snapshot = Snapshot(table, 100)
    rows = _Array.chunk
    monkeypatch.setattr(_Array, "chunk", lambda self, number: rows(self, number).view(Poor))
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


def test_reading_in_another_thread_is_exact_while_the_table_writes():
    table = Rings({"a": (3000, 11), "b": (500, 1000)})
    table.append("a", 4000)
    table.append("b", 400)
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
            table.overwrite("b", int(table.rng.integers(490)), 9)
            held += snapshot.held
            changes.release()
        assert results == [expected]
    assert held > 0
