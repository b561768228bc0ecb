"""A saved replay memory is complete or absent, exact as of its moment, and never stops or endangers the run."""

import functools
import os
import pickletools
import shutil
import stat
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import torch
from support_replay_file import CASES, Life, contents, same
from test_checkpoint import Crash, Unreliable, names

from rookery.core.errors import CheckpointError, StorageError
from rookery.storage import replay_file
from rookery.storage.files import TENSORS, FileLayer
from rookery.storage.replay_writer import Writer
from rookery.tables.ring import Packed
from rookery.tables.snapshot import Snapshot


@pytest.fixture(autouse=True)
def small_segments(monkeypatch):
    monkeypatch.setattr(replay_file, "SEGMENT", 600)
    monkeypatch.setattr(os, "fsync", lambda _: None)  # thousands of files, and nobody pulls the plug


def save(folder: Path, steps: int, table, chunk: int = 200, **options) -> Path:
    return replay_file.save(folder, steps, Snapshot(table, chunk), **options)


# What is saved is loaded


@pytest.mark.parametrize("parcels", [0, 1, 6, 80])
@pytest.mark.parametrize("case", CASES)
def test_a_loaded_memory_goes_on_as_the_saved_one_would_have(tmp_path, case, parcels):
    life = Life(case, parcels)
    before = contents(life.table)
    path = save(tmp_path / "run" / "replay", 123456, life.table)
    assert path == tmp_path / "run" / "replay" / "step-000000123456"
    loaded = life.empty()
    assert replay_file.load(path, loaded) == 123456
    assert same(contents(loaded), before) and same(contents(life.table), before)
    future = life.parcels(30)
    there, here = life.play(life.table, future), life.play(loaded, future)
    assert len(here) > 100 and len(here) == len(there) and all(map(same, here, there))
    assert loaded.stats() == life.table.stats() and same(contents(loaded), contents(life.table))


def test_several_rings_are_stored_side_by_side_in_segments_of_bounded_size(tmp_path):
    life = Life("mixed", 80)
    path = save(tmp_path, 1, life.table)
    segments = sorted(path.glob("rows-*"))
    assert len(segments) > 12 and all(file.stat().st_size <= 600 + 300 for file in segments)
    whole = {name: np.zeros_like(array) for name, array in life.table.arrays().items()}
    assert set(whole) == {"records", "frames/eye", "frames/map"}
    for file in segments:  # as any program that knows the format would read them
        with safetensors.safe_open(file, "np") as opened:
            (name,) = opened.keys()
            first, rows = int(opened.metadata()["first"]), opened.get_tensor(name)
        whole[name][first : first + len(rows)] = rows
    assert same(whole, life.table.arrays())
    stored = safetensors.numpy.load_file(path / TENSORS)
    assert any(np.array_equal(life.table.store.ids, array) for array in stored.values())


def test_a_segment_begins_with_a_header_of_whole_words(tmp_path):
    for file in save(tmp_path, 1, Life("mixed", 40).table).glob("*.safetensors"):
        assert int.from_bytes(file.read_bytes()[:8], "little") % 8 == 0


def test_every_kind_of_array_in_the_state_is_stored(tmp_path):
    state = {str(kind): np.arange(3).astype(kind) for kind in ("bool", "u1", "i2", "i4", "i8", "f2", "f4", "f8", "u8")}
    state |= {"none": np.zeros((0, 4)), "scalar": np.array(3.5), "torch": torch.arange(4.0)}
    state |= {"big": 2**80, "nan": float("nan"), "text": "é", "nothing": None, "bytes": b"\0\1", "pair": (1, [2.5])}

    class Odd:
        before_write, loaded = None, None

        def arrays(self):
            return {"a": np.zeros((4, 0), np.uint8), "b": np.full((4, 3), 7, np.uint8)}

        def used(self):
            return {"a": 4, "b": 3}

        def vectors(self):
            return {}

        def numbers(self):
            return state

        state = numbers

        def check_state(self, loaded, used):
            assert used == self.used()

        def load(self, loaded):
            self.loaded = loaded

        def check_records(self):
            assert self.loaded is not None

    table = Odd()
    replay_file.load(save(tmp_path, 1, table), table)
    assert np.isnan(table.loaded.pop("nan")) and torch.equal(table.loaded.pop("torch"), state["torch"])
    assert same(table.loaded, {key: value for key, value in state.items() if key not in ("nan", "torch")})
    state["complex"] = np.zeros(2, np.complex64)
    with pytest.raises(CheckpointError, match="complex64"):
        save(tmp_path, 2, table)
    assert names(tmp_path) == ["step-000000000001"]


