"""What every worker process does before its own work, and around it: the two kinds of worker differ in the middle only.

A worker makes its environments, says what they look like, is told where the shared memory lies, says that it has
started, and then fills a slot for every order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch

from rookery.actor import Actor, ActorReport
from rookery.envs.make import make
from rookery.pipes.shm import Pulse, Segment, Slots, WeightBoard
from rookery.registry import parents_config
from rookery.topologies.child import IDLE, assigned
from rookery.topologies.faults import FaultPlan


class Post:
    def __init__(self, channel: Any, start: dict[str, Any], fds: dict[str, int]):
        torch.set_num_threads(1)
        self.channel = channel
        self.config = parents_config(start["config"])  # loads the algorithm's module
        start = assigned(channel, start)  # all is loaded: a spare process waits here
        self.index, self.incarnation = start["index"], start["incarnation"]
        self._plan = FaultPlan.parse(self.config.fault_plan).only("actor", self.index, self.incarnation)
        self._plan.fire("actor", self.index, incarnation=self.incarnation, start=0)
        self.lanes = make(self.config, self.config.envs_per_actor)
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

    def finish(self, slot: int, report: ActorReport) -> None:
        if report.steps:  # a gradient may have been computed without acting
            self.slots.progress(slot, self._rows)  # the last row too is lost if we are killed before it is announced
        self.slots.finish(slot)
        self.send({"op": "full", "slot": slot, "report": msgspec.to_builtins(report)})
