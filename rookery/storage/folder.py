"""Files of a run folder, opened so that nothing in the folder leads out of it.

A run folder may come from another person. The path that the user names may be a link (`runs/latest`); nothing below it
may. Every part of a path is opened relative to the descriptor of the part before, without following links, and only
regular files are opened: a pipe cannot block us, a device is not touched. A file is written under a random name, synced
and renamed, so that it is whole or absent.

A second name of a file (a hard link) cannot be distinguished from the first. Files that are replaced are
not affected: the other name keeps the old contents. Files that are written in place are refused if they have more than
one name (`sole`).

Not here: checkpoints and replay memories (`files.py`), and what any of these files mean.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rookery.core.errors import CheckpointError, StorageError

MAX_CONFIG = 1 << 20  # bytes of config.json, spec.json or summary.json; ours have a few thousand

FILES = ("config.json", "spec.json", "summary.json", "metrics.jsonl", "lock")
WRITTEN_IN_PLACE = ("metrics.jsonl", "lock")
FOLDERS = (
    "checkpoints", "init", "replay", "logs", "eval", "report", "tensorboard", "numeric", "ranks", "trackers", "export",
)  # fmt: skip

_SAFE = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0)
_TEMPORARY = re.compile(r"\.tmp-[0-9a-f]{32}")
_KINDS = {
    stat.S_IFLNK: "a symbolic link", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFREG: "a file",
}  # fmt: skip


class Refused(OSError):
    """Something else than a plain file, or a real folder, where one belongs; `strerror` says what and what to do."""

    def __init__(self, path: Path, why: str):
        super().__init__(errno.ELOOP, why, str(path))


def clear(root: Path) -> None:
    """Remove what a run has written into its folder, which is claimed; config.json last, so that it stays a run's."""
    check(root)
    for name in FOLDERS:
        shutil.rmtree(root / name, ignore_errors=True)
    names = [each for each in FILES if each not in ("lock", "config.json")]
    older = [each.name for each in root.glob("metrics-*.jsonl")]
    for name in (*names, *older, "config.json"):
        try:
            (root / name).unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(f"cannot remove {root / name}: {error.strerror or error}") from error


def real(path: str | Path) -> Path:
    """The path, or what it leads to if there is a link in it: followed once, so that it stays the same folder."""
    there = os.path.realpath(path)
    return Path(path) if there == os.path.abspath(path) else Path(there)


def not_a_run(path: Path, file: str = "config.json") -> str:
    """What is said of a folder that lacks this file."""
    if (path / "sweep.json").is_file():
        return f"{path} is the folder of a sweep, and not of a run: its runs are in {path / 'runs'}"
    return f"{path} is not a run folder: it has no {file}"


def run_of(path: Path) -> Path:
    """The run folder of a run folder or of one of its checkpoints."""
    for folder in (path, *path.parents[1:3]):
        if exists(folder, "config.json"):
            return folder
    raise CheckpointError(not_a_run(path))


@contextmanager
def opened(root: Path, name: str = "", create: bool = False) -> Iterator[int]:
    """A descriptor of the folder `name` ("a/b") below `root`; `create` makes what is missing below `root`."""
    handle, path = os.open(root, _FOLDER), Path(root)
    try:
        for part in Path(name).parts:
            path = path / part
            found = _look(part, handle)
            if found is None and create:
                with contextlib.suppress(FileExistsError):  # another process was quicker
                    os.mkdir(part, 0o700, dir_fd=handle)
            elif found is not None and not stat.S_ISDIR(found.st_mode):
                raise Refused(path, _told(found, "a real folder"))
            inner = os.open(part, _FOLDER | _SAFE, dir_fd=handle)
            os.close(handle)
            handle = inner
        yield handle
    finally:
        os.close(handle)


def open_regular(root: Path, name: str, flags: int = os.O_RDONLY, sole: bool = False) -> int:
    """A descriptor of the plain file `name` ("logs/actor-0.log") below `root`; folders are made where O_CREAT is.

    `sole` refuses a file that has another name: for what is written in place.
    """
    path = Path(root, name)
    with opened(root, str(Path(name).parent), create=bool(flags & os.O_CREAT)) as folder:
        _check_file(path, _look(path.name, folder), sole)  # before: to open a device may do something
        handle = os.open(path.name, flags | _SAFE, 0o600, dir_fd=folder)
    try:
        _check_file(path, os.fstat(handle), sole)
        os.set_blocking(handle, True)  # a plain file never blocks; a child that inherits it expects that
    except OSError:
        os.close(handle)
        raise
    return handle


