"""A checkpoint is complete or absent, whatever happens to the writer, the disk or the files."""

import errno
import os
import pickletools
import resource
import stat
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from rookery.core.errors import CheckpointError, StorageError
from rookery.storage import checkpoint
from rookery.storage.checkpoint import MANIFEST, META, TENSORS, FileLayer


def content(value: float) -> tuple[dict, dict]:
    tensors = {"policy": torch.full((3, 4), float(value)), "replay/frames": np.full((2, 5), int(value) % 256, np.uint8)}
    return tensors, {"value": value, "rng": np.random.PCG64(int(value)).state, "carry": np.full(3, value)}


def save(folder: Path, steps: int, value: float | None = None, **options) -> Path:
    return checkpoint.save(folder, steps, *content(steps if value is None else value), **options)


def value_of(loaded: checkpoint.Checkpoint) -> float:
    """The value a checkpoint was made of, after checking that every part of it agrees."""
    tensors, meta = content(loaded.meta["value"])
    assert torch.equal(loaded.tensors["policy"], tensors["policy"])
    assert np.array_equal(loaded.tensors["replay/frames"], tensors["replay/frames"])
    assert set(loaded.tensors) == set(tensors)
    assert loaded.meta["rng"] == meta["rng"] and np.array_equal(loaded.meta["carry"], meta["carry"])
    return loaded.meta["value"]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_was_saved_is_loaded(tmp_path):
    path = save(tmp_path / "run" / "checkpoints", 123456)
    assert path.name == "step-000000123456"
    loaded = checkpoint.load(path)
    assert value_of(loaded) == 123456 and loaded.env_steps == 123456 and loaded.path == path


def test_views_of_one_vector_aliases_and_every_dtype_are_stored(tmp_path):
    flat = torch.arange(12.0)
    tensors = {"flat": flat, "alias": flat, "a": flat[:4].view(2, 2), "b": flat[4:], "t": flat.view(3, 4).T}
    tensors |= {str(t): torch.ones(2, dtype=t) for t in (torch.bfloat16, torch.float16, torch.bool, torch.uint8)}
    tensors |= {"empty": torch.zeros(0, 3), "scalar": torch.tensor(3), "grad": torch.ones(2, requires_grad=True)}
    loaded = checkpoint.load(checkpoint.save(tmp_path, 1, tensors, {})).tensors
    assert {name: t.tolist() for name, t in loaded.items()} == {name: t.tolist() for name, t in tensors.items()}
    assert {name: t.dtype for name, t in loaded.items()} == {name: t.dtype for name, t in tensors.items()}


def test_the_manifest_says_what_wrote_it(tmp_path):
    body = msgspec.json.decode((save(tmp_path, 7, best=1.5) / MANIFEST).read_bytes())["manifest"]
    assert body["schema"] == checkpoint.SCHEMA and body["env_steps"] == 7 and body["best"] == 1.5
    assert body["versions"]["torch"] == torch.__version__ and set(body["files"]) == {META, TENSORS}


def test_others_can_neither_read_nor_write(tmp_path):
    old = os.umask(0)
    try:
        path = save(tmp_path / "a" / "b", 1)
    finally:
        os.umask(old)
    for place in (tmp_path / "a", tmp_path / "a" / "b", path):
        assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {0o600}


def test_nothing_written_is_a_pickle_or_an_archive(tmp_path):
    for file in save(tmp_path, 5).iterdir():
        blob = file.read_bytes()
        assert not blob.startswith((b"\x80", b"PK")) and b"\x80\x04\x95" not in blob and b"PK\x03\x04" not in blob
        with pytest.raises(ValueError):
            list(pickletools.genops(blob))


@pytest.mark.parametrize("bad", [{"a": np.array(["x"])}, {"a": [1]}, {"a": torch.ones(1, dtype=torch.complex128)}])
def test_what_cannot_be_stored_is_refused_before_anything_is_written(tmp_path, bad):
    with pytest.raises(CheckpointError):
        checkpoint.save(tmp_path, 1, bad, {})
    for meta in ([], {"x": object()}, {"x": "\ud800"}):
        with pytest.raises(CheckpointError):
            checkpoint.save(tmp_path, 1, {}, meta)
    with pytest.raises(CheckpointError, match="reserved"):
        checkpoint.save(tmp_path, 1, {"meta:/0": torch.ones(1)}, {})
    assert names(tmp_path) == []


