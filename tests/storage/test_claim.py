"""The lock on a run folder: who is kept out, for how long, and by which kind of file."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rookery.core.errors import StorageError, UsageError
from rookery.storage.claim import claimed

LONG = 120.0  # seconds: never reached unless something is broken
HOLD = "import sys; from pathlib import Path; from rookery.storage.claim import claimed\n"
HOLD += "with claimed(Path(sys.argv[1])): print('mine', flush=True); sys.stdin.read()"
# Claims the folder, forks a child that does nothing, says its number, and waits to be killed.
FORK = """
import os, signal, sys
from pathlib import Path
from rookery.storage.claim import claimed
with claimed(Path(sys.argv[1])):
    child = os.fork()
    if child == 0:
        signal.pause()
    print(child, flush=True)
    signal.pause()
"""


def holder(folder: Path) -> subprocess.Popen:
    command = [sys.executable, "-c", HOLD, str(folder)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "mine\n"
    return process


def end(process: subprocess.Popen) -> None:
    process.kill()
    process.communicate(timeout=LONG)


def test_a_forked_child_does_not_keep_the_folder_of_a_process_that_was_killed(tmp_path):
    command = [sys.executable, "-c", FORK, str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    child = int(process.stdout.readline())
    try:
        process.kill()
        process.wait(LONG)
        os.kill(child, 0)  # it is still there
        with claimed(tmp_path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        process.stdout.close()


def test_two_runs_in_one_process_exclude_each_other(tmp_path):
    with claimed(tmp_path):
        for _ in range(2):  # the failed attempt must not release the lock
            with pytest.raises(UsageError, match="another run in this process"), claimed(tmp_path):
                pass
        (tmp_path / "elsewhere").symlink_to(tmp_path)
        with pytest.raises(UsageError, match="another run in this process"), claimed(tmp_path / "elsewhere"):
            pass
        done = subprocess.run([sys.executable, "-c", HOLD, str(tmp_path)], capture_output=True, text=True, timeout=LONG)
        assert f"by process {os.getpid()} on " in done.stderr
    with claimed(tmp_path):
        pass


def test_only_a_living_holder_is_named(tmp_path):
    other = holder(tmp_path)
    try:
        with pytest.raises(UsageError, match=f"by process {other.pid} on "), claimed(tmp_path):
            pass
        gone = subprocess.Popen(["true"])
        gone.wait(LONG)
        for text, named in (
            (f"process {gone.pid} on {os.uname().nodename}\n", "by another process;"),
            ("\x1b[31mprocess 1 on here\n", "by another process;"),
            ("", "by another process;"),
            ("process 1 on some-other-machine\n", "by another process on some-other-machine;"),
        ):
            (tmp_path / "lock").write_text(text)
            with pytest.raises(UsageError, match=re.escape(named)), claimed(tmp_path):
                pass
    finally:
        end(other)


def test_a_link_or_a_special_file_is_refused_and_what_it_points_to_is_not_touched(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "lock").symlink_to(victim)
    with pytest.raises(StorageError, match="is a symbolic link"), claimed(tmp_path):
        pass
    assert victim.read_text() == "precious"
    (tmp_path / "lock").unlink()
    os.mkfifo(tmp_path / "lock")
    with pytest.raises(StorageError, match="is a named pipe"), claimed(tmp_path):
        pass


def test_the_descriptor_is_closed_on_exec(tmp_path):
    with claimed(tmp_path):
        seen = subprocess.run(
            ["ls", "-l", "/proc/self/fd"], close_fds=False, capture_output=True, text=True, timeout=LONG
        )
        assert str(tmp_path / "lock") not in seen.stdout
