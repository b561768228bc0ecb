"""Compiled code is read from a directory that nobody else can write, or from none: its files are pickles."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rookery.tables.fast import cache, kernel

# Which files in directories of compiled code a process opens, and whether it finds anything there.
CHILD = """
import sys
opened = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
from rookery.tables.fast import kernel
from rookery.tables.fast import power
kernel.pick(power._power, power._SIGNATURE, None)
print("\\n".join(path for path in opened if path.endswith((".nbi", ".nbc"))))
"""


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A place for caches; its parents are made such that nobody else can write in them."""
    for name in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    tmp_path.chmod(0o700)
    return tmp_path / "caches"


def opened() -> list[Path]:
    """The cache files that a new process opens when it compiles a kernel."""
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, timeout=120, check=True)
    return [Path(line) for line in done.stdout.split()]


def test_code_is_kept_in_a_private_directory_and_found_again(home):
    folder = home / cache.NAME
    assert opened(), "the first process looks, and writes"
    kept = list(folder.rglob("*.nbc"))
    assert kept and folder.stat().st_mode & 0o777 == 0o700
    times = {path: path.stat().st_mtime_ns for path in kept}
    found = opened()
    assert any(path.suffix == ".nbc" for path in found), "the second process reads"
    assert all(path.is_relative_to(folder) for path in found)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.nbc")} == times, "and compiles nothing"


@pytest.mark.parametrize("spoil", ["others write", "others read", "group writes", "a link", "a file", "parent"])
def test_a_directory_that_others_could_have_written_is_not_used(home, tmp_path, spoil):
    home.mkdir()
    folder = home / cache.NAME
    if spoil == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "elsewhere")
    elif spoil == "a file":
        folder.touch()
    else:
        folder.mkdir()
        (home if spoil == "parent" else folder).chmod(
            {"others write": 0o703, "others read": 0o704, "group writes": 0o720, "parent": 0o777}[spoil]
        )
    assert cache.directory() is None


def test_without_a_private_directory_nothing_is_read_at_all(home):
    """Not from the directory, and not from beside the source, where numba would look next."""
    opened()
    (home / cache.NAME).chmod(0o777)
    assert opened() == []


def test_a_directory_of_somebody_else_is_not_used(home, monkeypatch):
    assert cache.directory() == home / cache.NAME
    real = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: real + 1)
    assert cache.directory() is None


def test_a_sticky_parent_is_as_good_as_a_closed_one(home):
    home.mkdir()
    home.chmod(0o1777)
    assert cache.directory() == home / cache.NAME


def test_the_place_is_the_users_choice_and_relative_ones_are_passed_over(home, tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "chosen"))
    assert cache.directory() == tmp_path / "chosen" / cache.NAME
    monkeypatch.setenv("NUMBA_CACHE_DIR", "here")
    assert cache.directory() == home / cache.NAME
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    assert cache.directory() == tmp_path / "me" / ".cache" / cache.NAME


def test_a_home_that_cannot_be_made_means_no_directory(home, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" / "caches"))
    assert cache.directory() is None


def twice(x: float) -> float:
    return 2 * x


@pytest.mark.parametrize("private", [True, False])
def test_kernels_compute_with_and_without_a_directory_and_leave_the_settings(home, monkeypatch, private):
    import numba

    before = numba.config.CACHE_DIR, numba.config.CACHE_LOCATOR_CLASSES
    if not private:
        monkeypatch.setattr(cache, "directory", lambda: None)
    compiled = kernel.compiled.__wrapped__(twice, "float64(float64)")
    assert compiled(np.float64(1.5)) == 3.0
    assert before == (numba.config.CACHE_DIR, numba.config.CACHE_LOCATOR_CLASSES)
    assert bool(list(home.rglob("*.nbc"))) is private
