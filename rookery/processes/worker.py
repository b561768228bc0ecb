"""Child processes that are watched: started, polled, aborted with their stack in the log, replaced, never leaked.

This is the parent's side: `Worker`, with `Restarts` and `Deadline` for when to give up. The child's side is `child.py`.
A worker is a module run by `python -m`: the user's script is not imported again, and nothing is pickled. The messages
are defined by the topology, except for {"op": "ready", ...}, the child's first message; {"op": "failed",
...}, its last one after an error; {"op": "stop"}, the parent's request to end; and {"op": "assign", ...}, which gives
a spare process its work.

This holds on Linux; elsewhere a child whose parent was killed ends when it next reads the channel.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rookery.core.errors import RookeryError
from rookery.core.machine import Machine
from rookery.pipes.channel import Channel, ChannelClosed, ChannelTimeout, pair
from rookery.processes.child import DEAF
from rookery.processes.orphans import GONE, end_marked, put_mark
from rookery.processes.threads import limit_child_env
from rookery.processes.worker_log import WorkerLog

ABORT_WAIT = 0.5  # seconds for a stuck child to write its stack
KILL_WAIT = 5.0  # seconds for the kernel to end a killed one


class Worker:
    """One child process.

    The kernel kills it when the *thread* that started it ends: start workers from a thread that outlives them. What it
    has started itself is killed when its end is noticed: by its process group, and by its mark (see orphans.py).
    """

    placed = True  # there is always room on this machine

    def __init__(self, name: str, process: subprocess.Popen, channel: Channel, log: WorkerLog | None):
        self.name = name
        self.channel = channel
        self.log = log
        self.mark = put_mark(process.pid)
        self._process = process
        self._oom_kills = Machine().oom_kills()
        self._peak = 0  # bytes of memory, known after the end
        self._abort_at: float | None = None  # when it is to be aborted
        self._aborted = False
        self._asked = False

    @classmethod
    def start(
        cls, module: str, name: str, start_message: dict[str, Any], fds: dict[str, int], log: Path | None = None,
        timeout: float = 60.0,
    ) -> Worker:  # fmt: skip
        """Run `python -m module` with the given descriptors open and the message waiting for it.

        A child that dies at once is returned like any other: its channel is at its end, `describe_exit` says why.
        `timeout` only matters for a message too large for the socket, which must wait for the child to read it.
        """
        channel, child_fd = pair()
        path = [entry or os.getcwd() for entry in sys.path]
        command = [sys.executable, "-P", "-X", "faulthandler", "-m", module, name, str(child_fd), str(os.getpid())]
        environment = {**os.environ, **limit_child_env(), "PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1"}
        output, worker_log = _open_log(log)
        # Blocked until the child ignores them, so that no signal arrives in between. The parent loses none.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, DEAF)
        try:
            process = subprocess.Popen(
                command, env=environment, pass_fds=(child_fd, *fds.values()), process_group=0,
                stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            )  # fmt: skip
        except OSError as error:
            channel.close()
            raise RookeryError(f"cannot start {name}: {error}") from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            os.close(child_fd)
            if output is not None:
                os.close(output)
        worker = cls(name, process, channel, worker_log)
        envelope = {"sys_path": path, "pythonpath": os.environ.get("PYTHONPATH"), "fds": fds, "message": start_message}
        try:
            channel.send(envelope, timeout)
        except ChannelClosed:
            pass
        except BaseException:
            worker.kill()
            await_end([worker], KILL_WAIT)
            raise
        return worker

    def assign(self, name: str, start_message: dict[str, Any], log: Path | None) -> bool:
        """Give a spare process (started with {"spare": True}) its work; False if it is not there to take it."""
        output, worker_log = _open_log(log)
        if output is not None:
            os.close(output)  # the child opens it by itself
        order = {"op": "assign", "message": start_message, "log": str(log.absolute()) if worker_log and log else None}
        try:
            self.channel.send(order, timeout=1.0)
        except (ChannelClosed, ChannelTimeout):
            return False
        self.name, self.log = name, worker_log
        return True

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exitcode(self) -> int | None:
        """None while it runs; minus the signal if one ended it."""
        self.alive()
        return self._process.returncode

    def alive(self) -> bool:
        return self._process.returncode is None and not self._reap()

    def describe_exit(self) -> str:
        """How it ended, in words for the first line of a failure."""
        code = self.exitcode
        if code is None:
            return "is running" if not self.channel.ended else "has closed its channel, and is running"
        if self._aborted:
            return f"was aborted by us; its stack is in {self.log.path}" if self.log else "was aborted by us"
        if code >= 0:
            return f"ended with exit code {code}"
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        if code == -signal.SIGKILL:
            peak = f"its peak was {self._peak / 2**20:.0f} MiB"
            if Machine().oom_kills() > self._oom_kills:
                return f"was killed by SIGKILL: out of memory in its cgroup ({peak}); use fewer or smaller workers"
            return f"was killed by SIGKILL: probably out of memory ({peak}; see dmesg), or kill -9"
        if code in (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT, -signal.SIGILL, -signal.SIGFPE):
            where = f"; its stack is in {self.log.path}" if self.log else ""
            return f"was killed by {name}: a crash in native code{where}"
        return f"was killed by {name}"

    def log_tail(self, lines: int = 20) -> str:
        """The last lines that this process wrote."""
        return "" if self.log is None else self.log.tail(lines)

    def ask_to_stop(self) -> None:
        """The request to end, once; does not wait."""
        if not self._asked:
            self._asked = True
            with contextlib.suppress(ChannelClosed, ChannelTimeout):
                self.channel.send({"op": "stop"}, timeout=1.0)

    def stop(self, timeout: float) -> list[dict[str, Any]]:
        """Ask it to end, abort it at the deadline; returns the messages that were left."""
        return stop_all([self], timeout)[self.name]

    def abort(self, patience: float = 0.0) -> None:
        """Have it ended, if it has not ended by itself in `patience` seconds. Does not wait: `gone` carries it on."""
        at = time.monotonic() + patience
        self._abort_at = at if self._abort_at is None else min(at, self._abort_at)

    def gone(self) -> bool:
        """Whether it has ended. Each call takes the next step of an abort that is due, and none of them waits.

        First SIGABRT, so that faulthandler writes every stack to the log; after ABORT_WAIT seconds SIGKILL.
        """
        if not self.alive():
            return True
        now = time.monotonic()
        if self._abort_at is not None and now >= self._abort_at:
            if not self._aborted:
                self._aborted, self._abort_at = True, now
                self._signal(signal.SIGABRT)
                self._signal(signal.SIGCONT)  # a stopped process takes its signals when it goes on
            elif now >= self._abort_at + ABORT_WAIT:
                self.kill()
        return False

    def kill(self) -> None:
        """SIGKILL to it and to its process group; does not wait."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self._process.returncode is None:  # not yet reaped, so the number is still its own
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def _reap(self) -> bool:
        """Collect the child if it has ended. Its group is killed first, while its number cannot be reused."""
        try:
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
                return False
            self.kill()
            _, status, usage = os.wait4(self.pid, 0)
        except ChildProcessError:  # other code has reaped it (SIGCHLD ignored): the exit code is lost
            self._process.returncode = 255
        else:
            self._process.returncode = os.waitstatus_to_exitcode(status)
            self._peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        with contextlib.suppress(OSError):  # no descriptor is left to look with; the guard, if any, finds them later
            end_marked([self.mark])
        return True


