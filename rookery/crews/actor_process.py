"""What the process of an actor does: makes environments, then fills arrays for every order.

What it fills them with is its role: unrolls or items (`roles/unrolls.py`), gradients (`roles/gradients.py`). Where they
lie is up to the buffers: shared memory (`buffers.py`), or the objects of a cluster. Of single environments that fail it
tells the parent, which counts them and may end the run; it recreates them itself.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import numpy as np
import torch

from rookery.algorithms.registry import build_algorithm, parents_config
from rookery.core.errors import EnvError
from rookery.core.types import ActorReport, Arrays
from rookery.crews.states import pack_state, unpack_state
from rookery.envs.make import make
from rookery.processes.child import IDLE, assigned
from rookery.processes.faults import FaultPlan
from rookery.processes.worker import Restarts
from rookery.roles.actor import CUT
from rookery.roles.gradients import GradientMaker
from rookery.roles.unrolls import UnrollMaker

BEAT = 0.1  # seconds between two heartbeats while we wait
ROLES: dict[str, type[UnrollMaker] | type[GradientMaker]] = {"unrolls": UnrollMaker, "gradients": GradientMaker}


class Buffers(Protocol):
    """The worker's end of what it shares with its crew."""

    def open(self, index: int, memory: dict[str, Any]) -> None: ...
    def pull(self, vector: torch.Tensor, order: dict[str, Any]) -> int:
        """The newest weights, and their version."""
        ...

    def begin(self, slot: int, incarnation: int, sequence: int, version: int) -> Arrays:
        """The arrays to fill."""
        ...

    def progress(self, slot: int, row: int) -> None: ...
    def finish(self, slot: int) -> dict[str, Any]:
        """The arrays are filled; returns what the crew must be told besides."""
        ...

    def beat(self) -> None: ...
    def is_cut(self, sequence: int) -> bool:
        """Whether the crew wants this unroll to be cut short."""
        ...


class ActorProcess:
    def __init__(self, channel: Any, start: dict[str, Any], buffers: Buffers):
        torch.set_num_threads(1)
        _run_as_batch()
        self.channel = channel
        self.config = parents_config(start["config"])  # loads the algorithm's module
        start = assigned(channel, start)  # everything is loaded: a spare process waits here
        self.index, self.incarnation = start["index"], start["incarnation"]
        self._plan = FaultPlan.parse(self.config.fault_plan).only("actor", self.index, self.incarnation)
        self._plan.fire("actor", self.index, incarnation=self.incarnation, start=0)
        limits, began = self.config.supervisor, time.monotonic()
        lanes = make(self.config, self.config.envs_per_actor)
        # While an environment is recreated there is no heartbeat: if that takes too long, we are replaced whole.
        mends = time.monotonic() - began < lanes.count * limits.step_deadline / 2
        self._restarts = Restarts(limits.restarts, limits.window)
        self._said: list[str] = []  # for the user: told with the next snapshot
        self._start, self._lanes, self._mends = start, lanes, mends
        self.buffers = buffers
        self._send({"op": "ready", "spec": msgspec.to_builtins(lanes.spec)})

    def open(self, memory: dict[str, Any]) -> None:
        """The crew has laid out its memory: reset the environments, or restore them."""
        self.buffers.open(self.index, memory)
        algorithm = build_algorithm(self.config, self._lanes.spec)
        number = self._start["first"] + self.index  # in the whole run
        self.role = ROLES[self._start["role"]](self.config, algorithm, self._lanes, number, self._said.append)
        self.role.producer.recover = self._recover if self._mends else None
        self._vector, self._version = torch.empty(self.role.floats), -1
        snapshot = None if memory["snapshot"] is None else unpack_state(memory["snapshot"])
        self.sequence = memory["sequence"]  # of the next order
        self.role.producer.begin(self.sequence, f"{self.sequence}.{self.incarnation}", snapshot)
        self._send({"op": "started"})

    def run(self) -> None:
        self.open(self.channel.recv(timeout=IDLE))
        while (order := self.channel.recv(timeout=IDLE))["op"] != "stop":
            self.carry_out(order)

    def carry_out(self, order: dict[str, Any]) -> None:
        if order["op"] == "snapshot":
            self._snapshot()
            return
        if self.role.wants_weights:
            self._version = self.buffers.pull(self._vector, order)
            self.role.load(self._vector, self._version)
        slot = order["slot"]
        arrays = self.buffers.begin(slot, self.incarnation, self.sequence, self._version)
        self._finish(slot, arrays, self.role.fill(arrays, order["progress"], self._ticker(slot)))

    def _ticker(self, slot: int) -> Callable[[int], object]:
        """To be called with each row of the unroll."""
        actor = self.role.producer.actor
        before = actor.sequence * actor.plan.unroll
        least = self.config.group.preempt_after * (actor.plan.steps or actor.plan.unroll)

        def tick(row: int) -> object:
            self.buffers.beat()
            self.buffers.progress(slot, row)
            if self._plan:
                self._plan.fire("actor", self.index, before + row, actor.sequence, self.incarnation)
            return CUT if row >= least and self.buffers.is_cut(self.sequence) else None

        return tick

    def _finish(self, slot: int, arrays: Arrays, report: ActorReport) -> None:
        self._restarts.worked()
        if report.steps:  # a gradient may have been computed without acting
            plan = self.role.producer.plan
            rows = plan.unroll  # the last one too is lost if we are killed before it is announced
            if report.cut or plan.steps:  # an unroll whose last rows are dead
                rows = int(np.flatnonzero(arrays["live"].any(1))[-1]) + 1
            self.buffers.progress(slot, rows)
        more = self.buffers.finish(slot)
        self.sequence += 1
        self._send({"op": "full", "slot": slot, "report": msgspec.to_builtins(report)} | more)

    def _snapshot(self) -> None:
        producer = self.role.producer
        state = producer.snapshot()
        try:
            self._send({"op": "snapshot", "state": None if state is None else pack_state(state), "said": self._said})
        except ValueError as error:  # too large to send, and nothing was
            producer.complain(error)
            self._send({"op": "snapshot", "state": None, "said": self._said})
        self._said.clear()

    def _recover(self, error: EnvError) -> None:
        delay = self._restarts.next(error)  # the parent counts by itself, over all processes of this place
        lost = {"steps": error.steps, "reason": error.reason, "error": str(error), "delay": delay}
        self._send({"op": "cut"} | lost)
        until = time.monotonic() + delay
        while (left := until - time.monotonic()) > 0:
            self.buffers.beat()
            time.sleep(min(left, BEAT))
        self.buffers.beat()

    def _send(self, message: dict[str, Any]) -> None:
        self.channel.send(message, timeout=IDLE)


def _run_as_batch() -> None:
    """Have the kernel not stop the parent to run us when it wakes us: it has other actors to wake (2 ms per round)."""
    with contextlib.suppress(AttributeError, OSError):  # not Linux
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
