"""Runs the processes of a benchmark one after the other. Each has a deadline; what it has started ends with it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

POLITE, HARD = 20.0, 10.0  # seconds to end after SIGINT; for what is left over to end by itself
STEP = 0.05  # seconds between two looks
TICK = os.sysconf("SC_CLK_TCK")


class Failed(Exception):
    """A process did not measure anything; says why."""


def run(command: Sequence[str | os.PathLike[str]], seconds: float) -> str:
    """What the command prints. Failed if it fails or takes longer; all that it has started has ended in any case."""
    words = " ".join(Path(word).name if "/" in str(word) else str(word) for word in command)
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=out, stderr=errors, start_new_session=True)
        try:
            if not _ended(process, seconds):
                raise Failed(f"no result after {seconds:.0f} s: {words}")
        finally:
            with _handled_by(signal.SIG_IGN):  # a second Ctrl-C does not interrupt the end; it has deadlines
                _end(process)
        out.seek(0), errors.seek(0)
        if process.returncode:
            lines = [line for line in errors.read().splitlines() if line.strip()]
            raise Failed("\n".join([f"exit code {process.returncode}: {words}", *lines[-15:]]))
        return out.read()


@contextlib.contextmanager
def adopted() -> Iterator[None]:
    """Orphans among our descendants become our children, so that they are found. SIGTERM interrupts like Ctrl-C.

    Ctrl-C works also where a shell has started us in the background, with that signal ignored.
    """
    pr_set_child_subreaper = 36
    ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0)
    with _handled_by(signal.default_int_handler):
        yield


@contextlib.contextmanager
def _handled_by(handler: Any) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, other in before.items():
            signal.signal(number, other)


def _end(process: subprocess.Popen) -> None:
    polite = process.poll() is not None
    if not polite:
        process.send_signal(signal.SIGINT)
        polite = _ended(process, POLITE)
    left = _left(process, HARD if polite else 0.0)
    if left:
        print(f"killed, because it did not end by itself: {', '.join(left.values())}", file=sys.stderr)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for pid in _left(process, HARD if left else 0.0):  # started meanwhile
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait(HARD)


def _ended(process: subprocess.Popen, seconds: float) -> bool:
    """Whether it has ended after at most so long."""
    until = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < until:
        _collect(process)
        time.sleep(STEP)
    return process.poll() is not None


def _left(process: subprocess.Popen, seconds: float) -> dict[int, str]:
    """Our descendants that have not ended after so long, with their names."""
    until = time.monotonic() + seconds
    while True:
        process.poll()
        _collect(process)
        found = tree(os.getpid())
        left = {pid: s["name"][:100] for pid, s in found.items() if pid != os.getpid() and s["state"] not in "ZX"}
        if not left or time.monotonic() >= until:
            return left
        time.sleep(STEP)


def _collect(process: subprocess.Popen) -> None:
    """Adopted processes that have ended. RLlib waits until they are gone."""
    with contextlib.suppress(ChildProcessError):  # there are none
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid == process.pid:
                return
            os.waitpid(ended.si_pid, 0)


def tree(root: int) -> dict[int, dict[str, Any]]:
    """A process and all its descendants: name, state, seconds of processor time. Empty if it has ended."""
    all_of_them: dict[int, dict[str, Any]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):  # it has ended
                stat, words = Path(f"/proc/{name}/stat").read_text(), Path(f"/proc/{name}/cmdline").read_bytes()
                title, _, rest = stat.partition(" (")[2].rpartition(") ")
                fields = rest.split()
                all_of_them[int(name)] = {
                    "name": words.replace(b"\0", b" ").decode(errors="replace").strip() or title,
                    "state": fields[0], "parent": int(fields[1]), "cpu": (int(fields[11]) + int(fields[12])) / TICK,
                }  # fmt: skip
    found, edge = dict[int, dict[str, Any]](), [root] if root in all_of_them else []
    while edge:
        for pid in edge:
            found[pid] = all_of_them[pid]
        edge = [pid for pid, stat in all_of_them.items() if stat["parent"] in edge]
    return found