# Keeping


def test_the_newest_and_the_best_are_kept(tmp_path):
    for steps, score in ((10, 1.0), (20, 5.0), (30, 2.0), (40, float("nan")), (50, None), (60, 4.0)):
        save(tmp_path, steps, best=score, keep=2)
    assert checkpoint.all_steps(tmp_path) == [20, 50, 60]
    assert checkpoint.best(tmp_path).name == "step-000000000020"
    assert value_of(checkpoint.newest(tmp_path)[0]) == 60


def test_of_equal_scores_the_newest_is_the_best(tmp_path):
    for steps in (10, 20, 30):
        save(tmp_path, steps, best=500.0, keep=1)
    assert checkpoint.all_steps(tmp_path) == [30] and checkpoint.best(tmp_path).name == "step-000000000030"


def test_without_scores_there_is_no_best(tmp_path):
    save(tmp_path, 10)
    assert checkpoint.best(tmp_path) is None and checkpoint.best(tmp_path / "none") is None
    assert checkpoint.all_steps(tmp_path / "none") == []


def test_the_one_just_written_is_kept_even_if_later_ones_exist(tmp_path):
    save(tmp_path, 300)
    save(tmp_path, 100, keep=1)  # a run that went back to an earlier point
    assert checkpoint.all_steps(tmp_path) == [100]


def test_damaged_checkpoints_do_not_count_and_are_not_removed(tmp_path):
    (save(tmp_path, 90) / META).write_bytes(b"{}")
    for steps in (10, 20, 30):
        save(tmp_path, steps, keep=2)
    assert checkpoint.all_steps(tmp_path) == [20, 30, 90]


def test_saving_the_same_step_again_replaces_it(tmp_path):
    save(tmp_path, 10, value=1)
    path = save(tmp_path, 10, value=2)
    assert value_of(checkpoint.load(path)) == 2 and names(tmp_path) == [path.name]


def test_keep_must_be_positive(tmp_path):
    with pytest.raises(ValueError, match="keep 0"):
        save(tmp_path, 1, keep=0)


# Crashes and full disks (F11, F12)


class Crash(BaseException):
    """The process is gone: nothing after it runs."""


