"""The worker processes of a crew and their life: started, spoken to, looked after, and always ended.

Which slot a worker fills, what its end costs and whether it is replaced is the crew's affair (`crew.py`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rookery.algorithms.registry import encode_config
from rookery.core.config import RunConfig
from rookery.crews.waiting import Waiting
from rookery.pipes import channel as channels
from rookery.pipes.channel import ChannelClosed, ChannelTimeout
from rookery.processes import failure
from rookery.processes.failure import Lost
from rookery.processes.signals import Patience, Signals
from rookery.processes.spare import Spare
from rookery.processes.worker import ABORT_WAIT, KILL_WAIT, Worker, stop_all

SEND = 10.0  # seconds for a worker to take a message, where it does not fit the socket
STOP = 3.0  # seconds for the workers to end when asked to
LOOK = 1.0  # seconds between two looks at logs and processes
STEP = 0.02  # seconds between two steps of an abort


class Staff:
    """`where` says what a worker is doing, for messages."""

    def __init__(
        self, config: RunConfig, logs: Path, signals: Signals, module: str, fds: Callable[[], dict[str, int]],
        where: Callable[[int], str],
    ):  # fmt: skip
        self.config, self.signals = config, signals
        self.workers: list[Worker] = []
        self.incarnation = [0] * config.actors
        self._logs, self._module, self._fds, self._where = logs, module, fds, where
        self._stuck: list[Worker] = []  # replaced, and the kernel has not ended them yet
        self._looked = 0.0
        self.spare = Spare(self._start_spare if config.supervisor.spare else None)

    def start(self, index: int) -> None:
        """A process for this place: the spare one if there is one."""
        start = self._message() | {"index": index, "incarnation": self.incarnation[index]}
        name, log = f"actor {index}", self._logs / f"actor-{index}.log"
        worker = self.spare.take()
        if worker is not None and not worker.assign(name, start, log):
            self._let_go(worker)
            worker = None
        if worker is None:
            worker = Worker.start(self._module, name, start, self._fds(), log)
        self.workers[index : index + 1] = [worker]  # the next one at the start, a successor later

    def _start_spare(self) -> Worker:
        return Worker.start(
            self._module, "spare", self._message() | {"spare": True}, self._fds(), self._logs / "spare.log"
        )

    def _message(self) -> dict[str, Any]:
        return {"config": encode_config(self.config).decode()}

    def ended(self, index: int, patience: float) -> Waiting[None]:
        """Wait for the end of a worker that was lost; it is aborted if it has not ended in `patience` seconds.

        One that the kernel cannot end is left behind: after SIGKILL it will not write to shared memory any more.
        """
        worker = self.workers[index]
        worker.abort(patience)
        until = time.monotonic() + patience + ABORT_WAIT + KILL_WAIT
        while not worker.gone():
            if time.monotonic() > until:
                self._let_go(worker)
                break
            yield [], STEP
        worker.channel.close()

    def _let_go(self, worker: Worker) -> None:
        worker.abort()
        worker.channel.close()
        self._stuck.append(worker)

    def look(self) -> None:
        """Once a second: collect who has ended, so that what it has started ends too; bound the logs; keep a spare."""
        now = time.monotonic()
        if now - self._looked < LOOK:
            return
        self._looked = now
        self._stuck = [worker for worker in self._stuck if not worker.gone()]
        for worker in self.workers:
            worker.alive()
            if worker.log is not None:
                worker.log.shorten()
        self.spare.look()

    def kill(self) -> None:
        for worker in self._everybody():
            worker.kill()

    def stop(self) -> None:
        """End everybody, politely if possible; waits for it."""
        stop_all(self._everybody(), STOP)

    def _everybody(self) -> list[Worker]:
        return [*self.workers, *self._stuck, *([] if self.spare.worker is None else [self.spare.worker])]

    # Words to and from a worker

    def channel(self, index: int) -> channels.Channel:
        return self.workers[index].channel

    def tell(self, index: int, message: dict[str, Any]) -> None:
        """Say what will be answered. One that is gone, or does not listen, is noticed where the answer is awaited.

        Not here: it may have announced unrolls before, and they are to be taken first.
        """
        with contextlib.suppress(ChannelClosed, ChannelTimeout):
            self.channel(index).send(message, SEND)

    def word(self, index: int, patience: Patience) -> Waiting[dict[str, Any]]:
        """The worker's next message; its failure, death or silence are raised as Lost."""
        channel = self.channel(index)
        while not channel.poll():
            left = patience.left()
            if left == 0.0:
                raise self.hung(index, patience.spent())
            yield [channel], left
        return self.read(index)

    def read(self, index: int) -> dict[str, Any]:
        """The message that lies in the channel."""
        try:
            message = self.channel(index).recv(0.0)
        except ChannelClosed as error:
            worker = self.workers[index]
            raise Lost(lambda: failure.died(worker, index, self._where(index))) from error
        if message["op"] == "failed":
            raise failure.told(message)
        return message

    def hung(self, index: int, seconds: float) -> Lost:
        worker, env, leaving = self.workers[index], self.config.env, self.signals.requested is not None
        return Lost(lambda: failure.hung(worker, index, env, self._where(index), seconds, leaving), patience=0.0)
