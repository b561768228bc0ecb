"""The worker processes of a crew and their life: started, watched, ended, replaced.

Every place for an actor is in one state, and `poll` moves each of them on. Nothing here waits for a single worker: the
others go on while one is ended or its replacement starts. `process.py` decides what a worker fills.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any, Protocol

import msgspec

from rookery.algorithms.registry import encode_config
from rookery.core.config import RunConfig
from rookery.core.errors import CheckpointError, EnvError
from rookery.core.types import EnvSpec, Failure
from rookery.core.wording import setting
from rookery.pipes.channel import Channel, ChannelClosed, ChannelTimeout, Listener
from rookery.processes import failure
from rookery.processes.failure import Lost
from rookery.processes.signals import Signals, Stopped
from rookery.processes.spare import Spare
from rookery.processes.worker import ABORT_WAIT, KILL_WAIT, Restarts, Worker, stop_all

MODULE = "rookery.crews.actor_main"
SEND = 10.0  # seconds for a worker to take a message, where it does not fit the socket
STOP = 3.0  # seconds for the workers to end when asked to
LOOK = 1.0  # seconds between two looks at logs and processes
STEP = 0.02  # seconds between two looks at a worker that is being ended
ASSIGNED = 5.0  # seconds for a spare process to take its work; one that does not is replaced


class State(Enum):
    STARTING = auto()  # loads libraries and makes its environments
    READY = auto()  # has made them, and waits to be told of the shared memory
    OPENING = auto()  # was told, and resets its environments
    UP = auto()  # fills what it is told to, or waits
    ENDING = auto()  # has failed, and is being ended
    DELAYED = auto()  # has ended; a replacement starts after a delay
    GONE = auto()  # has ended, and is not replaced


class Launcher(Protocol):
    """How the workers of a pool are started and ended."""

    spares: bool  # whether one can be started before it is known which worker it will replace
    least: int  # workers that are enough to go on while there is no room for the others; 0: all of them

    def start(self, name: str, message: dict[str, Any], log: Path) -> Worker: ...
    def stop(self, workers: Sequence[Worker], timeout: float) -> None:
        """End all, politely if possible; waits for it."""
        ...


class ProcessLauncher:
    """Processes of this machine: a Python module, run with the descriptors of shared memory."""

    spares, least = True, 0

    def __init__(self, module: str, fds: Callable[[], dict[str, int]]):
        self._module, self._fds = module, fds

    def start(self, name: str, message: dict[str, Any], log: Path) -> Worker:
        return Worker.start(self._module, name, message, self._fds(), log)

    def stop(self, workers: Sequence[Worker], timeout: float) -> None:
        stop_all(workers, timeout)


RESTARTING = (State.STARTING, State.READY, State.OPENING, State.DELAYED)


@dataclass
class Place:
    """One actor's place, held by one process after another."""

    index: int
    restarts: Restarts
    state: State = State.STARTING
    incarnation: int = 0
    worker: Worker | None = None
    began: float = 0.0  # when it came into this state
    until: float = 0.0  # when this state has lasted too long, or a delay is over
    spare: bool = False  # the process was a spare one, and has not taken its work yet
    lost: Lost | None = None  # why it is being ended


def _placed(place: Place) -> bool:
    """Whether its worker runs, or does not need to: one on a cluster may wait for room."""
    return place.state is not State.STARTING or place.worker is None or place.worker.placed


