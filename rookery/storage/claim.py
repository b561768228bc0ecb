"""One process trains in a run folder at a time: two that resumed the same run would write over each other.

The lock is a POSIX record lock on the file `lock`. It belongs to the process: the kernel releases it when the process
ends, and a child that an environment forks does not inherit it. Such a lock does not exclude a second run in the same
process, so a table of the files that this process holds does. The kernel also releases it when the process closes *any*
descriptor of that file; therefore no other code of this package opens it, and the table is checked before it is opened.

Reading a run (eval, record, plot) needs no lock.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rookery.core.errors import StorageError, UsageError
from rookery.core.wording import setting
from rookery.storage.folder import open_regular

try:
    import fcntl
except ImportError:  # Windows: other processes are not excluded
    fcntl = None  # type: ignore[assignment]

File = tuple[int, int]  # device and inode

_mutex = threading.Lock()
_held: dict[File, int] = {}  # files this process holds, and their descriptors


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Hold the folder; UsageError if another run does."""
    with _mutex:
        file = _claim(folder)
    try:
        yield
    finally:
        with _mutex:
            os.close(_held.pop(file))


def _claim(folder: Path) -> File:
    path = folder / "lock"
    try:
        found = os.lstat(path)
        _refuse_if_held(folder, (found.st_dev, found.st_ino))
    except FileNotFoundError:
        pass
    except OSError as error:
        raise StorageError(f"cannot write the run folder {folder}: {error.strerror or error}") from error
    try:
        handle = open_regular(folder, "lock", os.O_RDWR | os.O_CREAT, sole=True)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}") from error
    opened = os.fstat(handle)
    file = opened.st_dev, opened.st_ino
    try:
        _refuse_if_held(folder, file)  # the file was replaced a moment ago by one that we hold
        if fcntl is not None:
            _lock(folder, handle)
    except BaseException:
        if file not in _held:  # closing it would release the lock of the other run
            os.close(handle)
        raise
    _held[file] = handle
    return file


def _refuse_if_held(folder: Path, file: File) -> None:
    if file in _held:
        raise _taken(folder, f"another run in this process ({os.getpid()})")


def _lock(folder: Path, handle: int) -> None:
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # EAGAIN or EACCES, depending on the system
        raise _taken(folder, _holder(os.read(handle, 100).decode(errors="replace"))) from None
    except OSError:
        return  # a file system without locks, as some networks have: other processes are not excluded there
    os.ftruncate(handle, 0)
    os.write(handle, f"process {os.getpid()} on {os.uname().nodename}\n".encode())


def _taken(folder: Path, holder: str) -> UsageError:
    return UsageError(
        f"{folder} is being trained in already, by {holder}; wait for it, stop it, or choose another {setting('out')}"
    )


def _holder(text: str) -> str:
    """Who holds the lock, as the file says; only if it can be true."""
    words = re.fullmatch(r"process (\d{1,9}) on ([\w.-]{1,64})\n", text)
    if words is None:
        return "another process"
    if words[2] != os.uname().nodename:
        return f"another process on {words[2]}"
    try:
        os.kill(int(words[1]), 0)
    except ProcessLookupError:
        return "another process"
    except OSError:  # it is another user's
        pass
    return text.strip()
