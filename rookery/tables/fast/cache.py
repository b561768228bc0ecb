"""A directory of our own for compiled code, or none.

numba keeps compiled code in files that are pickles: a user who can write there can run code in our process. So they
lie in a directory of this user that others cannot enter, under directories in which others cannot replace it. Where
there is no such directory, code is compiled in each process. Not here: numba
itself (`kernel.py`).
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

NAME = "rookery-kernels"


def directory() -> Path | None:
    """The private directory, made if need be; None if there can be none."""
    try:
        folder = _base().resolve() / NAME
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder if is_private(folder) else None
    except (OSError, RuntimeError):  # a home that is missing, or that cannot be written
        return None


def is_private(folder: Path) -> bool:
    """Whether only this user and root can read or change what is in the folder, or replace it."""
    if not hasattr(os, "geteuid"):  # elsewhere than on Unix a user's folders are the user's own
        return folder.is_dir()
    me, own = os.geteuid(), os.lstat(folder)
    if not stat.S_ISDIR(own.st_mode) or own.st_uid != me or own.st_mode & 0o077:
        return False
    return all(_is_kept(os.lstat(parent), me) for parent in folder.parents)


def _is_kept(parent: os.stat_result, me: int) -> bool:
    """Whether others cannot rename what we have in a directory: not theirs, and closed to them or sticky like /tmp."""
    loose = parent.st_mode & 0o022 and not parent.st_mode & stat.S_ISVTX
    return stat.S_ISDIR(parent.st_mode) and parent.st_uid in (0, me) and not loose


def _base() -> Path:
    """Where caches of this user belong: as numba is told, as the desktop standard says, or ~/.cache."""
    for name in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME"):
        if os.path.isabs(os.environ.get(name, "")):
            return Path(os.environ[name])
    return Path.home() / ".cache"