def stop_all(workers: Sequence[Worker], timeout: float) -> dict[str, list[dict[str, Any]]]:
    """Ask all to end, under one deadline, and abort the rest. Returns the messages that were left of each.

    What they have started has ended too when this returns, unless the kernel cannot end it.
    """
    until = time.monotonic() + timeout
    for worker in workers:
        worker.ask_to_stop()
    said: dict[str, list[dict[str, Any]]] = {worker.name: [] for worker in workers}
    living = list(workers)
    while living and time.monotonic() < until:
        if not _listen(living, said):
            time.sleep(0.005)
        living = [worker for worker in living if not worker.gone()]
    abort_all(living)
    while _listen(workers, said):  # finite: they have all ended
        pass
    for worker in workers:
        worker.channel.close()
    with contextlib.suppress(OSError):
        end_marked([worker.mark for worker in workers], GONE)
    return said


def _listen(workers: Sequence[Worker], said: dict[str, list[dict[str, Any]]]) -> bool:
    """A message of each that has one: a child blocked on a full socket would never read that it is to stop."""
    heard = False
    for worker in workers:
        with contextlib.suppress(ChannelClosed):
            if worker.channel.poll():
                said[worker.name].append(worker.channel.recv(0.0))
                heard = True
    return heard


def abort_all(workers: Sequence[Worker]) -> None:
    """Abort all, and wait for their end."""
    for worker in workers:
        worker.abort()
    await_end(workers, ABORT_WAIT + KILL_WAIT)


