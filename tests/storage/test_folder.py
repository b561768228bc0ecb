"""Files of a run folder: whole or absent, never somebody else's, and nothing to hang on."""

import os
import socket
import stat
from pathlib import Path

import pytest

from rookery.core.errors import CheckpointError, StorageError
from rookery.storage import folder


def plant(path: Path, kind: str, target: Path) -> None:
    """Put something at `path` that is not a plain file."""
    match kind:
        case "link":
            path.symlink_to(target)
        case "dangling link":
            path.symlink_to(target.with_name("not there"))
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "socket":
            with socket.socket(socket.AF_UNIX) as server:
                here = os.getcwd()
                os.chdir(path.parent)  # the name of a socket is short
                try:
                    server.bind(path.name)
                finally:
                    os.chdir(here)


KINDS = {"link": "a symbolic link", "dangling link": "a symbolic link", "pipe": "a named pipe", "folder": "a folder"}
KINDS |= {"socket": "a socket"}


@pytest.fixture
def secret(tmp_path) -> Path:
    path = tmp_path / "secret"
    path.write_text("mine")
    return path


@pytest.fixture
def run(tmp_path) -> Path:
    path = tmp_path / "run"
    path.mkdir()
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_only_plain_files_are_read_and_replaced(run, secret, kind):
    plant(run / "spec.json", kind, secret)
    with pytest.raises(CheckpointError, match=rf"cannot read .*spec\.json: it is {KINDS[kind]}.* remove it"):
        folder.read(run, "spec.json")
    with pytest.raises(StorageError, match=rf"cannot write .*spec\.json: it is {KINDS[kind]}"):
        folder.store(run, "spec.json", b"{}")
    with pytest.raises(folder.Refused):
        folder.open_regular(run, "spec.json", os.O_RDWR | os.O_CREAT)
    with pytest.raises(StorageError, match=rf"cannot use .*spec\.json: it is {KINDS[kind]}"):
        folder.check(run)
    assert secret.read_text() == "mine" and not secret.with_name("not there").exists()
    assert [path.name for path in run.iterdir()] == ["spec.json"], "no temporary file is left"


def test_a_descriptor_is_an_ordinary_one(run):
    handle = folder.open_regular(run, "logs/a.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    assert os.get_blocking(handle) and not os.get_inheritable(handle)
    assert os.write(handle, b"line\n") == 5
    os.close(handle)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (run / "logs", run / "logs" / "a.log")} == {0o700, 0o600}


def test_devices_are_refused():
    for flags in (os.O_RDONLY, os.O_WRONLY | os.O_CREAT):
        with pytest.raises(folder.Refused, match="it is a device"):
            folder.open_regular(Path("/dev"), "null", flags)


@pytest.mark.parametrize("where", ["eval", "eval/deep"])
def test_no_folder_on_the_way_is_a_link(run, tmp_path, where):
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "deep").mkdir(parents=True)
    (elsewhere / "deep" / "a").write_text("mine")
    (run / where).parent.mkdir(parents=True, exist_ok=True)
    (run / where).symlink_to(elsewhere if where == "eval" else elsewhere / "deep")
    for act in (lambda: folder.write(run, "eval/deep/a", b""), lambda: folder.open_regular(run, "eval/deep/a")):
        with pytest.raises(folder.Refused, match="it is a symbolic link, and a run folder has a real folder there"):
            act()
    assert (elsewhere / "deep" / "a").read_text() == "mine"


def test_the_path_that_the_user_names_may_be_a_link_and_is_followed_once(run, tmp_path):
    link = tmp_path / "latest"
    link.symlink_to(run)
    folder.write(link, "a", b"1")
    assert folder.read(link, "a") == (run / "a").read_bytes() == b"1"
    assert folder.real(link) == run and folder.real(run) == run
    assert folder.real("somewhere/new") == Path("somewhere/new"), "a path without links stays as it was given"


def test_a_file_is_replaced_whole_private_and_synced(run, monkeypatch):
    synced = []
    fsync = os.fsync

    def watched(handle):
        synced.append((stat.S_ISDIR(os.fstat(handle).st_mode), sorted(path.name for path in run.iterdir())))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", watched)
    for data in (b"old", b"new" * 10_000):
        folder.write(run, "config.json", data)
    assert (run / "config.json").read_bytes() == b"new" * 10_000
    assert stat.S_IMODE((run / "config.json").stat().st_mode) == 0o600
    (_, before), (is_folder, after) = synced[2:]
    assert len(before) == 2 and "config.json" in before, "synced under another name first"
    assert is_folder and after == ["config.json"], "then the folder, once it has its own"


def test_a_failed_write_leaves_the_old_file_and_nothing_else(run, monkeypatch):
    folder.write(run, "a", b"old")
    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, lambda *_, **__: (_ for _ in ()).throw(OSError(28, "No space left on device")))
            with pytest.raises(StorageError, match="a: No space left on device"):
                folder.store(run, "a", b"new")
        assert [path.name for path in run.iterdir()] == ["a"] and (run / "a").read_bytes() == b"old"


def test_what_a_killed_writer_left_is_removed_and_nothing_that_only_looks_like_it(run, secret):
    (run / f".tmp-{'0' * 32}").write_text("half")
    (run / f".tmp-{'1' * 32}").symlink_to(secret)
    (run / ".tmp-mine").write_text("")
    folder.sweep(run)
    assert sorted(path.name for path in run.iterdir()) == [f".tmp-{'1' * 32}", ".tmp-mine"] and secret.exists()


def test_what_is_written_in_place_has_one_name(run, secret):
    os.link(secret, run / "metrics.jsonl")
    with pytest.raises(folder.Refused, match="2 names"):
        folder.open_regular(run, "metrics.jsonl", os.O_RDWR, sole=True)
    with pytest.raises(StorageError, match=r"metrics\.jsonl: the file has 2 names \(hard links\)"):
        folder.check(run)
    os.close(folder.open_regular(run, "metrics.jsonl"))  # to read it harms nobody
    os.link(secret, run / "config.json")
    folder.write(run, "config.json", b"new")
    assert secret.read_text() == "mine", "a file that is replaced leaves the other name alone"


@pytest.mark.parametrize("name", folder.FOLDERS)
def test_a_run_is_not_begun_in_a_folder_whose_parts_are_links(run, tmp_path, name):
    folder.check(run)
    (run / name).mkdir()
    folder.check(run)
    (run / name).rmdir()
    (run / name).symlink_to(tmp_path)
    with pytest.raises(StorageError, match=f"{name}: it is a symbolic link, and a run folder has a real folder there"):
        folder.check(run)


def test_a_log_that_is_a_link_is_seen_before_a_run(run, secret):
    (run / "logs").mkdir()
    (run / "logs" / "actor-0.log").symlink_to(secret)
    with pytest.raises(StorageError, match=r"actor-0\.log: it is a symbolic link"):
        folder.check(run)


def test_large_files_are_not_read(run):
    (run / "config.json").touch()
    os.truncate(run / "config.json", folder.MAX_CONFIG + 1)
    with pytest.raises(CheckpointError, match="more than 1,048,576 bytes"):
        folder.read(run, "config.json")
    os.truncate(run / "config.json", folder.MAX_CONFIG)
    assert len(folder.read(run, "config.json")) == folder.MAX_CONFIG


def test_absent_is_an_error_of_its_own(run):
    with pytest.raises(CheckpointError, match=r"config\.json: No such file"):
        folder.read(run, "config.json")
    assert not folder.exists(run, "config.json")
    (run / "config.json").symlink_to(run / "nothing")
    assert folder.exists(run, "config.json")
