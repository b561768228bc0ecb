"""Records reach the file whole and in order; a disk that fails or blocks costs records at most, never the run."""

import errno
import os
import stat
import subprocess
import sys
import threading
import time
import warnings

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rookery.core.errors import StorageError, UsageError
from rookery.metrics import sink as sink_module
from rookery.metrics.sink import JsonlSink, Sinks, TensorBoardSink, read_records


def test_records_come_back_as_written(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.write({"kind": "train", "env_steps": 128, "losses": {"policy": -0.5}, "text": "zwölf\nlines"})
    assert read_records(path) == [
        {"kind": "train", "env_steps": 128, "losses": {"policy": -0.5}, "text": "zwölf\nlines"}
    ]
    sink.close()
    assert path.read_bytes().count(b"\n") == 1 and stat.S_IMODE(path.stat().st_mode) == 0o600


def test_tensors_and_numpy_numbers_become_numbers_and_non_finite_ones_null(tmp_path):
    sink = JsonlSink(tmp_path / "m")
    sink.write({"a": torch.tensor(1.5), "b": np.float32(0.5), "c": np.int64(3), "d": np.arange(2), "e": tmp_path})
    sink.write({"a": float("nan"), "b": torch.tensor(float("inf")), "c": [np.float64("-inf")], "d": {"x": np.nan}})
    first, second = read_records(tmp_path / "m")
    assert first == {"a": 1.5, "b": 0.5, "c": 3, "d": [0, 1], "e": str(tmp_path)}
    assert second == {"a": None, "b": None, "c": [None], "d": {"x": None}}


def test_a_new_sink_continues_the_file(tmp_path):
    for value in range(3):
        sink = JsonlSink(tmp_path / "m")
        sink.write({"value": value})
        sink.close()
    assert [record["value"] for record in read_records(tmp_path / "m")] == [0, 1, 2]


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(1, 36), padding=st.integers(0, 200_000))
def test_a_file_cut_anywhere_is_mended(tmp_path_factory, cut, padding):
    path = tmp_path_factory.mktemp("cut") / "m"
    sink = JsonlSink(path)
    sink.write({"value": 1})
    sink.write({"value": 2, "padding": "x" * padding})  # longer than one block of the search for its start
    sink.close()
    os.truncate(path, path.stat().st_size - cut)
    kept = [record["value"] for record in read_records(path)]
    sink = JsonlSink(path)
    sink.write({"value": 3})
    sink.close()
    assert [record["value"] for record in read_records(path)] == [*kept, 3]
    assert kept == ([1, 2] if cut == 1 else kept) and path.read_bytes().endswith(b"\n")


def test_a_full_device_degrades_to_memory_and_warns_once():
    with pytest.warns(UserWarning, match=r"/dev/full cannot be written \(it is a device") as caught:
        sink = JsonlSink("/dev/full", ring=5)
        for value in range(8):
            sink.write({"value": value})
        sink.close()
    assert len(caught) == 1
    assert sink.waiting == 5 and sink.dropped == 3 and sink.failures >= 8


def test_a_path_that_cannot_be_opened_degrades_too(tmp_path):
    with pytest.warns(UserWarning, match="cannot be written"):
        sink = JsonlSink(tmp_path / "none" / "m")
    sink.write({"value": 1})
    assert sink.waiting == 1
    (tmp_path / "none").mkdir()
    sink.write({"value": 2})
    assert sink.waiting == 0 and [record["value"] for record in read_records(tmp_path / "none" / "m")] == [1, 2]


