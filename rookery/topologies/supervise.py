"""Child processes that are watched: started, listened to, aborted with their stack in the log, replaced, never leaked.

The parent's side is `Worker`, with `Restarts` and `Deadline` for when to give up; the child's side is `serve` (or
`child_entry` and `report_failure`, its two halves). A worker is a module run by `python -m`: the user's script is not
imported again, and nothing is pickled. What the two say to each other is the topology's affair, except for
{"op": "ready", ...}, the child's first message; {"op": "failed", ...}, its last one after an error; and {"op": "stop"},
the parent's polite request.

Promises hold on Linux; elsewhere a child whose parent was killed ends at its next look at the channel.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rookery.errors import RookeryError
from rookery.folder import open_regular
from rookery.pipes.channel import Channel, ChannelClosed, ChannelTimeout, pair
from rookery.pipes.machine import Machine
from rookery.topologies.threads import limit_child_env

# The parent decides when a child ends; Ctrl-C and batch systems signal everybody.
DEAF = {getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name)}
ABORT_WAIT = 0.5  # seconds for a stuck child to write its stack
KILL_WAIT = 5.0  # seconds for the kernel to end a killed one
TAIL_BYTES = 1 << 16


class Worker:
    """One child process.

    The kernel kills it when the *thread* that started it ends: start workers from a thread that outlives them.
    It leads a process group of its own, so that what it has started itself goes with it.
    """

    def __init__(self, name: str, process: subprocess.Popen, channel: Channel, log: Path | None, log_start: int):
        self.name = name
        self.channel = channel
        self.log = log
        self._log_start = log_start  # the file is appended to: where this incarnation begins
        self._process = process
        self._oom_kills = Machine().oom_kills()
        self._peak = 0  # bytes of memory, known after the end
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
        output, log_start = _open_log(log)
        # Blocked until the child has made itself deaf, so that no signal finds it in between. None is lost to us.
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
        worker = cls(name, process, channel, log if output is not None else None, log_start)
        envelope = {"sys_path": path, "pythonpath": os.environ.get("PYTHONPATH"), "fds": fds, "message": start_message}
        try:
            channel.send(envelope, timeout)
        except ChannelClosed:
            pass
        except BaseException:
            worker.kill()
            _await_end([worker], KILL_WAIT)
            raise
        return worker

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
        if self.channel.ended:  # its end of stream comes a moment before its end
            _await_end([self], ABORT_WAIT)
        code = self.exitcode
        if code is None:
            return "is running" if not self.channel.ended else "has closed its channel, and is running"
        if self._aborted:
            return f"was aborted by us; its stack is in {self.log}" if self.log else "was aborted by us"
        if code >= 0:
            return f"ended with exit code {code}"
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        if code == -signal.SIGKILL:
            peak = f"its peak was {self._peak / 2**20:.0f} MiB"
            if Machine().oom_kills() > self._oom_kills:
                return f"was killed by SIGKILL: out of memory, says the cgroup ({peak}); use fewer or smaller workers"
            return f"was killed by SIGKILL: probably out of memory ({peak}; see dmesg), or somebody's kill -9"
        if code in (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT, -signal.SIGILL, -signal.SIGFPE):
            where = f"; its stack is in {self.log}" if self.log else ""
            return f"was killed by {name}: a crash in native code{where}"
        return f"was killed by {name}"

    def log_tail(self, lines: int = 20) -> str:
        """The last lines that this incarnation wrote."""
        if self.log is None:
            return ""
        try:
            with self.log.open("rb") as file:
                file.seek(max(self._log_start, file.seek(0, os.SEEK_END) - TAIL_BYTES))
                text = file.read().decode(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-lines:])

    def ask_to_stop(self) -> None:
        """The polite request, once; does not wait for the end."""
        if not self._asked:
            self._asked = True
            with contextlib.suppress(ChannelClosed, ChannelTimeout):
                self.channel.send({"op": "stop"}, timeout=1.0)

    def stop(self, timeout: float) -> list[dict[str, Any]]:
        """Ask it to end, abort it at the deadline; returns what it still had to say."""
        return stop_all([self], timeout)[self.name]

    def abort(self) -> None:
        """End a worker that does not answer: its stack goes to the log, then it is killed."""
        abort_all([self])

    def kill(self) -> None:
        """SIGKILL to it and to whatever it has started; does not wait."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self._process.returncode is None:  # not yet reaped, so the number is still its own
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def _reap(self) -> bool:
        """Collect the child if it has ended. Its group is killed first, while its number cannot be anybody else's."""
        try:
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
                return False
            self.kill()
            _, status, usage = os.wait4(self.pid, 0)
        except ChildProcessError:  # somebody else has collected it (SIGCHLD ignored): the code is lost
            self._process.returncode = 255
            return True
        self._process.returncode = os.waitstatus_to_exitcode(status)
        self._peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return True