def await_end(workers: Sequence[Worker], timeout: float) -> list[Worker]:
    """Wait until all have ended; returns those that have not."""
    until = time.monotonic() + timeout
    pause = 0.001
    living = [worker for worker in workers if not worker.gone()]
    while living and time.monotonic() < until:
        time.sleep(pause)
        pause = min(2 * pause, 0.02)
        living = [worker for worker in living if not worker.gone()]
    return living


def _open_log(path: Path | None) -> tuple[int | None, WorkerLog | None]:
    log = None if path is None else WorkerLog(path)
    fd = None if log is None else log.open()
    return fd, None if fd is None else log


class Restarts:
    """Bounded retries: 0.5, 1, 2, … seconds apart, at most `limit` within `window` seconds, or without any success."""

    def __init__(self, limit: int, window: float, clock: Callable[[], float] = time.monotonic):
        self.limit = limit
        self.window = window
        self.count = 0  # of all time, for the metrics
        self._clock = clock
        self._recent: deque[float] = deque()
        self._in_vain = 0  # since one of them succeeded: those that fail slowly would never fill a window

    def worked(self) -> None:
        self._in_vain = 0

    def next(self, error: Exception) -> float:
        """Call once per failure: seconds to wait before the replacement. Once there were too many, raises `error`."""
        now = self._clock()
        while self._recent and now - self._recent[0] > self.window:
            self._recent.popleft()
        if max(len(self._recent), self._in_vain) >= self.limit:
            raise error
        self._recent.append(now)
        self._in_vain += 1
        self.count += 1
        return min(0.5 * 2 ** (len(self._recent) - 1), 30.0)


class Deadline:
    """Time that may pass without a sign of life.

    If we ourselves did not look for more than `gap` seconds (suspended, stopped in a debugger), the peer was probably
    asleep too: the deadline starts again. Once per sign of life, so that a parent that looks seldom still notices.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic, gap: float = 5.0):
        self.seconds = seconds
        self._clock = clock
        self._gap = gap
        self._sign: object = None
        self.rearm()

    def rearm(self) -> None:
        """A sign of life, or nothing is expected at present."""
        self._looked = self._clock()
        self._until = self._looked + self.seconds
        self._forgiven = False

    def expired(self, sign: object = None) -> bool:
        """Look. A `sign` other than the last one (a heartbeat) is a sign of life."""
        now = self._clock()
        if sign != self._sign:
            self._sign = sign
            self.rearm()
        elif now - self._looked > self._gap and not self._forgiven:
            self._until, self._forgiven = now + self.seconds, True
        self._looked = now
        return now >= self._until

    def left(self) -> float:
        """Seconds left as of the last look: how long a wait may be."""
        return max(0.0, self._until - self._looked)