class WorkerPool:
    """`opened` tells a new worker of the shared memory; `up` and `ended` are called when one comes up, or is lost.

    `ended` returns the environment steps that are lost with it. `where` says what a worker is doing, for messages.
    """

    opened: Callable[[int], dict[str, Any]] | None = None  # the message; None until the memory is laid out
    failed: Callable[[Failure], None] | None = None

    def __init__(
        self, config: RunConfig, role: str, logs: Path, signals: Signals, launcher: Launcher,
        up: Callable[[int], None], ended: Callable[[int], int], where: Callable[[int], str], first: int = 0,
    ):  # fmt: skip
        self.config, self.signals = config, signals
        self.spec: EnvSpec | None = None  # as the first worker says that has made its environments
        self._role, self._logs, self._launcher, self._first = role, logs, launcher, first
        self._up, self._ended, self._where = up, ended, where
        limits = config.supervisor
        self.places = [Place(index, Restarts(limits.restarts, limits.window)) for index in range(config.actors)]
        self.about: dict[str, Any] = {}  # what the first said of its environments besides
        self._moving: set[int] = set()  # places that are not up, nor gone
        self._by_channel: dict[Channel, int] = {}
        self._listener = Listener(signals.fileno())
        self._early: list[Failure] = []  # before anybody could be told
        self._stuck: list[Worker] = []  # replaced, and the kernel has not ended them yet
        self._finishing = False
        self._looked = 0.0
        self.spare = Spare(self._start_spare if limits.spare and launcher.spares else None)

    def wake_on(self, fd: int) -> None:
        """Have a descriptor that becomes readable end the wait of `poll`."""
        self._listener.wake_on(fd)

    # Start and end of all

    def start(self) -> None:
        for place in self.places:
            self._start(place)

    def await_all(self, *states: State) -> None:
        """Wait until every place is in one of these states; `Stopped` if shutdown is requested before.

        Where fewer are enough, those for which there is no room yet are not waited for.
        """
        while missing := [place for place in self.places if place.state not in states]:
            if self._enough(len(self.places) - len(missing)) and not any(map(_placed, missing)):
                return
            if self.signals.requested is not None:
                raise Stopped(self.signals.requested)
            self.poll(LOOK)

    def _enough(self, workers: int) -> bool:
        return 0 < self._launcher.least <= workers

    def open(self, opened: Callable[[int], dict[str, Any]], failed: Callable[[Failure], None]) -> None:
        """The memory is laid out: tell every worker, and wait until all are up."""
        self.opened, self.failed = opened, failed
        for early in self._early:
            failed(early)
        for place in self.places:
            self._open(place)
        self.await_all(State.UP)
        self.spare.expect()

    def finish(self) -> None:
        """No worker is replaced from now on. What is lost with one that is being ended is still counted."""
        self._finishing = True
        for index in [i for i in self._moving if self.places[i].state in RESTARTING]:
            self._give_up(self.places[index])

    def stop(self) -> None:
        """End everybody, politely if possible; waits for it."""
        if not any(place.state is State.UP for place in self.places):
            self.kill()  # one that still imports, makes or resets environments does not hear a request
        self._launcher.stop(self._everybody(), STOP)
        self._listener.close()
        self.opened = self.failed = None  # they hold on to the crew, which holds on to us

    def kill(self) -> None:
        for worker in self._everybody():
            worker.kill()

    def _everybody(self) -> list[Worker]:
        places = [place.worker for place in self.places if place.worker is not None]
        return [*places, *self._stuck, *([] if self.spare.worker is None else [self.spare.worker])]

    # One poll

    @property
    def leaving(self) -> bool:
        """Whether workers are not replaced any more."""
        return self._finishing or self.signals.requested is not None

    @property
    def restarting(self) -> bool:
        """Whether a place that is not up now may be later, or has losses to be counted. Waiting for room is no end."""
        if not self._launcher.least:
            return bool(self._moving)
        return any(_placed(self.places[index]) for index in self._moving)

    def poll(self, timeout: float) -> list[int]:
        """Move every place on; returns the workers that are up and have said something, waiting so long for one."""
        self._look()
        if self._moving:
            timeout = min(timeout, self._pause())
        heard = [self._by_channel[channel] for channel in self._listener.wait(timeout)]
        for index in list(self._moving):
            self._advance(self.places[index])
        return [index for index in heard if self.places[index].state is State.UP and index not in self._moving]

    def _pause(self) -> float:
        """Seconds until one of the places that are not up has to be looked at again."""
        now, pause = time.monotonic(), LOOK
        for index in self._moving:
            place = self.places[index]
            pause = min(pause, STEP if place.state is State.ENDING else place.until - now)
        return max(0.0, pause)

    def _advance(self, place: Place) -> None:
        try:
            if place.state is State.ENDING:
                self._end(place)
            elif self.leaving and place.state in RESTARTING and self.opened is not None:
                self._give_up(place)
            elif place.state is State.DELAYED:
                if time.monotonic() >= place.until:
                    place.incarnation += 1
                    self._start(place)
            elif place.state in (State.STARTING, State.OPENING):
                self._come_up(place)
            elif place.state is State.READY and self.channel(place.index).poll():
                self.read(place.index)  # it has nothing to say now: it has ended, or failed
        except Lost as lost:
            self.lose(place.index, lost)

    def _enter(self, place: Place, state: State, seconds: float = 0.0) -> None:
        place.state, place.began = state, time.monotonic()
        place.until = place.began + seconds
        if state in (State.UP, State.GONE):
            self._moving.discard(place.index)
        else:
            self._moving.add(place.index)

    # Coming up

    def _start(self, place: Place, fresh: bool = False) -> None:
        """A process for this place: the spare one if there is one, or in any case a new one."""
        message = self._message() | {
            "index": place.index, "incarnation": place.incarnation, "first": self._first,
        }  # fmt: skip
        number = self._first + place.index
        name, log = f"actor {number}", self._logs / f"actor-{number}.log"
        worker = None if fresh else self.spare.take()
        if worker is not None and not worker.assign(name, message, log):
            self._let_go(worker)
            worker = None
        place.spare = worker is not None
        if worker is None:
            worker = self._launcher.start(name, message, log)
        place.worker = worker
        self._by_channel[worker.channel] = place.index
        self._listener.add(worker.channel)
        self._enter(place, State.STARTING, ASSIGNED if place.spare else self.config.supervisor.start_deadline)

    def _start_spare(self) -> Worker:
        message = self._message() | {"spare": True}
        return self._launcher.start("spare", message, self._logs / "spare.log")

    def _message(self) -> dict[str, Any]:
        return {"config": encode_config(self.config).decode(), "role": self._role}

    def _come_up(self, place: Place) -> None:
        """Hear what a worker that starts has to say, if it has; Lost if it takes too long."""
        if not self.channel(place.index).poll():
            if time.monotonic() >= place.until:
                self._too_late(place)
            return
        message = self.read(place.index)
        if message["op"] == "assigned":
            place.spare = False
            self._enter(place, State.STARTING, self.config.supervisor.start_deadline)
        elif place.state is State.OPENING:
            self._enter(place, State.UP)
            self._up(place.index)
        else:
            self._check_spec(place.index, msgspec.convert(message["spec"], EnvSpec))
            self.about = self.about or message.get("about", {})
            self._enter(place, State.READY, math.inf)
            if self.opened is not None:
                self._open(place)

    def _too_late(self, place: Place) -> None:
        if not _placed(place):
            if self._enough(sum(other.state is State.UP for other in self.places)):
                self._enter(place, place.state, self.config.supervisor.start_deadline)  # it waits for room
                return
            seconds = time.monotonic() - place.began
            raise Lost.by(EnvError(f"no node has had room for actor {place.index} in {seconds:.0f} s", "no_room"))
        if not place.spare:
            raise self.hung(place.index, time.monotonic() - place.began)
        assert place.worker is not None
        self._forget(place.worker.channel)  # stopped, or stuck: a process of its own takes the place
        self._let_go(place.worker)
        self._start(place, fresh=True)  # the next spare has just begun to load, and would be late too

    def _check_spec(self, index: int, spec: EnvSpec) -> None:
        if self.spec is not None and spec != self.spec:
            other = f"actor {index} made another environment than its peers: {spec} instead of {self.spec}"
            raise Lost.by(EnvError(other, "other_env"))
        self.spec = spec

    def _open(self, place: Place) -> None:
        if place.state is State.READY and self.opened is not None:
            try:
                self.tell(place.index, self.opened(place.index))
            except ValueError as error:  # saved by a run of one process, which sends nothing
                raise CheckpointError(
                    f"the state of actor {place.index} is too large to send ({error}): "
                    f"use {setting('topology', 'serial')}"
                ) from error
            self._enter(place, State.OPENING, self.config.supervisor.start_deadline)

    # Going

    def lose(self, index: int, lost: Lost) -> None:
        """A worker cannot go on: have it ended. It is aborted if it has not ended by itself in time.

        Its end is reported by a later `poll`: what it has delivered before is then where it belongs.
        """
        place = self.places[index]
        assert place.worker is not None
        self._forget(place.worker.channel)
        place.worker.abort(lost.patience)
        place.lost = lost
        self._enter(place, State.ENDING, lost.patience + ABORT_WAIT + KILL_WAIT)

    def _end(self, place: Place) -> None:
        """Once a lost worker has ended, count what was lost with it, and have it replaced.

        One that the kernel cannot end is left behind: after SIGKILL it will not write to shared memory any more.
        """
        assert place.worker is not None and place.lost is not None
        if not place.worker.gone():
            if time.monotonic() < place.until:
                return
            self._let_go(place.worker)
        place.worker.channel.close()
        error, steps = place.lost.error(), self._ended(place.index)
        if self.leaving:
            self._enter(place, State.GONE)
            self._report(Failure(place.index, steps, error.reason, str(error), replaced=True))
            return
        delay = place.restarts.next(error)  # raises the error itself once there were too many
        self._enter(place, State.DELAYED, delay)
        message = f"{error} — replaced in {delay:.1f} s"
        self._report(Failure(place.index, steps, error.reason, message, replaced=True))

    def _report(self, lost: Failure) -> None:
        if self.failed is None:
            self._early.append(lost)
        else:
            self.failed(lost)

    def _give_up(self, place: Place) -> None:
        """A replacement that is not needed any more."""
        if place.worker is not None and place.state is not State.DELAYED:
            self._forget(place.worker.channel)
            place.worker.abort()
        self._enter(place, State.GONE)

    def _let_go(self, worker: Worker) -> None:
        worker.abort()
        worker.channel.close()
        self._stuck.append(worker)

    def _forget(self, channel: Channel) -> None:
        self._listener.remove(channel)
        self._by_channel.pop(channel, None)

    def _look(self) -> None:
        """Once a second: collect who has ended, so that what it has started ends too; bound the logs; keep a spare."""
        now = time.monotonic()
        if now - self._looked < LOOK:
            return
        self._looked = now
        self._stuck = [worker for worker in self._stuck if not worker.gone()]
        for place in self.places:
            if place.worker is not None:
                place.worker.alive()
                if place.worker.log is not None:
                    place.worker.log.shorten()
        self.spare.look()

    # Messages

    def channel(self, index: int) -> Channel:
        worker = self.places[index].worker
        assert worker is not None, f"actor {index} was never started"
        return worker.channel

    def tell(self, index: int, message: dict[str, Any]) -> None:
        """Say what will be answered. One that is gone, or does not listen, is noticed where the answer is awaited.

        Not here: it may have announced unrolls before, and they are to be taken first.
        """
        with contextlib.suppress(ChannelClosed, ChannelTimeout):
            self.channel(index).send(message, SEND)

    def read(self, index: int) -> dict[str, Any]:
        """The message that lies in the channel; a failure or the end of the worker is raised as Lost."""
        try:
            message = self.channel(index).recv(0.0)
        except ChannelClosed as error:
            worker = self.places[index].worker
            assert worker is not None
            where = self._where(index)
            raise Lost(lambda: failure.died(worker, index, where)) from error
        if message["op"] == "failed":
            raise failure.told(message)
        return message

    def hung(self, index: int, seconds: float) -> Lost:
        worker, env, leaving = self.places[index].worker, self.config.env, self.signals.requested is not None
        assert worker is not None
        where = self._where(index)
        return Lost(lambda: failure.hung(worker, index, env, where, seconds, leaving), patience=0.0)
