"""Environments that start processes beside themselves, in every way that gets them out of sight; and how to find them.

The processes are told apart by the folder they work in: no mark of ours is needed to see them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import gymnasium

from rookery.envs.scripted import Counter

WAYS = ("fork", "fork_setsid", "double_fork", "session", "bare", "thread")
LONG = 60.0  # seconds: never reached unless something is broken


def start(way: str, folder: str) -> None:
    """A process that stays, in `folder`, away from its parent in one way or another."""
    if way in ("session", "bare", "thread"):
        environment = {} if way == "bare" else None
        subprocess.Popen(["/bin/sleep", "3600"], cwd=folder, start_new_session=way != "thread", env=environment)
        return
    child = os.fork()
    if child:
        if way == "double_fork":
            os.waitpid(child, 0)
        return
    os.chdir(folder)
    if way != "fork":
        os.setsid()
    if way == "double_fork" and os.fork():
        os._exit(0)
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    while True:
        signal.pause()


class Breeding(Counter):
    """Starts a process in each of the ways when it is made, and every one at a later step again."""

    def __init__(self, folder: str, ways: list[str], again_at: int = 0):
        super().__init__(lengths=(20,))
        self.folder, self.ways, self.again_at, self.steps = folder, ways, again_at, 0
        for way in ways:
            start(way, folder)

    def step(self, action):
        self.steps += 1
        if self.steps == self.again_at:
            for way in self.ways:
                start(way, self.folder)
        return super().step(action)


def breeding(folder: str, ways: list[str], again_at: int = 0) -> gymnasium.Env:
    return Breeding(folder, ways, again_at)


def living(folder: Path) -> list[int]:
    """Processes whose working directory is this folder."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                state = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[0]
                if os.readlink(f"/proc/{name}/cwd") == str(folder) and state not in "ZX":
                    found.append(int(name))
            except OSError:
                continue
    return found


def clear(folder: Path) -> None:
    """So that a test that fails leaves nobody either."""
    for pid in living(folder):
        os.kill(pid, signal.SIGKILL)


def workers(folder: Path, nest: Path) -> list[int]:
    """Processes that write to the log of an actor in this run folder, without what they have forked."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                log, here = os.readlink(f"/proc/{name}/fd/1"), os.readlink(f"/proc/{name}/cwd")
            except OSError:
                continue
            if log.startswith(str(folder / "logs" / "actor")) and here != str(nest):
                found.append(int(name))
    return sorted(found)


def guards(pid: int) -> list[int]:
    """Guards of this process."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                words = Path(f"/proc/{name}/cmdline").read_text().split("\0")
            except OSError:
                continue
            if any(word.endswith("/orphans.py") for word in words) and str(pid) in words:
                found.append(int(name))
    return found


def until(condition: Callable[[], bool], what: str, seconds: float = LONG) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.02)


def environment() -> dict[str, str]:
    """For a command that shall find this file."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