@pytest.mark.filterwarnings("ignore:.*cannot be written")
@settings(max_examples=100, deadline=None)
@given(plan=st.lists(st.sampled_from(["ok", "full", "half", "all but the newline"]), min_size=1, max_size=12))
def test_nothing_is_lost_or_doubled_by_a_disk_that_is_full_for_a_while(tmp_path_factory, plan):
    path = tmp_path_factory.mktemp("full") / "m"
    sink, real = JsonlSink(path), os.write

    def write(handle, data):
        match plan[value]:
            case "full":
                raise OSError(errno.ENOSPC, "full")
            case "half":
                return real(handle, data[: len(data) // 2])
            case "all but the newline":
                return real(handle, data[:-1])
        return real(handle, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sink_module.os, "write", write)
        for value in range(len(plan)):
            sink.write({"value": value})
    sink.close()
    assert [record["value"] for record in read_records(path)] == list(range(len(plan)))


def test_reading_tolerates_a_torn_last_line_and_nothing_else(tmp_path):
    path = tmp_path / "m"
    path.write_bytes(b'{"a": 1}\n\n{"a": 2}\n{"a"')
    assert read_records(path) == [{"a": 1}, {"a": 2}]
    path.write_bytes(b'{"a": 1}\n{"a\n{"a": 2}\n')
    with pytest.raises(StorageError, match="line 2"):
        read_records(path)
    with pytest.raises(StorageError, match="cannot be read"):
        read_records(tmp_path / "none")
    for hostile in (b"[" * 100_000 + b"\n", b"\xff\n", b"3\n"):
        path.write_bytes(hostile)
        with pytest.raises(StorageError, match="line 1"):
            read_records(path)


class Broken:
    calls = 0

    def write(self, record):
        self.calls += 1
        raise RuntimeError("no connection")

    def close(self):
        raise RuntimeError("no connection")


def test_one_broken_sink_does_not_concern_the_others(tmp_path):
    broken = Broken()
    sinks = Sinks([broken, JsonlSink(tmp_path / "m")])
    with pytest.warns(UserWarning) as caught:
        for value in range(50):
            sinks.write({"value": value})
        sinks.close()
    assert [str(warning.message) for warning in caught] == [
        "Broken failed, training continues: RuntimeError: no connection",
        "Broken: 50 records were not written (RuntimeError: no connection)",
    ]
    assert len(read_records(tmp_path / "m")) == 50
    assert broken.calls == Sinks.patience and sinks.failures == [Sinks.patience + 1, 0]


def test_a_record_that_is_not_json_is_a_failure_of_the_sink_not_of_the_run(tmp_path):
    sinks = Sinks([JsonlSink(tmp_path / "m")])
    with pytest.warns(UserWarning) as caught:
        sinks.write({"a": "\ud800"})
        sinks.write({"a": 1})
        sinks.close()
    said = [str(warning.message) for warning in caught]
    assert len(said) == 2 and said[0].startswith("JsonlSink failed, training continues: ")
    assert said[1].startswith("m: 1 records were not written (")
    assert read_records(tmp_path / "m") == [{"a": 1}]


def test_tensorboard_shows_the_numbers_of_a_record(tmp_path):
    sinks = Sinks.of_run(tmp_path, tensorboard=True)
    for steps in (100, 200):
        losses = {"policy": torch.tensor(0.5), "value": float("nan")}
        sinks.write({"kind": "train", "env_steps": steps, "return_mean": 10.0 * steps, "losses": losses, "env": "x"})
    sinks.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"train/return_mean", "train/losses/policy"}
    assert [(event.step, event.value) for event in events.Scalars("train/return_mean")] == [
        (100, 1000.0),
        (200, 2000.0),
    ]
    modes = {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "tensorboard").iterdir()}
    assert modes == {0o600} and len(read_records(tmp_path / "metrics.jsonl")) == 2


def test_tensorboard_is_used_if_installed_and_missed_only_if_asked_for(tmp_path, monkeypatch):
    assert [type(sink) for sink in Sinks.of_run(tmp_path).sinks] == [JsonlSink, TensorBoardSink]
    assert [type(sink) for sink in Sinks.of_run(tmp_path, tensorboard=False).sinks] == [JsonlSink]
    monkeypatch.setattr(sink_module.importlib.util, "find_spec", lambda name: None)
    assert [type(sink) for sink in Sinks.of_run(tmp_path).sinks] == [JsonlSink]
    with pytest.raises(UsageError, match=r"rookery\[tensorboard\]"):
        Sinks.of_run(tmp_path, tensorboard=True)


