"""The processes of a sweep: each trains one run, at most so many at a time.

They are workers as `processes/worker.py` has them: the kernel ends them if this process is killed, a signal reaches
them through us, and what they print goes to `logs/run.log` in their run folder. Not here: which run is next.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rookery.algorithms.registry import encode_config
from rookery.core.config import RunConfig
from rookery.core.errors import LearnerError, RookeryError
from rookery.pipes.channel import ChannelClosed, ChannelTimeout, Listener
from rookery.processes.signals import SIGNAL, Signals
from rookery.processes.worker import Worker, stop_all

MODULE = "rookery.sweeps.child"
LOG = Path("logs", "run.log")  # in the run folder
CLOSING = 20.0  # seconds beyond a run's own `supervisor.grace` to end after a request
STOP = 10.0  # seconds to end after the last message
TAIL = 20  # lines of the log of a run that failed


@dataclass(frozen=True)
class Ended:
    """How a process has ended. `exit_code` 75 and 130: it was asked to, and can be resumed."""

    name: str
    exit_code: int
    error: str = ""
    log: str = ""  # its last lines, if it failed

    @property
    def stopped(self) -> bool:
        return self.exit_code in SIGNAL


class Runner:
    """Context manager: none of the processes outlives it."""

    def __init__(self, jobs: int, signals: Signals):
        self.jobs, self._signals = jobs, signals
        self._workers: dict[str, Worker] = {}  # by the name of the run
        self._grace = 0.0
        self._told: float | None = None  # when shutdown was passed on

    def __enter__(self) -> Runner:
        self._listener = Listener(self._signals.fileno())
        self._signals.kill = self.kill
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is not None:
            self.kill()
        stop_all(list(self._workers.values()), STOP)
        self._listener.close()

    @property
    def running(self) -> list[str]:
        return list(self._workers)

    @property
    def free(self) -> int:
        return self.jobs - len(self._workers)

    def kill(self) -> None:
        for worker in self._workers.values():
            worker.kill()

    def start(self, name: str, config: RunConfig, resume: bool, trust: Sequence[str]) -> None:
        message = {"config": encode_config(config), "resume": resume, "trust": list(trust)}
        worker = Worker.start(MODULE, f"run {name}", message, {}, Path(config.out) / LOG)
        worker.mark = None  # what a run has started is ended by a guard of its own, which has to outlive it
        self._grace = max(self._grace, config.supervisor.grace)
        self._workers[name] = worker
        self._listener.add(worker.channel)

    def wait(self, seconds: float) -> list[Ended]:
        """The runs that have ended, after so many seconds at most."""
        self._listener.wait(seconds)
        self._pass_on()
        ended = [end for name, worker in self._workers.items() if (end := self._hear(name, worker)) is not None]
        for end in ended:
            worker = self._workers.pop(end.name)
            self._listener.remove(worker.channel)
            worker.stop(STOP)
        return ended

    def _pass_on(self) -> None:
        """A request to shut down goes to all runs; those that do not end in time are aborted."""
        if self._signals.requested is None:
            return
        if self._told is None:
            self._told = time.monotonic()
            for worker in self._workers.values():
                _send(worker, {"op": "shutdown", "code": self._signals.requested})
        elif time.monotonic() > self._told + self._grace + CLOSING:
            for worker in self._workers.values():
                worker.abort()
                worker.gone()

    def _hear(self, name: str, worker: Worker) -> Ended | None:
        try:
            while worker.channel.poll():
                message = worker.channel.recv(0.0)
                if message["op"] == "done":
                    return Ended(name, message["exit_code"])
                if message["op"] == "failed":
                    return _failed(name, message, worker)
        except (ChannelClosed, ChannelTimeout):
            self._listener.remove(worker.channel)  # before `stop` closes it: the next run may get the same descriptor
            worker.stop(STOP)
            return Ended(name, LearnerError.exit_code, f"its process {worker.describe_exit()}", worker.log_tail(TAIL))
        return None


def _failed(name: str, message: dict[str, Any], worker: Worker) -> Ended:
    code = message["exit_code"]
    if code in SIGNAL:  # asked to stop before it had begun
        return Ended(name, code)
    code = LearnerError.exit_code if code == RookeryError.exit_code else code
    return Ended(name, code, message["error"], worker.log_tail(TAIL))


def _send(worker: Worker, message: dict[str, Any]) -> None:
    try:
        worker.channel.send(message, timeout=1.0)
    except (ChannelClosed, ChannelTimeout):
        return
