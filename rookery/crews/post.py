"""What every worker process does before its own work, and around it: the two kinds of worker differ in the middle only.

A worker makes its environments, says what they look like, is told where the shared memory lies, says that it has
started, and then fills a slot for every order. Of single environments that fail it tells the parent, which counts and
may end the run; it recreates them itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch

from rookery.algorithms.registry import parents_config
from rookery.core.errors import EnvError
from rookery.core.types import ActorReport
from rookery.envs.make import make
from rookery.pipes.shm import Pulse, Segment, Slots, WeightBoard
from rookery.processes.child import IDLE, assigned
from rookery.processes.faults import FaultPlan
from rookery.processes.worker import Restarts
from rookery.roles.actor import Actor

BEAT = 0.1  # seconds between two signs of life while we wait


class Post:
    def __init__(self, channel: Any, start: dict[str, Any], fds: dict[str, int]):
        torch.set_num_threads(1)
        self.channel = channel
        self.config = parents_config(start["config"])  # loads the algorithm's module
        start = assigned(channel, start)  # all is loaded: a spare process waits here
        self.index, self.incarnation = start["index"], start["incarnation"]
        self._plan = FaultPlan.parse(self.config.fault_plan).only("actor", self.index, self.incarnation)
        self._plan.fire("actor", self.index, incarnation=self.incarnation, start=0)
        limits, started = self.config.supervisor, time.monotonic()
        self.lanes = make(self.config, self.config.envs_per_actor)
        # While an environment is recreated there is no sign of life: if that takes too long, we are replaced whole.
        self._mends = time.monotonic() - started < self.lanes.count * limits.step_deadline / 2
        self._restarts = Restarts(limits.restarts, limits.window)
        self.send({"op": "ready", "spec": msgspec.to_builtins(self.lanes.spec)})
        self.memory = memory = channel.recv(timeout=IDLE)
        self.slots = Slots(Segment.attach(fds["slots"], memory["slots_size"]), memory["layout"])
        self.board = WeightBoard(Segment.attach(fds["weights"], memory["weights_size"]))
        self._pulse = Pulse(Segment.attach(fds["pulse"], memory["pulse_size"]))

    @property
    def life(self) -> str:
        """Names this process among all that ever had its place: random streams begin anew with it."""
        return f"{self.memory['sequence']}.{self.incarnation}"

    def send(self, message: dict[str, Any]) -> None:
        self.channel.send(message, timeout=IDLE)

    def orders(self) -> Iterator[dict[str, Any]]:
        self.send({"op": "started"})
        while (order := self.channel.recv(timeout=IDLE))["op"] != "stop":
            yield order

    def begin(self, slot: int, sequence: int, version: int, actor: Actor) -> Callable[[int], None]:
        """Open a slot; what is returned is to be called with each row of the unroll."""
        self.slots.begin(slot, self.index, self.incarnation, sequence, version)
        before, self._rows = actor.sequence * actor.plan.unroll, actor.plan.unroll

        def tick(row: int) -> None:
            self._pulse.beat(self.index)
            self.slots.progress(slot, row)
            if self._plan:
                self._plan.fire("actor", self.index, before + row, actor.sequence, self.incarnation)

        return tick

    @property
    def recover(self) -> Callable[[EnvError], None] | None:
        """For `Producer.recover`."""
        return self._recover if self._mends else None

    def _recover(self, error: EnvError) -> None:
        delay = self._restarts.next(error)  # the parent counts by itself, over all that ever had this place
        lost = {"steps": error.steps, "reason": error.reason, "error": str(error), "delay": delay}
        self.send({"op": "cut"} | lost)
        until = time.monotonic() + delay
        while (left := until - time.monotonic()) > 0:
            self._pulse.beat(self.index)
            time.sleep(min(left, BEAT))
        self._pulse.beat(self.index)

    def finish(self, slot: int, report: ActorReport) -> None:
        self._restarts.worked()
        if report.steps:  # a gradient may have been computed without acting
            self.slots.progress(slot, self._rows)  # the last row too is lost if we are killed before it is announced
        self.slots.finish(slot)
        self.send({"op": "full", "slot": slot, "report": msgspec.to_builtins(report)})
