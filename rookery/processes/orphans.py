"""Finds and ends what environments have started: with the worker, with the run, and after a kill -9 of the trainer.

Processes are found by a mark: the soft limit RLIMIT_LOCKS. Linux stopped enforcing that limit in 2.4.25, but every
process still has it, and hands it on to all descendants: through fork, exec, setsid, a double fork, an empty process
environment and closed descriptors. No process tree has to be walked, and a parent may have ended. A process can
remove its own mark; this is not a sandbox.

A mark is 2^62, plus 46 random bits that name the trainer's process (its family), plus a number for one worker of it.

`python -I -S orphans.py PID FAMILY` is the guard: it waits for the end of the trainer, kills the family, and exits.
This file therefore imports the standard library only. Where the system has no such limit (macOS, gVisor) nothing is
marked, and only process groups are ended.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import ParamSpec, TypeVar

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

P = ParamSpec("P")
T = TypeVar("T")

_LIMIT = 10  # RLIMIT_LOCKS, which the module `resource` does not name
_NUMBERS = 1 << 16  # marks of one family
GONE = 2.0  # seconds for the kernel to end what was killed

_mutex = threading.Lock()
_family: tuple[int, int] = (0, 0)  # process, and the first mark of its family
_numbers: Iterator[int] = iter(())
_here: list[int] = []  # marks of this process itself; the last one counts
_bare: tuple[int, int] | None = None  # its limit without any


def new_mark() -> int:
    """A mark that no process has."""
    global _family, _numbers
    with _mutex:
        if _family[0] != os.getpid():  # the first one, or we were forked
            _family = os.getpid(), (1 << 62) + (int.from_bytes(os.urandom(6)) >> 2) * _NUMBERS
            _numbers = itertools.cycle(range(_NUMBERS))
        return _family[1] + next(_numbers)


def put_mark(pid: int) -> int | None:
    """Mark a child and all that it will start. None if this system cannot."""
    mark = new_mark()
    try:
        resource.prlimit(pid, _LIMIT, (mark, resource.prlimit(pid, _LIMIT)[1]))
    except (AttributeError, OSError, ValueError):
        return None
    return mark


def end_marked(marks: Iterable[int | None] | range, seconds: float = 0.0) -> bool:
    """Kill all processes that have one of these marks, except this one; wait so long for their end. Whether all ended.

    A process that was sent SIGKILL cannot fork any more. So, once a scan of all processes finds no new one, no new one
    can appear.
    """
    wanted = marks if isinstance(marks, range) else frozenset(marks) - {None}
    until, pause = time.monotonic() + seconds, 0.001
    killed: set[int] = set()
    while wanted:
        living = _living(wanted)
        new = [pid for pid in living if pid not in killed]
        for pid in new:
            with contextlib.suppress(OSError):  # gone by now, or another user's
                os.kill(pid, signal.SIGKILL)
            killed.add(pid)
        if not living:
            break
        if not new:
            if time.monotonic() >= until:
                return False
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
    for pid in killed:
        with contextlib.suppress(OSError):  # not our child
            os.waitpid(pid, os.WNOHANG)
    return True


def _living(marks: frozenset[int | None] | range) -> list[int]:
    """Processes with one of these marks that have not ended: about 5 microseconds for each process of the machine."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError, ValueError):  # gone by now, or another user's
                if resource.prlimit(int(name), _LIMIT)[0] in marks and _state(name) not in "ZX":
                    found.append(int(name))
    return found


def _state(pid: str) -> str:
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()[0].decode()


class MarkedHere:
    """Context manager around environments that live in this process: what it starts meanwhile is ended with them.

    That is everything that any thread of this process starts, except within `paused`.
    """

    def __enter__(self) -> MarkedHere:
        self._pid, mark = os.getpid(), new_mark()
        self._mark = mark if _wear(add=mark) else None
        return self

    def __exit__(self, *error: object) -> None:
        if os.getpid() == self._pid:  # and not a child that an environment has forked and that now exits
            _wear(remove=self._mark)
            with contextlib.suppress(OSError):  # no descriptor is left to look with: the guard finds them later
                end_marked([self._mark], GONE)

    def paused(self, work: Callable[P, T]) -> Callable[P, T]:
        """The same work, during which nothing is marked."""

        def unmarked(*args: P.args, **kwargs: P.kwargs) -> T:
            _wear(remove=self._mark)
            try:
                return work(*args, **kwargs)
            finally:
                _wear(add=self._mark)

        return unmarked


@contextlib.contextmanager
def marking(mark: int) -> Iterator[None]:
    """What this process starts meanwhile has this mark, and what that starts."""
    _wear(add=mark)
    try:
        yield
    finally:
        _wear(remove=mark)


def _wear(add: int | None = None, remove: int | None = None) -> bool:
    """Change the marks of this process itself; several runs in threads of one process may each have one.

    False if this system has no marks.
    """
    global _bare
    with _mutex, contextlib.suppress(AttributeError, OSError, ValueError):
        _bare = _bare or resource.getrlimit(_LIMIT)
        marks = [mark for mark in _here if mark != remove] + ([] if add is None else [add])
        resource.setrlimit(_LIMIT, (marks[-1], _bare[1]) if marks else _bare)
        _here[:] = marks
        _bare = _bare if marks else None
        return True
    return False


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Around a run: if this process is killed, a small process of its own (10 MB) ends what is marked."""
    pid, guard = os.getpid(), _start_guard()
    try:
        yield
    finally:
        if guard is not None and os.getpid() == pid:
            guard.kill()
            guard.wait()


def _start_guard() -> subprocess.Popen | None:
    if resource is None or not hasattr(resource, "prlimit") or not hasattr(os, "pidfd_open"):
        return None
    family = new_mark() // _NUMBERS * _NUMBERS
    command = [sys.executable, "-I", "-S", os.path.abspath(__file__), str(os.getpid()), str(family)]
    # It inherits the blocked signals: batch systems signal every process, and it is needed when all others have ended.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        quiet = subprocess.DEVNULL
        return subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, cwd="/", start_new_session=True)
    except (OSError, ValueError, TypeError):  # no descriptors, no memory, an embedded interpreter: go on without
        return None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _watch(parent: int, family: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        fd = os.pidfd_open(parent)
        if os.getppid() == parent:  # or it ended before we looked, and its number may be another's
            poller = select.poll()
            poller.register(fd, select.POLLIN)
            poller.poll()
    end_marked(range(family, family + _NUMBERS), GONE)


if __name__ == "__main__":
    _watch(int(sys.argv[1]), int(sys.argv[2]))
