import gc
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from support_descriptors import descriptors

from rookery.core.errors import StorageError
from rookery.core.machine import Machine
from rookery.pipes import shm
from rookery.pipes.shm import LINE, Layout, Pulse, Segment, Slots, WeightBoard

SUPPORT = Path(__file__).parents[1] / "support"


def run_python(*arguments, **options):
    paths = [str(SUPPORT), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, *arguments], env=environment, **options)


@pytest.fixture
def anonymous_file_without_memfd(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")


# Segments


def test_a_segment_is_zeros_and_shared_through_its_descriptor():
    first = Segment.create(10_000, "test")
    second = Segment.attach(os.dup(first.fd), 10_000)
    view = second.array((10_000,), "uint8")
    assert not view.any()
    first.array((10,), "int64", 64)[3] = 42
    assert second.array((10,), "int64", 64)[3] == 42


def test_the_fallback_file_works_alike_and_has_no_name(anonymous_file_without_memfd, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    segment = Segment.create(10_000, "test")
    segment.array((10_000,), "uint8")[:] = 1
    assert Segment.attach(os.dup(segment.fd), 10_000).array((10_000,), "uint8").all()
    assert list(tmp_path.iterdir()) == []


def test_memory_is_private_and_has_no_name():
    before = set(os.listdir("/dev/shm"))
    segment = Segment.create(4096, "test")
    assert os.fstat(segment.fd).st_mode & 0o777 == 0o600
    assert os.fstat(segment.fd).st_nlink == 0
    assert set(os.listdir("/dev/shm")) == before
    assert not os.get_inheritable(segment.fd)


def test_all_pages_exist_from_the_start():
    size = 64 * 4096
    assert os.fstat(Segment.create(size, "test").fd).st_blocks * 512 >= size


def test_nobody_can_shrink_it():
    segment = Segment.create(8192, "test")
    with pytest.raises(PermissionError):
        os.ftruncate(segment.fd, 0)


def test_children_may_be_started_before_the_size_is_known():
    segment = Segment.reserve("test")
    fd = os.dup(segment.fd)
    segment.allocate(4096)
    segment.array((4096,), "uint8")[:] = 9
    assert (Segment.attach(fd, 4096).array((4096,), "uint8") == 9).all()
    with pytest.raises(ValueError, match="is 4096"):
        segment.allocate(8192)


def test_closing_leaves_arrays_usable_and_gives_the_memory_back_with_the_last(monkeypatch):
    before = descriptors()
    segment = Segment.create(1 << 20, "closing-test")
    array = segment.array((1 << 17,), "int64")
    words = segment.words("q", 8)
    segment.close()
    segment.close()
    array[:] = 5
    assert words[0] == 5
    assert "rookery-closing-test" in Path("/proc/self/maps").read_text()
    del array, words
    gc.collect()
    assert "rookery-closing-test" not in Path("/proc/self/maps").read_text()
    assert descriptors() == before
    with pytest.raises(ValueError, match="closed"):
        segment.array((1,), "int64")


def test_a_size_that_does_not_fit_is_refused_before_anything_is_allocated(tmp_path, monkeypatch):
    (tmp_path / "meminfo").write_text("MemAvailable: 1048576 kB\n")
    monkeypatch.setattr(shm, "_allocate", lambda fd, size: pytest.fail("allocated"))
    with pytest.raises(
        StorageError, match=r"shared memory for unrolls: need 10\.0 GiB, have 1\.0 GiB .* use fewer"
    ) as e:
        Segment.create(10 << 30, "unrolls", Machine(tmp_path, tmp_path / "none"))
    assert e.value.exit_code == 7


def test_ten_times_the_memory_of_this_machine_is_refused():
    have, _ = Machine().memory()
    with pytest.raises(StorageError, match=r"need .* have "):
        Segment.create(10 * have, "replay")


@pytest.mark.parametrize("limit", ["RLIMIT_FSIZE", "RLIMIT_AS"])
def test_a_limit_of_the_system_is_a_storage_error_and_not_a_signal(limit):
    script = f"""
import resource
from rookery.core.errors import StorageError
from rookery.pipes.shm import Segment
resource.setrlimit(resource.{limit}, ({1 << 30 if limit == "RLIMIT_AS" else 1 << 20}, -1))
try:
    Segment.create(1 << 31, "unrolls")
except StorageError as error:
    print(error)
"""
    process = run_python("-c", script, stdout=subprocess.PIPE, text=True)
    out, _ = process.communicate()
    assert process.returncode == 0
    why = "have " if limit == "RLIMIT_AS" else "the system refuses"  # the one is known beforehand
    assert out.startswith(f"shared memory for unrolls: need 2.0 GiB, {why}")


def test_views_outside_the_segment_are_refused():
    segment = Segment.create(4096, "test")
    for shape, offset in (((4097,), 0), ((1,), 4096), ((1,), -1)):
        with pytest.raises(ValueError, match="does not fit"):
            segment.array(shape, "uint8", offset)
    with pytest.raises(ValueError, match="do not fit"):
        segment.words("q", 513)
    with pytest.raises(ValueError, match="not of 8192"):
        Segment.attach(os.dup(segment.fd), 8192)
    with pytest.raises(ValueError):
        Segment.create(0, "test")


# Slots

SHAPES = {
    "frames": ((3, 2, 5, 5), "uint8"),
    "reward": ((3, 2), "float32"),
    "action": ((3, 2), "int64"),
    "live": ((3, 2), "bool"),
    "empty": ((0, 2), "float32"),
}


@pytest.fixture
def slots():
    layout = Slots.layout(SHAPES, 3)
    return Slots(Segment.create(layout.size, "slots"), layout)


def test_arrays_are_aligned_and_never_overlap(slots):
    seen = set()
    for i in range(3):
        for name, (shape, dtype) in SHAPES.items():
            array = slots.arrays(i)[name]
            assert array.shape == shape and array.dtype == dtype
            start = array.ctypes.data
            assert array.size == 0 or start % LINE == 0
            places = set(range(start, start + array.nbytes))
            assert not places & seen
            seen |= places


def test_filling_every_array_leaves_the_headers_alone(slots):
    for i in range(3):
        slots.begin(i, i, 0, 1, 2)
    for i in range(3):
        for array in slots.arrays(i).values():
            array.reshape(-1).view(np.uint8)[...] = 255
    for i in range(3):
        assert slots.stamp(i) == (Slots.WRITING, i, 0, 1, 2, 0)


def test_a_layout_travels_in_a_message_and_finds_the_same_memory():
    layout = Slots.layout(SHAPES, 3)
    arrived = msgspec.msgpack.decode(msgspec.msgpack.encode({"layout": layout}))["layout"]
    segment = Segment.create(layout.size, "slots")
    here, there = Slots(segment, layout), Slots(Segment.attach(os.dup(segment.fd), layout.size), arrived)
    assert msgspec.convert(arrived, Layout) == layout
    for name, array in here.arrays(2).items():
        array[...] = 1
        assert (there.arrays(2)[name] == 1).all()
    here.begin(2, 7, 1, 4, 9)
    here.progress(2, 3)
    assert there.rows(2) == 3
    here.finish(2)
    assert there.valid(2, 7, 1, 4)
    assert there.stamp(2) == (Slots.FULL, 7, 1, 4, 9, 3)


def test_only_the_announced_and_finished_content_is_valid(slots):
    assert not slots.valid(0, 0, 0, 0)  # never written: all stamps are zero
    slots.begin(0, actor=2, incarnation=1, sequence=5, version=8)
    assert not slots.valid(0, 2, 1, 5)  # half-written
    slots.finish(0)
    assert slots.valid(0, 2, 1, 5)
    for other in ((1, 1, 5), (2, 0, 5), (2, 2, 5), (2, 1, 4), (2, 1, 6)):
        assert not slots.valid(0, *other)
    slots.release(0)
    assert not slots.valid(0, 2, 1, 5)


def test_a_new_begin_takes_validity_and_progress_away(slots):
    slots.begin(1, 0, 0, 0, 0)
    slots.progress(1, 17)
    slots.finish(1)
    slots.begin(1, 0, 0, 0, 0)
    assert not slots.valid(1, 0, 0, 0)
    assert slots.rows(1) == 0


def test_an_owner_that_dies_before_it_begins_has_written_nothing(slots):
    slots.begin(1, 0, 0, 0, 0)
    slots.progress(1, 17)
    slots.finish(1)
    slots.release(1)
    assert slots.rows(1) == 0


def test_poison_shows_in_every_kind_of_array_and_only_in_that_slot(slots):
    for i in (0, 1):
        for array in slots.arrays(i).values():
            array[...] = 0
    slots.release(0, poison=True)
    poisoned = slots.arrays(0)
    assert np.isnan(poisoned["reward"]).all()
    assert (poisoned["frames"] == 0xA5).all()
    assert (poisoned["action"].view(np.uint64) == 0xA5A5A5A5A5A5A5A5).all()
    assert poisoned["live"].all()
    assert not any(array.any() for array in slots.arrays(1).values())
    assert slots.stamp(0).state == Slots.FREE


def test_impossible_layouts_are_refused():
    with pytest.raises(ValueError, match="obs: Python objects"):
        Slots.layout({"obs": ((2,), "object")}, 1)
    with pytest.raises(ValueError, match="at least one slot"):
        Slots.layout(SHAPES, 0)
    layout = Slots.layout(SHAPES, 2)
    with pytest.raises(ValueError, match="fit"):
        Slots(Segment.create(layout.size - 1, "slots"), layout)


# Weights


def board(floats):
    return WeightBoard(Segment.create(WeightBoard.size(floats), "weights"))


def test_weights_are_pulled_as_published():
    weights, into = board(5), np.zeros(5, np.float32)
    assert weights.version() == -1
    assert weights.pull(into) == -1 and not into.any()
    for version in (0, 1, 7):
        weights.publish(np.full(5, version + 0.5, np.float32), version)
        assert weights.version() == version
        assert weights.pull(into) == version
        assert (into == version + 0.5).all()


def test_nothing_newer_leaves_the_vector_alone():
    weights, into = board(3), np.zeros(3, np.float32)
    weights.publish(np.ones(3, np.float32), 4)
    assert weights.pull(into, newer_than=4) == 4
    assert not into.any()
    assert weights.pull(into, newer_than=3) == 4
    assert into.all()


def test_versions_only_grow_and_shapes_stay():
    weights = board(3)
    weights.publish(np.ones(3, np.float32), 4)
    for version in (4, 3):
        with pytest.raises(ValueError, match="does not follow version 4"):
            weights.publish(np.ones(3, np.float32), version)
    for wrong in (np.ones(4, np.float32), np.ones(3), np.ones((3, 1), np.float32)):
        with pytest.raises(ValueError, match=r"float32\[3\]"):
            weights.publish(wrong, 5)
        with pytest.raises(ValueError, match=r"float32\[3\]"):
            weights.pull(wrong)


def test_a_board_that_takes_the_whole_segment_learns_its_length_from_the_first_vector():
    segment = Segment.create(WeightBoard.size(21), "weights")
    writer, reader = WeightBoard(segment), WeightBoard(segment)
    writer.publish(np.arange(21, dtype=np.float32), 0)
    into = np.zeros(21, np.float32)
    assert reader.pull(into) == 0 and into.tolist() == list(range(21))
    with pytest.raises(ValueError, match=r"float32\[21\]"):
        writer.publish(np.zeros(20, np.float32), 1)
    with pytest.raises(ValueError):
        WeightBoard(Segment.create(WeightBoard.size(21), "weights")).publish(np.zeros(99, np.float32), 0)


def test_a_writer_that_dies_in_the_middle_leaves_the_last_whole_vector(monkeypatch):
    weights, into = board(1000), np.zeros(1000, np.float32)
    weights.publish(np.full(1000, 3, np.float32), 3)

    def die_halfway(target, vector):
        target[:500] = vector[:500]
        raise KeyboardInterrupt

    for _ in range(3):  # a replacement that dies too
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(shm.np, "copyto", die_halfway)
            weights.publish(np.full(1000, 4, np.float32), 4)
        assert weights.version() == 3
        assert weights.pull(into) == 3
        assert (into == 3).all()
    weights.publish(np.full(1000, 5, np.float32), 5)
    assert weights.pull(into) == 5 and (into == 5).all()


def test_a_reader_that_is_overtaken_copies_again(monkeypatch):
    weights, into = board(10), np.zeros(10, np.float32)
    weights.publish(np.full(10, 1, np.float32), 1)
    copy, overtaken = np.copyto, []

    def slow_copy(target, source):
        copy(target, source)
        if target is into and not overtaken:  # meanwhile the writer comes round to the same side
            overtaken.append(True)
            for version in (2, 3):
                weights.publish(np.full(10, version, np.float32), version)

    monkeypatch.setattr(shm.np, "copyto", slow_copy)
    assert weights.pull(into) == 3
    assert (into == 3).all()


def test_a_reader_that_is_always_overtaken_gives_up(monkeypatch):
    weights, into = board(10), np.zeros(10, np.float32)
    weights.publish(np.zeros(10, np.float32), 0)
    copy = np.copyto

    def slow_copy(target, source):
        copy(target, source)
        if target is into:
            for _ in range(2):
                weights.publish(np.zeros(10, np.float32), weights.version() + 1)

    monkeypatch.setattr(shm.np, "copyto", slow_copy)
    with pytest.raises(TimeoutError, match="overwritten"):
        weights.pull(into, timeout=0.0)


def test_another_process_rewriting_without_pause_is_never_read_torn():
    floats, writes, reads = 20_000, 20_000, 2_000
    segments = Segment.create(WeightBoard.size(floats), "weights"), Segment.create(Pulse.size(1), "pulse")
    weights, pulse = WeightBoard(segments[0]), Pulse(segments[1])
    fds = [segment.fd for segment in segments]
    writer = run_python("-m", "board_writer", *map(str, (*fds, floats, writes)), pass_fds=fds)
    into = np.empty(floats, np.float32)
    last, pulled = -1, 0
    try:
        while pulled < reads or last < writes - 1:
            version = weights.pull(into, newer_than=last)
            if version == last:
                assert writer.poll() is None, "the writer ended early"
                continue
            assert version > last
            assert into[0] == version
            assert (into == version).all()
            last, pulled = version, pulled + 1
            if pulled == reads:
                pulse.beat(0, 1)
        assert writer.wait(60) == 0
    finally:
        writer.kill()
        writer.wait(60)
    assert weights.version() >= writes - 1


# Heartbeats


def test_a_beat_is_seen_by_all_and_touches_nobody_else():
    segment = Segment.create(Pulse.size(3), "pulse")
    ours, theirs = Pulse(segment), Pulse(Segment.attach(os.dup(segment.fd), segment.size))
    assert theirs.last(1) == (0.0, 0)
    ours.beat(1, 12)
    first, steps = theirs.last(1)
    assert steps == 12 and first > 0
    ours.beat(1)
    second, steps = theirs.last(1)
    assert steps == 12 and second >= first
    assert theirs.age(1) >= 0
    assert theirs.last(0) == theirs.last(2) == (0.0, 0)


def test_the_clock_is_the_same_in_another_process():
    segment = Segment.create(Pulse.size(1), "pulse")
    ours = Pulse(segment)
    ours.beat(0)
    before, _ = ours.last(0)
    script = "import sys; from rookery.pipes.shm import *; Pulse(Segment.attach(int(sys.argv[1]), 64)).beat(0, 5)"
    assert run_python("-c", script, str(segment.fd), pass_fds=[segment.fd]).wait(60) == 0
    theirs, steps = ours.last(0)
    ours.beat(0)
    after, _ = ours.last(0)
    assert before <= theirs <= after and steps == 5