def stop_all(workers: Sequence[Worker], timeout: float) -> dict[str, list[dict[str, Any]]]:
    """Ask all to end, under one deadline, and abort the rest. Returns what each still had to say."""
    until = time.monotonic() + timeout
    for worker in workers:
        worker.ask_to_stop()
    said: dict[str, list[dict[str, Any]]] = {worker.name: [] for worker in workers}
    living = list(workers)
    while living and time.monotonic() < until:
        if not _listen(living, said):
            time.sleep(0.005)
        living = [worker for worker in living if worker.alive()]
    abort_all(living)
    while _listen(workers, said):  # finite: they have all ended
        pass
    for worker in workers:
        worker.channel.close()
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
    """SIGABRT, so that faulthandler writes every stack to the log; then SIGKILL; all collected."""
    living = [worker for worker in workers if worker.alive()]
    for worker in living:
        worker._aborted = True
        worker._signal(signal.SIGABRT)
        worker._signal(signal.SIGCONT)  # a stopped process takes its signals when it goes on
    living = _await_end(living, ABORT_WAIT)
    for worker in living:
        worker.kill()
    _await_end(living, KILL_WAIT)


def _await_end(workers: Sequence[Worker], timeout: float) -> list[Worker]:
    """Wait until all have ended; returns those that have not."""
    until = time.monotonic() + timeout
    pause = 0.001
    living = [worker for worker in workers if worker.alive()]
    while living and time.monotonic() < until:
        time.sleep(pause)
        pause = min(2 * pause, 0.02)
        living = [worker for worker in living if worker.alive()]
    return living


def _open_log(log: Path | None) -> tuple[int | None, int]:
    """Descriptor to append to, and its present size. A log that cannot be opened does not stop a run."""
    if log is None:
        return None, 0
    try:
        folder = log.parent.parent
        folder.mkdir(parents=True, exist_ok=True)
        fd = open_regular(folder, f"{log.parent.name}/{log.name}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, sole=True)
    except OSError:
        return None, 0
    return fd, os.fstat(fd).st_size


class Restarts:
    """Bounded retries: 0.5, 1, 2, … seconds apart, at most `limit` within `window` seconds, or without any success."""

    def __init__(self, limit: int, window: float, clock: Callable[[], float] = time.monotonic):
        self.limit = limit
        self.window = window
        self.count = 0  # of all time, for the metrics
        self._clock = clock
        self._recent: deque[float] = deque()
        self._in_vain = 0  # since anything came of one: those that fail slowly would never fill a window

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
    asleep too: the deadline starts anew. Once per sign of life, so that a parent that looks seldom still notices.
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


Body = Callable[[Channel, dict[str, Any], dict[str, int]], None]


def serve(body: Body) -> None:
    """All that the `__main__` of a worker module needs: body(channel, start_message, fds), with errors reported.

    Import torch and environments inside the body: until `child_entry` has run, the child does not notice that its
    parent has died.
    """
    channel, message, fds = child_entry()
    try:
        body(channel, message, fds)
    except ChannelClosed:  # the parent is gone: nobody to tell
        os._exit(1)
    except BaseException as error:
        report_failure(channel, error)


def child_entry(timeout: float = 60.0) -> tuple[Channel, dict[str, Any], dict[str, int]]:
    """Make this process a worker of its parent; returns the channel, the start message and the descriptors."""
    fd, parent = (int(word) for word in sys.argv[-2:])
    del sys.argv[1:]  # ours, and nothing for an environment to parse
    _die_with(parent)
    if not faulthandler.is_enabled():
        faulthandler.enable(all_threads=True)
    for number in DEAF:
        # A handler that does nothing, and not SIG_IGN, which the programs an environment starts would inherit.
        signal.signal(number, _deaf)
        signal.siginterrupt(number, False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, DEAF)
    os.set_inheritable(fd, False)  # a grandchild must not hold the channel open
    channel = Channel.from_fd(fd)
    os.register_at_fork(after_in_child=lambda: _become_ordinary(channel))
    envelope = channel.recv(timeout)
    sys.path[:] = envelope["sys_path"]
    os.environ.pop("PYTHONPATH", None)
    if envelope["pythonpath"] is not None:
        os.environ["PYTHONPATH"] = envelope["pythonpath"]
    for number in envelope["fds"].values():
        os.set_inheritable(number, False)
    return channel, envelope["message"], envelope["fds"]


def report_failure(channel: Channel, error: BaseException) -> NoReturn:
    """Tell the parent, write the traceback to the log, exit with code 1 whatever threads an environment has left."""
    text = "".join(traceback.format_exception(error))
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.write(text)
        sys.stderr.flush()
    failure = {
        "op": "failed",
        "error": str(error) if isinstance(error, RookeryError) else f"{type(error).__name__}: {error}",
        "reason": str(getattr(error, "reason", "worker_error")),
        "exit_code": int(getattr(error, "exit_code", 1)),
        "traceback": text,
    }
    with contextlib.suppress(Exception):
        channel.send(failure, timeout=5.0)
    os._exit(1)


def _die_with(parent: int) -> None:
    """Have the kernel kill us when the parent ends, also by kill -9."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it ended before we asked
        os._exit(1)


def _deaf(number: int, frame: object) -> None:
    pass


def _become_ordinary(channel: Channel) -> None:
    """In a process that an environment forks: hear signals again, let go of the channel."""
    channel.close()
    for number in DEAF:
        if signal.getsignal(number) is _deaf:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