def test_others_can_neither_read_nor_write_it_and_it_is_no_pickle(tmp_path):
    path = save(tmp_path / "replay", 1, Life("mixed", 20).table)
    assert {stat.S_IMODE(place.stat().st_mode) for place in (path, path.parent)} == {0o700}
    for file in path.iterdir():
        blob = file.read_bytes()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600 and not blob.startswith((b"\x80", b"PK"))
        with pytest.raises(ValueError):
            list(pickletools.genops(blob))


def test_saving_and_loading_take_the_memory_of_a_few_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(replay_file, "SEGMENT", 16 << 20)
    life = Life("uniform", 20)
    big = np.random.default_rng(0).integers(0, 256, (12_000, 4096), np.uint8)  # 47 MiB
    arrays, used = life.table.arrays, life.table.used
    life.table.arrays, life.table.used = lambda: arrays() | {"big": big}, lambda: used() | {"big": len(big)}
    tracemalloc.start()
    try:
        path = replay_file.save(tmp_path, 1, Snapshot(life.table))
        big_before, big[:] = big[::1000].copy(), 0
        replay_file.load(path, life.table)
        assert tracemalloc.get_traced_memory()[1] < 14 << 20
    finally:
        tracemalloc.stop()
    assert np.array_equal(big[::1000], big_before) and len(list(path.glob("rows-*"))) == 4


class Frames:
    """A table of nothing but packed rows that cannot be packed."""

    def __init__(self, rows: int, width: int):
        self.before_write, self.packed = None, Packed(rows, width)

    def arrays(self):
        return {"frames": self.packed}

    def used(self):
        return {"frames": self.packed.shape[0]}

    def vectors(self):
        return {}

    def numbers(self):
        return {"n": 1}

    state = numbers

    def check_state(self, state, used):
        assert used == self.used()

    def load(self, state):
        assert state == {"n": 1}

    def check_records(self):
        pass


def test_packed_rows_are_saved_and_loaded_in_pieces(tmp_path, monkeypatch):
    """Of 48 MB nothing is joined but a few megabytes at a time."""
    monkeypatch.setattr(replay_file, "SEGMENT", 256 << 20)
    monkeypatch.setattr(replay_file, "PACKED_SEGMENT", 8 << 20)
    table, loaded = Frames(6000, 9000), Frames(6000, 9000)
    rng = np.random.default_rng(0)
    table.packed[:] = [rng.bytes(int(size)) for size in rng.integers(7000, 9000, 6000)]
    tracemalloc.start()
    try:
        path = replay_file.save(tmp_path, 1, Snapshot(table))
        assert tracemalloc.get_traced_memory()[1] < 12 << 20
        tracemalloc.clear_traces()
        replay_file.load(path, loaded)
        assert tracemalloc.get_traced_memory()[1] < loaded.packed.bytes + (12 << 20)
    finally:
        tracemalloc.stop()
    assert loaded.packed[:] == table.packed[:] and loaded.packed.bytes == table.packed.bytes
    files = list(path.glob("rows-*"))
    assert len(files) >= 5 and all(file.stat().st_size < 10 << 20 for file in files)
    with safetensors.safe_open(sorted(files)[0], "np") as opened:  # as any program that knows the format would read it
        first, sizes, rows = int(opened.metadata()["first"]), opened.get_tensor("sizes"), opened.get_tensor("frames")
    assert rows[: sizes[0]].tobytes() == table.packed[first] and len(rows) == sizes.sum()


