"""Actors in processes of their own: orders, slots, deliveries, weights, snapshots.

An actor is given a free slot, fills it with the newest weights, and says so. On one machine a slot is shared memory
(`buffers.py`): its number travels, data does not. On a cluster it is an object that travels once (`ray.py`). The
processes and their life are in `pool.py`. Every wait has a deadline. What a worker was filling when it
failed is counted as lost; what it had announced before is used.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Self

import msgspec
import torch

from rookery.core.config import RunConfig
from rookery.core.errors import EnvError
from rookery.core.types import ActorReport, Delivery, EnvSpec, Failure, GradientReport
from rookery.crews.buffers import SharedBuffers
from rookery.crews.crew import Setup, States
from rookery.crews.pool import MODULE, Launcher, ProcessLauncher, State, WorkerPool
from rookery.crews.states import pack_state, unpack_state
from rookery.processes.failure import Lost
from rookery.processes.signals import Patience, Signals
from rookery.processes.worker import Deadline

LOOK = 0.1  # seconds between two looks at heartbeats
CUT_LOOK = 0.005  # seconds between two looks whether to cut what is being filled
REPORTS: dict[str, type[ActorReport]] = {"unrolls": ActorReport, "gradients": GradientReport}  # by role


class ProcessCrew:
    """Context manager: starts the processes, and ends them whatever happens."""

    cut: Callable[[], bool] | None = None

    def __init__(
        self, config: RunConfig, folder: Path, signals: Signals, role: str = "unrolls", module: str = MODULE,
        first: int = 0, buffers: Any = None, launcher: Launcher | None = None,
    ):  # fmt: skip
        """`first`: the number of its first actor in the whole run; there are others before it on other ranks.

        `buffers`, `launcher`: what it shares with its workers and how they are started, if not on this machine.
        """
        self.config, self.signals, self.parallel = config, signals, config.actors
        self._limits, self._report_type = config.supervisor, REPORTS[role]
        self._hurried = self._limits.grace / 3  # seconds for a worker to answer once shutdown was requested
        self._buffers: SharedBuffers = buffers or SharedBuffers()
        self.pool = WorkerPool(
            config,
            role,
            folder / "logs",
            signals,
            launcher or ProcessLauncher(module, self._buffers.fds),
            self._came_up,
            self._give_back,
            self._where,
            first,
        )
        self.version: int | None = None
        self.sequences = [0] * config.actors
        self.openings: deque[int] = deque()
        self._slots: list[deque[int]] = [deque() for _ in range(config.actors)]  # ordered; it is filling the first
        self._ordered = 0
        self._deadlines = [Deadline(self._limits.step_deadline) for _ in range(config.actors)]
        self._looked = 0.0
        self._complained = False  # about snapshots, to the user
        self._setup: Setup | None = None

    def __enter__(self) -> Self:
        self.signals.kill = self.pool.kill
        try:
            self.pool.start()
            self.pool.await_all(State.READY)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.pool.stop()
        self._buffers.close()
        self._setup = None

    @property
    def spec(self) -> EnvSpec:
        """What the environment looks like, as the workers say once they have made theirs."""
        assert self.pool.spec is not None
        return self.pool.spec

    def open(self, setup: Setup) -> None:
        """Lay out the shared memory and let every worker reset its environments."""
        self._setup, self.sequences = setup, list(setup.sequences)
        actors = self.config.actors
        self._buffers.open(setup.shapes, actors * setup.ahead, setup.floats, actors)
        self._room = [setup.ahead] * actors  # orders that each could be given when it comes up
        self.pool.open(self._opened, setup.failed)

    def _opened(self, index: int) -> dict[str, Any]:
        assert self._setup is not None
        resumed = self._setup.states and self.pool.places[index].incarnation == 0
        state = pack_state(self._setup.states[index]) if resumed else None
        return self._buffers.describe(index) | {"op": "memory", "sequence": self.sequences[index], "snapshot": state}

    def _came_up(self, index: int) -> None:
        self.openings.extend([index] * self._room[index])
        self._room[index] = 0

    # Orders and deliveries

    @property
    def ordered(self) -> int:
        return self._ordered

    @property
    def busy(self) -> bool:
        return self._ordered > 0 or self.pool.restarting

    def publish(self, read: Callable[[], torch.Tensor], version: int) -> None:
        self._buffers.publish(read(), version)
        self.version = version

    def order(self, actor: int, progress: float) -> None:
        slot = self._buffers.free.pop()
        if self._idle(actor):
            self._expect(actor)
        self._slots[actor].append(slot)
        self._ordered += 1
        more = self._buffers.order(actor, slot)
        self.pool.tell(actor, {"op": "fill", "slot": slot, "progress": progress} | more)

    def _idle(self, actor: int) -> bool:
        """Whether an actor has filled all it was given, as far as we know."""
        return all(map(self._buffers.full, self._slots[actor]))

    def _expect(self, actor: int) -> None:
        """An actor has something to do from now on: what was before says nothing about its health."""
        self._buffers.pulse.beat(actor)
        self._deadlines[actor].rearm()

    def arrived(self, patience: float) -> Iterator[Delivery]:
        if self.cut is not None and self._ordered:
            patience = min(patience, CUT_LOOK)
            if self.cut():
                for index, slots in enumerate(self._slots):
                    if slots:
                        self._buffers.pulse.cut(index, self.sequences[index])
        for index in self.pool.poll(patience):
            yield from self._hear(index)
        now = time.monotonic()
        if now - self._looked >= LOOK:
            self._looked = now
            for index in self._overdue():
                if self.pool.channel(index).poll():  # it has finished, and waits for us to read it
                    yield from self._hear(index)
                else:
                    self.pool.lose(index, self.pool.hung(index, self._buffers.pulse.age(index)))

    def _hear(self, index: int) -> Iterator[Delivery]:
        """Everything that a worker has said, in order: unrolls, failures of single environments, its own failure."""
        channel = self.pool.channel(index)
        try:
            while self.pool.places[index].state is State.UP and channel.poll():
                message = self.pool.read(index)
                if message["op"] == "cut":
                    self._cut(index, message)
                else:
                    yield self._delivery(index, message)
        except Lost as lost:
            self.pool.lose(index, lost)

    def _delivery(self, index: int, message: dict[str, Any]) -> Delivery:
        """The slot that a worker announces, if it holds what it should."""
        slot, place = self._slots[index][0], self.pool.places[index]
        try:
            arrays = self._buffers.take(slot, index, place.incarnation, self.sequences[index], message)
        except EnvError as error:
            raise Lost.by(error) from error
        report = msgspec.convert(message["report"], self._report_type)
        self._slots[index].popleft()
        self._ordered -= 1
        if self._slots[index]:
            self._expect(index)
        place.restarts.worked()
        self.sequences[index] += 1
        release = partial(self._release, index, slot)
        return Delivery(index, self.sequences[index] - 1, arrays, report, release, message.get("reference"))

    def _release(self, index: int, slot: int) -> None:
        """Free a slot; its actor has room for another order, or its successor will have when it comes up."""
        self._buffers.release(slot, poison=self.config.debug)
        if self.pool.places[index].state is State.UP:
            self.openings.append(index)
        else:
            self._room[index] += 1

    def _cut(self, index: int, message: dict[str, Any]) -> None:
        """Single environments of a worker failed; it recreates them and begins again to fill the same slot."""
        assert self._setup is not None
        error = EnvError(message["error"], message["reason"])
        self.pool.places[index].restarts.next(error)  # raises the error itself once there were too many
        told = f"recreated in {message['delay']:.1f} s: {error}"
        self._setup.failed(Failure(index, message["steps"], error.reason, told, replaced=False))

    def finish(self) -> None:
        self.pool.finish()

    # Failures

    def _give_back(self, index: int) -> int:
        """Free the slots of a worker that has ended; returns the environment steps that are lost with them."""
        if self._setup is None:
            return 0
        steps = 0
        waiting = sum(1 for actor in self.openings if actor == index)
        self.openings = deque(actor for actor in self.openings if actor != index)
        self._room[index] += waiting
        while self._slots[index]:
            slot = self._slots[index].popleft()
            steps += self._buffers.steps(slot, self.config.envs_per_actor)
            self._ordered -= 1
            self._release(index, slot)
        return steps

    def _overdue(self) -> list[int]:
        """Workers without a sign of life for too long; a request to shut down shortens our patience."""
        pulse = self._buffers.pulse
        busy = [i for i, slots in enumerate(self._slots) if slots and self.pool.places[i].state is State.UP]
        late = [index for index in busy if self._deadlines[index].expired(pulse.last(index))]
        if self.signals.requested is not None:
            late += [i for i in busy if i not in late and pulse.age(i) > self._hurried]
        return late

    def _where(self, index: int) -> str:
        slots = self._slots[index]
        if not slots:
            up = self.pool.places[index].state is State.UP
            return "" if up else f" while starting environment {self.config.env}"
        row = self._buffers.rows(slots[0])
        return f" in environment {self.config.env}, unroll {self.sequences[index]}, row {row} of it"

    # Checkpoints

    def snapshots(self) -> States:
        """The states of the actors, under one deadline; None where an environment cannot be restored."""
        patience = Patience(self.signals, self._limits.step_deadline, self._hurried, since=time.monotonic())
        states: States = [None] * self.config.actors
        asked = {place.index for place in self.pool.places if place.state is State.UP}
        for index in asked:
            self.pool.tell(index, {"op": "snapshot"})
        while asked and (left := patience.left()) > 0:
            for index in asked.intersection(self.pool.poll(min(left, LOOK))):
                if self.pool.channel(index).poll():  # else a part of a large state has come
                    states[index] = self._state(index)
                    asked.discard(index)
            asked = {index for index in asked if self.pool.places[index].state is State.UP}
        for index in asked:
            self.pool.lose(index, self.pool.hung(index, patience.spent()))
        while self.pool.restarting:  # a checkpoint counts what was lost with those that failed, or is not written
            self.pool.poll(LOOK)
        return states

    def _state(self, index: int) -> dict[str, Any] | None:
        try:
            message = self.pool.read(index)
        except Lost as lost:
            self.pool.lose(index, lost)
            return None
        assert self._setup is not None
        for text in message["said"]:  # once: its peers will say the same
            if not self._complained:
                self._setup.say(text)
            self._complained = True
        return None if message["state"] is None else unpack_state(message["state"])