def test_writing_warns_of_nothing_when_all_is_well(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sinks = Sinks.of_run(tmp_path, tensorboard=False)
        sinks.write({"env_steps": 1})
        sinks.close()
    assert msgspec.json.decode((tmp_path / "metrics.jsonl").read_bytes()) == {"env_steps": 1}


# A sink that blocks


class Blocked:
    """Takes the first record in hand and does not come back before `go` is set."""

    def __init__(self):
        self.go, self.entered, self.written = threading.Event(), threading.Event(), []

    def write(self, record):
        self.entered.set()
        self.go.wait()
        self.written.append(record)

    def close(self):
        pass


@pytest.fixture
def blocked():
    sink = Blocked()
    yield sink
    sink.go.set()


def test_a_blocked_sink_holds_up_neither_the_writer_nor_the_other_sinks(tmp_path, blocked):
    sinks = Sinks([blocked, JsonlSink(tmp_path / "m")])
    for value in range(100):
        sinks.write({"value": value})
    assert blocked.entered.wait(60)
    with pytest.warns(UserWarning, match=r"^Blocked: 100 records were not written \(blocked\)$") as caught:
        sinks.close(timeout=0.2)
        sinks.close(timeout=0.2)
    assert len(caught) == 1, "it is said once"
    assert [record["value"] for record in read_records(tmp_path / "m")] == list(range(100))
    assert sinks.lost == {"Blocked": 100}
    blocked.go.set()
    for thread in [each for each in threading.enumerate() if each.name == "sink Blocked"]:
        thread.join(60)
    assert blocked.written == [{"value": 0}], "an abandoned sink writes what it has in hand, and no more"


def test_while_a_sink_is_blocked_the_newest_records_wait_and_the_others_are_counted(blocked):
    sinks = Sinks([blocked], limit=5)
    sinks.write({"value": 0})
    assert blocked.entered.wait(60)
    for value in range(1, 100):
        sinks.write({"value": value})
    blocked.go.set()
    with pytest.warns(UserWarning, match=r"94 records were not written \(more records than it could take\)"):
        sinks.close()
    assert [record["value"] for record in blocked.written] == [0, 95, 96, 97, 98, 99]
    assert sinks.lost == {"Blocked": 94}


def test_a_disk_that_blocks_in_write_stops_nobody_and_what_it_lacks_is_counted(tmp_path, monkeypatch):
    go, entered, real = threading.Event(), threading.Event(), os.write

    def write(handle, data):
        if b"value" in data:
            entered.set()
            go.wait()
        return real(handle, data)

    monkeypatch.setattr(sink_module.os, "write", write)
    sinks = Sinks.of_run(tmp_path, tensorboard=False)
    for value in range(7):
        sinks.write({"value": value})
    assert entered.wait(60)
    with pytest.warns(UserWarning, match=r"^metrics.jsonl: 7 records were not written \(blocked\)$"):
        sinks.close(timeout=0.1)
    assert sinks.lost == {"metrics.jsonl": 7}
    go.set()


def test_records_that_a_full_disk_never_took_are_counted(tmp_path, monkeypatch):
    def full(handle, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    sinks = Sinks.of_run(tmp_path, tensorboard=False)
    monkeypatch.setattr(sink_module.os, "write", full)
    with pytest.warns(UserWarning) as caught:
        for value in range(3):
            sinks.write({"value": value})
        sinks.close()
    said = [str(warning.message) for warning in caught]
    assert "cannot be written (No space left on device): training continues" in said[0]
    assert said[1:] == ["metrics.jsonl: 3 records were not written (No space left on device)"]
    assert sinks.lost == {"metrics.jsonl": 3}


def test_handing_a_record_over_takes_microseconds(tmp_path, blocked):
    """A thousandth of a second, on a machine that is busy, against one update of a small network."""
    sinks = Sinks([blocked, JsonlSink(tmp_path / "m")])
    record = {"kind": "train", "losses": {"policy": 0.5}, "messages": ["x" * 100] * 100}
    spent = []
    for _ in range(2000):
        began = time.perf_counter()
        sinks.write(record)
        spent.append(time.perf_counter() - began)
    assert sorted(spent)[len(spent) // 2] < 1e-3
    blocked.go.set()
    sinks.close(timeout=60)


@pytest.mark.filterwarnings("error")
def test_a_filter_that_makes_errors_of_warnings_does_not_end_the_thread(tmp_path, monkeypatch):
    sinks = Sinks([Broken(), JsonlSink(tmp_path / "m")])
    for value in range(3):
        sinks.write({"value": value})
    with pytest.raises(UserWarning, match="3 records were not written"):
        sinks.close()
    assert len(read_records(tmp_path / "m")) == 3


STUCK = """
import os, sys, threading
from tensorboard.summary.writer.record_writer import RecordWriter
from rookery.metrics import sink as module
sinks = module.Sinks.of_run(sys.argv[1])
never, tensorboard = threading.Event(), threading.Event()
def write(*args):
    tensorboard.set()
    never.wait()
module.os.write = lambda *args: never.wait()
RecordWriter.write = write
for value in range(1500):
    sinks.write({"kind": "train", "env_steps": value, "value": value})
tensorboard.wait()
sinks.close(timeout=0.2)
print(sinks.lost["metrics.jsonl"])
"""


def test_the_interpreter_ends_though_no_sink_ever_does(tmp_path):
    command = [sys.executable, "-c", STUCK, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "Fatal" not in done.stderr, done.stderr
    assert done.stdout == "1500\n" and "metrics.jsonl: 1,500 records were not written (blocked)" in done.stderr
    assert "tensorboard: " in done.stderr


@pytest.mark.parametrize("plant", ["symlink", "link", "pipe"])
def test_records_are_not_written_through_a_link_or_to_a_pipe(tmp_path, plant):
    (tmp_path / "mine").write_text("mine")
    {"symlink": os.symlink, "link": os.link, "pipe": lambda _, to: os.mkfifo(to)}[plant](
        tmp_path / "mine", tmp_path / "m"
    )
    with pytest.warns(UserWarning, match="m cannot be written"):
        sink = JsonlSink(tmp_path / "m")
        sink.write({"value": 1})
        sink.close()
    assert (tmp_path / "mine").read_text() == "mine" and sink.waiting == 1


def test_tensorboard_has_a_folder_of_its_own_and_touches_no_other_file(tmp_path):
    (tmp_path / "mine").mkdir(mode=0o755)
    (tmp_path / "mine" / "events.out.tfevents.mine").write_text("mine")
    (tmp_path / "mine" / "events.out.tfevents.mine").chmod(0o644)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tensorboard").symlink_to(tmp_path / "mine")
    with pytest.warns(UserWarning, match="training continues without: .* it is a symbolic link"):
        assert len(Sinks.of_run(tmp_path / "run").sinks) == 1
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["events.out.tfevents.mine"]
    (tmp_path / "run" / "tensorboard").unlink()
    (tmp_path / "run" / "tensorboard").mkdir()
    (tmp_path / "run" / "tensorboard" / "events.out.tfevents.1").symlink_to(
        tmp_path / "mine" / "events.out.tfevents.mine"
    )
    Sinks.of_run(tmp_path / "run").close()
    assert stat.S_IMODE((tmp_path / "mine" / "events.out.tfevents.mine").stat().st_mode) == 0o644


def test_a_line_of_absurd_length_is_refused_without_reading_on(tmp_path, monkeypatch):
    monkeypatch.setattr(sink_module, "MAX_LINE", 1000)
    (tmp_path / "m").write_bytes(b'{"a": 1}\n{"a": "' + b"x" * 1000 + b'"}\n{"a": 2}\n')
    with pytest.raises(StorageError, match="line 2 is not a JSON object of up to 1,000 bytes"):
        read_records(tmp_path / "m")
    (tmp_path / "m").write_bytes(b'{"a": 1}\n' + b"x" * 100_000)
    with pytest.raises(StorageError, match="line 2"):
        read_records(tmp_path / "m")
    with pytest.warns(UserWarning, match="its last line has more than 1,000 bytes and is not ours"):
        JsonlSink(tmp_path / "m").close()