# Saving beside a run


class Gate(FileLayer):
    """Every piece written waits for a permit: the disk is as slow as a test wants it."""

    def __init__(self):
        self.permits, self.waiting = threading.Semaphore(0), threading.Event()

    def append(self, path, data):
        self.waiting.set()
        assert self.permits.acquire(timeout=60)
        super().append(path, data)

    def open(self):
        for _ in range(100_000):
            self.permits.release()


@pytest.mark.parametrize("case", CASES)
def test_a_memory_saved_while_it_changes_is_that_of_the_moment(tmp_path, case):
    life = Life(case, 60)
    before, future = contents(life.table), life.parcels(40)
    there = life.play(Life(case, 60).table, future)
    gate = Gate()
    writer = Writer(gate)
    snapshot = Snapshot(life.table, 200)
    assert writer.start(tmp_path, 7, snapshot) and writer.busy
    assert gate.waiting.wait(60)
    here, held = [], 0
    for parcel in future:
        here += life.play(life.table, [parcel])  # inserts, draws and new priorities, while the thread reads
        held = max(held, snapshot.held)
        gate.permits.release()
    gate.open()
    assert writer.join(60) and writer.poll() is None and not writer.busy
    assert all(map(same, here, there))  # being saved changes nothing
    assert held > 0 and snapshot.held == 0
    loaded = life.empty()
    replay_file.load(tmp_path / "step-000000000007", loaded)
    assert same(contents(loaded), before) and not same(contents(life.table), before)
    assert all(map(same, life.play(loaded, future), there))


def test_a_thread_that_reads_at_full_speed_is_exact_too(tmp_path):
    life = Life("mixed", 60)
    writer = Writer()
    for steps in range(1, 6):
        before = contents(life.table)
        writer.start(tmp_path, steps, Snapshot(life.table, 100))
        while writer.busy:
            life.play(life.table, life.parcels(1))
        assert writer.join(60) and writer.poll() is None
        loaded = life.empty()
        replay_file.load(replay_file.find(tmp_path, steps), loaded)
        assert same(contents(loaded), before)
    assert names(tmp_path) == ["step-000000000005"]


def test_one_is_saved_at_a_time(tmp_path):
    life, other = Life("uniform", 20), Life("uniform", 20)
    gate = Gate()
    writer = Writer(gate)
    assert not writer.busy and writer.join(0) and writer.poll() is None
    first, second = Snapshot(life.table, 200), Snapshot(other.table)
    assert writer.start(tmp_path, 1, first)
    assert not writer.start(tmp_path, 2, second) and second.closed  # and nobody keeps it by mistake
    assert not writer.start(tmp_path, 2, first) and not first.closed
    assert not writer.join(0.001) and writer.busy  # every wait ends
    gate.open()
    assert writer.join(60) and names(tmp_path) == ["step-000000000001"]
    assert writer.start(tmp_path, 3, Snapshot(life.table)) and writer.join(60)
    assert names(tmp_path) == ["step-000000000003"] and writer.poll() is None


def test_a_save_whose_snapshot_is_closed_fails_and_leaves_the_last_one(tmp_path):
    life, gate = Life("uniform", 40), Gate()
    save(tmp_path, 1, life.table)
    writer, snapshot = Writer(gate), Snapshot(life.table, 200)
    writer.start(tmp_path, 2, snapshot)
    assert gate.waiting.wait(60)
    snapshot.close()
    gate.open()
    assert writer.join(60) and "closed before" in str(writer.poll()) and writer.poll() is None
    assert names(tmp_path) == ["step-000000000001"]
    assert writer.start(tmp_path, 3, Snapshot(life.table)) and writer.join(60) and writer.poll() is None