def exists(root: Path, name: str) -> bool:
    """Whether anything has that name, be it a link that leads nowhere."""
    return os.path.lexists(Path(root, name))


def read(root: Path, name: str, limit: int = MAX_CONFIG) -> bytes:
    """A whole file that is part of a run's state; CheckpointError if it is absent, too large or not a plain file."""
    try:
        with open(open_regular(root, name), "rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise CheckpointError(f"cannot read {Path(root, name)}: {error.strerror or error}") from error
    if len(data) > limit:
        raise CheckpointError(
            f"{Path(root, name)} has more than {limit:,} bytes, and what Rookery writes there never has; "
            "restore it from a copy"
        )
    return data


def write(root: Path, name: str, data: bytes) -> Path:
    """Make `data` the contents of a file: whole and synced, or as it was. OSError, `Refused` among them."""
    path = Path(root, name)
    temporary = f".tmp-{secrets.token_hex(16)}"
    with opened(root, str(Path(name).parent), create=True) as folder:
        _check_file(path, _look(path.name, folder))
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFE, 0o600, dir_fd=folder)
        try:
            with open(handle, "wb", buffering=0) as file:
                view = memoryview(data)
                while view:
                    view = view[file.write(view) :]
                os.fsync(handle)
            os.replace(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=folder)
            raise
        os.fsync(folder)
    return path


def store(root: Path, name: str, data: bytes) -> Path:
    """`write`, with a StorageError that names the file."""
    try:
        return write(root, name, data)
    except OSError as error:
        raise StorageError(f"cannot write {Path(root, name)}: {error.strerror or error}") from error


def check_target(root: Path, name: str) -> None:
    """For what another program will write: its folder is made, and must be real; the name must be free or a file."""
    path = Path(root, name)
    with opened(root, str(Path(name).parent), create=True) as folder:
        _check_file(path, _look(path.name, folder))


def check(root: Path) -> None:
    """Before a run writes into a folder: StorageError if a name that it will use is taken by a link or a device."""
    try:
        with opened(root) as folder:
            for name in FILES:
                _check_file(Path(root, name), _look(name, folder), sole=name in WRITTEN_IN_PLACE)
        for name in FOLDERS:
            with contextlib.suppress(FileNotFoundError), opened(root, name):
                pass
        with contextlib.suppress(FileNotFoundError), opened(root, "logs") as folder:
            for name in os.listdir(folder):
                if name.endswith(".log"):
                    _check_file(Path(root, "logs", name), _look(name, folder), sole=True)
    except OSError as error:
        raise StorageError(f"cannot use {error.filename or root}: {error.strerror or error}") from error


def sweep(root: Path) -> None:
    """Remove what a `write` that was killed left at the top of a folder; no other process may use it."""
    with contextlib.suppress(OSError), opened(root) as folder:
        for name in os.listdir(folder):
            found = _look(name, folder)
            if _TEMPORARY.fullmatch(name) and found is not None and stat.S_ISREG(found.st_mode):
                os.unlink(name, dir_fd=folder)


def _look(name: str, folder: int) -> os.stat_result | None:
    """What has that name, without following it; None if nothing has."""
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _check_file(path: Path, found: os.stat_result | None, sole: bool = False) -> None:
    if found is not None and not stat.S_ISREG(found.st_mode):
        raise Refused(path, _told(found, "a plain file"))
    if found is not None and sole and found.st_nlink > 1:
        raise Refused(
            path,
            f"the file has {found.st_nlink} names (hard links), and what is written to it would change the others "
            "too; put a copy in its place",
        )


def _told(found: os.stat_result, wanted: str) -> str:
    what = _KINDS.get(stat.S_IFMT(found.st_mode), "something else")
    return f"it is {what}, and a run folder has {wanted} there; remove it, or put {wanted} in its place"
