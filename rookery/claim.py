"""One process trains in a run folder at a time: two that resumed the same run would write over each other.

The lock is the system's, on the file `lock`: it goes with the process, however that ends, and never has to be removed.
Looking at a run (eval, record, plot) asks for nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rookery.errors import StorageError, UsageError
from rookery.folder import open_regular

try:
    import fcntl
except ImportError:  # Windows: nobody is kept out
    fcntl = None


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Hold the folder; UsageError if another process does."""
    try:
        handle = open_regular(folder, "lock", os.O_RDWR | os.O_CREAT, sole=True)
    except OSError as error:
        raise StorageError(f"cannot write the run folder {folder}: {error.strerror or error}") from error
    try:
        if fcntl is not None:
            _lock(folder, handle)
        yield
    finally:
        os.close(handle)


def _lock(folder: Path, handle: int) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(handle, 100).decode(errors="replace").strip() or "another process"
        raise UsageError(
            f"{folder} is being trained in already, by {holder}; wait for it, stop it, or choose another --out"
        ) from None
    except OSError:
        return  # a file system without locks, as some networks have: nobody is kept out there
    os.ftruncate(handle, 0)
    os.write(handle, f"process {os.getpid()} on {os.uname().nodename}\n".encode())