@pytest.mark.parametrize("error, words", [(OSError(28, "No space left"), "No space"), (ZeroDivisionError("x"), "Zero")])
def test_whatever_goes_wrong_is_told_once_and_the_next_save_works(tmp_path, monkeypatch, error, words):
    life = Life("uniform", 40)
    writer = Writer()
    with monkeypatch.context() as patch:
        patch.setattr(FileLayer, "append", lambda *_: (_ for _ in ()).throw(error))
        snapshot = Snapshot(life.table)
        assert writer.start(tmp_path, 2, snapshot) and writer.join(60)
    told = writer.poll()
    assert isinstance(told, StorageError) and words in str(told) and told.exit_code == 7
    assert writer.poll() is None and snapshot.closed and names(tmp_path) == []
    assert writer.start(tmp_path, 3, Snapshot(life.table)) and writer.join(60) and writer.poll() is None
    assert names(tmp_path) == ["step-000000000003"]


def test_a_thread_that_cannot_be_had_is_told_too(tmp_path, monkeypatch):
    def start(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    snapshot = Snapshot(Life("uniform", 40).table)
    writer = Writer()
    assert not writer.start(tmp_path, 1, snapshot)
    assert snapshot.closed and not writer.busy and "new thread" in str(writer.poll())


def test_the_thread_does_not_keep_the_program_alive(tmp_path):
    gate = Gate()
    writer = Writer(gate)
    writer.start(tmp_path, 1, Snapshot(Life("uniform", 40).table))
    assert writer._thread.daemon
    gate.open()
    assert writer.join(60)


# Keeping and finding


def test_the_newest_are_kept(tmp_path):
    table = Life("uniform", 10).table
    for steps in (10, 20, 30):
        save(tmp_path, steps, table, keep=2)
    assert names(tmp_path) == ["step-000000000020", "step-000000000030"]
    save(tmp_path, 25, table)  # a run that went back
    assert names(tmp_path) == ["step-000000000025"]
    save(tmp_path, 25, table)
    assert names(tmp_path) == ["step-000000000025"]
    with pytest.raises(ValueError, match="keep 0"):
        save(tmp_path, 1, table, keep=0)


def test_the_memory_of_a_step_or_the_nearest_one_is_found(tmp_path):
    table = Life("uniform", 10).table
    assert replay_file.find(tmp_path / "replay", 100) is None
    for steps in (10, 20, 30):
        save(tmp_path, steps, table, keep=9)
    (tmp_path / "notes").mkdir()
    (tmp_path / ".tmp-step-000000000025-00").mkdir()
    found = {steps: replay_file.find(tmp_path, steps) for steps in (9, 10, 15, 20, 29, 1000)}
    assert {steps: path and path.name[-2:] for steps, path in found.items()} == {
        9: "10", 10: "10", 15: "10", 20: "20", 29: "30", 1000: "30",
    }  # fmt: skip
    os.rename(tmp_path / "step-000000000030", tmp_path / ".old-step-000000000030")  # a replacement that was cut short
    assert replay_file.load(replay_file.find(tmp_path, 30), Life("uniform").table) == 30


# Crashes and full disks


class Flaky(Unreliable):
    def append(self, path, data):
        self.unsynced.add(path)
        if self.count == self.at:
            FileLayer.append(self, path, data[: len(data) // 2])
        self._do("append", path, data)

    def free(self, path):
        self._do("free", path)
        return super().free(path)


@functools.cache
def old() -> Life:
    return Life("mixed", 12)


@functools.cache
def new() -> Life:
    return Life("mixed", 40)


def prepared(folder: Path) -> None:
    first = save(folder, 10, old().table, 1500)
    for steps in (20, 30):
        shutil.copytree(first, folder / f"step-{steps:012d}")
    leftover = folder / ".tmp-step-000000000040-00"
    leftover.mkdir()
    (leftover / TENSORS).write_bytes(b"half")


def which(path: Path) -> str:
    table = old().empty()
    replay_file.load(path, table)
    found = [name for name, life in (("old", old()), ("new", new())) if same(contents(table), contents(life.table))]
    assert len(found) == 1
    return found[0]


@pytest.fixture
def few_segments(monkeypatch, small_segments):
    monkeypatch.setattr(replay_file, "SEGMENT", 3000)


def operations(tmp_path: Path) -> int:
    prepared(tmp_path / "count")
    files = Flaky()
    path = save(tmp_path / "count", 30, new().table, 1500, files=files)
    assert names(tmp_path / "count") == [path.name] and which(path) == "new"
    return files.count


def test_a_crash_at_any_operation_leaves_a_complete_one(tmp_path, few_segments):
    outcomes, total = [], operations(tmp_path)
    assert total > 25
    for at in range(total):
        folder = tmp_path / f"crash-{at}"
        prepared(folder)
        with pytest.raises(Crash):
            save(folder, 30, new().table, 1500, files=Flaky(at))
        outcomes.append(which(replay_file.find(folder, 30)))
        save(folder, 50, new().table, 1500)  # and the next save tidies up
        assert names(folder) == ["step-000000000050"]
    assert outcomes == sorted(outcomes, reverse=True) and set(outcomes) == {"old", "new"}


@pytest.mark.filterwarnings("ignore:.*could not be removed")
@pytest.mark.parametrize("kind", ["once", "dead"])
def test_a_disk_that_fails_at_any_operation_keeps_what_was_there(tmp_path, few_segments, kind):
    failures = 0
    for at in range(operations(tmp_path)):
        folder = tmp_path / f"{kind}-{at}"
        prepared(folder)
        snapshot = Snapshot(new().table, 1500)
        try:
            replay_file.save(folder, 30, snapshot, Flaky(at, kind))
        except StorageError as error:
            failures += 1
            assert "No space left" in str(error) and "is untouched" in str(error)
            assert {which(replay_file.find(folder, steps)) for steps in (10, 20)} == {"old"}
            assert kind == "dead" or (folder / "step-000000000030").is_dir()  # put back under its name
        assert which(replay_file.find(folder, 30)) in ("old", "new") and snapshot.closed
        save(folder, 50, new().table, 1500)
        assert names(folder) == ["step-000000000050"]
    assert failures > 20


def test_when_save_returns_the_files_survive_a_loss_of_power(tmp_path):
    files = Flaky()
    path = save(tmp_path, 10, new().table, files=files)
    files.lose_power()
    assert which(path) == "new"


def test_everything_is_synced_before_it_gets_its_name_and_its_name_after(tmp_path):
    log = []

    class Log(FileLayer):
        def fsync(self, path):
            log.append(("sync", path))

        def rename(self, source, target):
            log.append(("rename", source, sorted(source / name for name in names(source))))
            super().rename(source, target)

    save(tmp_path, 10, new().table, files=Log())
    ((at, (_, temporary, written)),) = ((at, entry) for at, entry in enumerate(log) if entry[0] == "rename")
    assert {path for _, path in log[:at]} >= {temporary, *written} and log[at - 1] == ("sync", temporary)
    assert log[at + 1 :] == [("sync", tmp_path)]


def test_room_on_the_disk_is_asked_for_first(tmp_path):
    class Full(Flaky):
        def free(self, path):
            assert path.is_dir()
            return 3 << 29

    table = Life("uniform", 10).table
    save(tmp_path, 1, table)
    snapshot = Snapshot(table)
    snapshot.bytes = 5 << 29
    files = Full()
    with pytest.raises(StorageError, match=r"need 2\.5 GiB on the disk of .*, have 1\.5 GiB"):
        replay_file.save(tmp_path / "not" / "yet", 2, snapshot, files)
    assert files.count == 0 and snapshot.closed and names(tmp_path) == ["step-000000000001"]


def test_a_folder_that_cannot_be_made_is_a_storage_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="could not be written"):
        save(tmp_path / "file" / "replay", 1, new().table)


def test_a_memory_that_changes_faster_than_the_disk_writes_costs_the_copy_only(tmp_path):
    life, gate = Life("uniform", 60), Gate()
    save(tmp_path, 1, life.table)
    writer = Writer(gate)
    writer.start(tmp_path, 2, Snapshot(life.table, 200, most_held=600))
    assert gate.waiting.wait(60)
    life.play(life.table, life.parcels(60))
    gate.open()
    assert writer.join(60) and "too slow" in str(writer.poll()) and names(tmp_path) == ["step-000000000001"]
