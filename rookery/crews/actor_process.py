"""What the process of an actor does: makes environments, then fills a slot of shared memory for every order.

What it fills the slot with is its role: unrolls or items (`roles/unrolls.py`), gradients (`roles/gradients.py`). Of
single environments that fail it tells the parent, which counts them and may end the run; it recreates them itself.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch

from rookery.algorithms.registry import build_algorithm, parents_config
from rookery.core.errors import EnvError
from rookery.core.types import ActorReport
from rookery.crews.states import pack_state, unpack_state
from rookery.envs.make import make
from rookery.pipes.shm import Pulse, Segment, Slots, WeightBoard
from rookery.processes.child import IDLE, assigned
from rookery.processes.faults import FaultPlan
from rookery.processes.worker import Restarts
from rookery.roles.actor import CUT
from rookery.roles.gradients import GradientMaker
from rookery.roles.unrolls import UnrollMaker

BEAT = 0.1  # seconds between two heartbeats while we wait
ROLES: dict[str, type[UnrollMaker] | type[GradientMaker]] = {"unrolls": UnrollMaker, "gradients": GradientMaker}


class ActorProcess:
    def __init__(self, channel: Any, start: dict[str, Any], fds: dict[str, int]):
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
        self._send({"op": "ready", "spec": msgspec.to_builtins(lanes.spec)})
        memory = channel.recv(timeout=IDLE)
        self.slots = Slots(Segment.attach(fds["slots"], memory["slots_size"]), memory["layout"])
        self.board = WeightBoard(Segment.attach(fds["weights"], memory["weights_size"]))
        self._pulse = Pulse(Segment.attach(fds["pulse"], memory["pulse_size"]))
        self._said: list[str] = []  # for the user: told with the next snapshot
        algorithm = build_algorithm(self.config, lanes.spec)
        number = start["first"] + self.index  # in the whole run
        self.role = ROLES[start["role"]](self.config, algorithm, lanes, number, self._said.append)
        self.role.producer.recover = self._recover if mends else None
        snapshot = None if memory["snapshot"] is None else unpack_state(memory["snapshot"])
        self.sequence = memory["sequence"]  # of the next order
        self.role.producer.begin(self.sequence, f"{self.sequence}.{self.incarnation}", snapshot)

    def run(self) -> None:
        vector, version = torch.empty(self.role.floats), -1
        self._send({"op": "started"})
        while (order := self.channel.recv(timeout=IDLE))["op"] != "stop":
            if order["op"] == "snapshot":
                self._snapshot()
                continue
            if self.role.wants_weights:
                version = self.board.pull(vector.numpy())
                self.role.load(vector, version)
            slot = order["slot"]
            tick = self._begin(slot, version)
            self._finish(slot, self.role.fill(self.slots.arrays(slot), order["progress"], tick))

    def _begin(self, slot: int, version: int) -> Callable[[int], object]:
        """Open a slot; what is returned is to be called with each row of the unroll."""
        self.slots.begin(slot, self.index, self.incarnation, self.sequence, version)
        actor = self.role.producer.actor
        before = actor.sequence * actor.plan.unroll
        least = self.config.group.preempt_after * (actor.plan.steps or actor.plan.unroll)

        def tick(row: int) -> object:
            self._pulse.beat(self.index)
            self.slots.progress(slot, row)
            if self._plan:
                self._plan.fire("actor", self.index, before + row, actor.sequence, self.incarnation)
            return CUT if row >= least and self._pulse.is_cut(self.index, self.sequence) else None

        return tick

    def _finish(self, slot: int, report: ActorReport) -> None:
        self._restarts.worked()
        if report.steps:  # a gradient may have been computed without acting
            plan = self.role.producer.plan
            rows = plan.unroll  # the last one too is lost if we are killed before it is announced
            if report.cut or plan.steps:  # an unroll whose last rows are dead
                rows = int(np.flatnonzero(self.slots.arrays(slot)["live"].any(1))[-1]) + 1
            self.slots.progress(slot, rows)
        self.slots.finish(slot)
        self.sequence += 1
        self._send({"op": "full", "slot": slot, "report": msgspec.to_builtins(report)})

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
            self._pulse.beat(self.index)
            time.sleep(min(left, BEAT))
        self._pulse.beat(self.index)

    def _send(self, message: dict[str, Any]) -> None:
        self.channel.send(message, timeout=IDLE)


def _run_as_batch() -> None:
    """Have the kernel not stop the parent to run us when it wakes us: it has other actors to wake (2 ms per round)."""
    with contextlib.suppress(AttributeError, OSError):  # not Linux
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