class Unreliable(FileLayer):
    """Fails at operation number `at`: a crash, an error there, or errors from there on.

    A crash is a loss of power: contents written and not synced are gone, and a write may have been half done.
    """

    def __init__(self, at: int = -1, kind: str = "crash"):
        self.at, self.kind, self.count, self.unsynced = at, kind, 0, set()

    def _do(self, operation: str, *args) -> None:
        here, self.count = self.count, self.count + 1
        if here == self.at or (self.kind == "dead" and self.at >= 0 and here > self.at):
            if operation == "write":
                FileLayer.write(self, args[0], args[1][: len(args[1]) // 2])
            if self.kind == "crash":
                self.lose_power()
                raise Crash
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        getattr(FileLayer, operation)(self, *args)

    def lose_power(self) -> None:
        for path in self.unsynced:
            if path.is_file():
                os.truncate(path, 0)

    def mkdir(self, path):
        self._do("mkdir", path)

    def write(self, path, data):
        self.unsynced.add(path)
        self._do("write", path, data)

    def fsync(self, path):
        self._do("fsync", path)
        self.unsynced.discard(path)

    def fsync_dir(self, path):
        self._do("fsync_dir", path)

    def rename(self, source, target):
        self._do("rename", source, target)
        moved = {path for path in self.unsynced if source in path.parents}
        self.unsynced = self.unsynced - moved | {target / path.relative_to(source) for path in moved}

    def remove(self, path):
        if self.count == self.at and self.kind == "crash":
            (path / MANIFEST).unlink(missing_ok=True)  # a crash half-way through a removal
        self._do("remove", path)


def prepared(folder: Path) -> None:
    """The richest case for a save at step 30: one to replace, some to prune, a crashed writer's leftover."""
    for steps in (10, 20, 30):
        save(folder, steps, keep=9)
    leftover = folder / ".tmp-step-000000000040-00"
    leftover.mkdir()
    (leftover / TENSORS).write_bytes(b"half")


def operations(tmp_path: Path) -> int:
    prepared(tmp_path / "count")
    files = Unreliable()
    save(tmp_path / "count", 30, value=31, keep=1, files=files)
    assert names(tmp_path / "count") == ["step-000000000030"]
    return files.count


def test_a_crash_at_any_operation_leaves_the_newest_complete(tmp_path):
    total, outcomes = operations(tmp_path), []
    assert total >= 15
    for at in range(total):
        folder = tmp_path / f"crash-{at}"
        prepared(folder)
        with pytest.raises(Crash):
            save(folder, 30, value=31, keep=1, files=Unreliable(at))
        found, skipped = checkpoint.newest(folder)
        outcomes.append(value_of(found))
        assert skipped == [] and found.env_steps == 30
        save(folder, 50, keep=1)  # and the next save tidies up
        assert names(folder) == ["step-000000000050"]
    assert outcomes == sorted(outcomes) and set(outcomes) == {30, 31}  # the old one, then from some point on the new


def test_a_crash_of_the_very_first_save_leaves_nothing_that_looks_like_a_checkpoint(tmp_path):
    files = Unreliable()
    save(tmp_path / "count" / "checkpoints", 10, files=files)
    for at in range(files.count):
        folder = tmp_path / f"{at}" / "checkpoints"
        with pytest.raises(Crash):
            save(folder, 10, files=Unreliable(at))
        if checkpoint.all_steps(folder):
            assert value_of(checkpoint.newest(folder)[0]) == 10
        else:
            with pytest.raises(CheckpointError, match="no checkpoint"):
                checkpoint.newest(folder)


def test_when_save_returns_the_files_survive_a_loss_of_power(tmp_path):
    files = Unreliable()
    save(tmp_path, 10, files=files)
    files.lose_power()
    assert value_of(checkpoint.newest(tmp_path)[0]) == 10


@pytest.mark.filterwarnings("ignore:.*could not be removed")
@pytest.mark.parametrize("kind", ["once", "dead"])
def test_a_full_disk_at_any_operation_keeps_what_was_there(tmp_path, kind):
    failures = 0
    for at in range(operations(tmp_path)):
        folder = tmp_path / f"{kind}-{at}"
        prepared(folder)
        before = {steps: value_of(checkpoint.load(folder / f"step-{steps:012d}")) for steps in (10, 20, 30)}
        try:
            save(folder, 30, value=31, keep=1, files=Unreliable(at, kind))
        except StorageError as error:
            failures += 1
            assert "No space left" in str(error) and error.exit_code == 7
            assert {steps: checkpoint.load(folder / f"step-{steps:012d}").env_steps for steps in (10, 20)} == {
                10: 10,
                20: 20,
            }
            assert value_of(checkpoint.newest(folder)[0]) in (before[30], 31)
            assert kind == "dead" or (folder / "step-000000000030").is_dir()  # put back under its name
        else:
            assert value_of(checkpoint.newest(folder)[0]) == 31
        save(folder, 50, keep=1)
        assert names(folder) == ["step-000000000050"]
    assert failures >= 8


def test_a_failed_save_leaves_no_temporary_folder(tmp_path):
    save(tmp_path, 10)
    for at in range(8):
        with pytest.raises(StorageError):
            save(tmp_path, 20, files=Unreliable(at, "once"))
        assert names(tmp_path) == ["step-000000000010"]


def test_a_limit_of_the_system_on_file_size_is_a_storage_error(tmp_path):
    save(tmp_path, 10)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(StorageError, match="File too large"):
            checkpoint.save(tmp_path, 20, {"w": torch.zeros(10_000)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == ["step-000000000010"] and value_of(checkpoint.newest(tmp_path)[0]) == 10


def test_a_folder_that_cannot_be_made_is_a_storage_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="could not be written"):
        save(tmp_path / "file" / "checkpoints", 1)
