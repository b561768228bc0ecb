"""Environments that step on their own, and a policy that acts for those that are ready (VER, arXiv:2210.05064).

A rollout has a fixed number of steps in total: fast environments give more of them, slow ones do not hold the others
up. Worker processes step the environments (`ready_worker.py`); this process runs the policy on all that have answered.
Rows and states are in `ready_rollout.py`, the life of the processes is `pool.py`'s.

A worker that dies, hangs or whose environment fails is replaced: the steps of its environments in this rollout are lost
and counted, the other environments make up for them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from rookery.core.config import RunConfig
from rookery.core.errors import CheckpointError, UsageError
from rookery.core.seeding import seed_of
from rookery.core.types import ActorReport, Arrays, Delivery, EnvSpec, Failure
from rookery.core.unroll import as_unroll
from rookery.crews.crew import Setup, States
from rookery.crews.pool import ProcessLauncher, State, WorkerPool
from rookery.crews.ready_memory import LaneMemory, memory_layout, share
from rookery.crews.ready_rollout import FLYING, Rollout
from rookery.crews.ready_state import pack, unpack
from rookery.crews.stopping import StepTimes
from rookery.pipes.bell import Bell, hush, ring
from rookery.pipes.shm import Segment
from rookery.processes.failure import Lost
from rookery.processes.signals import Patience, Signals
from rookery.processes.worker import Deadline
from rookery.roles.producer import empty_arrays
from rookery.roles.weights import Published

MODULE = "rookery.crews.ready_worker"
LOOK = 0.1  # seconds between two looks at workers that have not answered
CUT_LOOK = 0.002  # seconds between two questions whether to end a rollout early
WINDOW = 5  # rollouts whose step times say when to end one
FOREVER = 1e9  # seconds


class ReadyCrew:
    """Context manager: starts the workers, and ends them whatever happens. One actor, with all environments."""

    parallel = 1
    cut: Callable[[], bool] | None = None

    def __init__(self, config: RunConfig, folder: Path, signals: Signals, first: int = 0):
        """`first`: the number of its actor in the whole run; there are others before it on other ranks."""
        if config.actors != 1:
            raise UsageError(
                f"group.crew ready has one actor in each rank, not {config.actors}: set actors to 1, envs_per_actor to "
                "the number of environments and group.workers to that of the processes that step them"
            )
        self.config, self.signals, self.first = config, signals, first
        self.lanes = config.envs_per_actor
        self.workers = min(config.group.workers or self.lanes, self.lanes)
        self.own = [np.array(share(self.lanes, self.workers, index)) for index in range(self.workers)]
        self._owner = np.concatenate([np.full(len(own), index) for index, own in enumerate(self.own)])
        self._hurried = config.supervisor.grace / 3  # seconds for a rollout once shutdown was requested
        self._segment = Segment.reserve("lanes")
        self._results, self._bells = Bell(), [Bell() for _ in range(self.workers)]
        places = replace(config, actors=self.workers)
        self.pool = WorkerPool(
            places, "ready", folder / "logs", signals, ProcessLauncher(MODULE, self._fds), self._came_up, self._ended,
            self._where, first * self.workers,
        )  # fmt: skip
        self.pool.wake_on(self._results.reader)
        self._deadlines = [Deadline(config.supervisor.step_deadline) for _ in range(self.workers)]
        self.version: int | None = None
        self.sequences = [0]
        self.openings: deque[int] = deque()
        self._order = False
        self._looked = self._asked = self._delivered = 0.0
        self._setup: Setup | None = None
        self._complained = False

    def _fds(self) -> dict[str, int]:
        bells = {f"bell{index}": bell.reader for index, bell in enumerate(self._bells)}
        return bells | {"lanes": self._segment.fd, "results": self._results.writer}

    def __enter__(self) -> ReadyCrew:
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
        for bell in (self._results, *self._bells):
            bell.close()
        self._segment.close()
        for name in ("memory", "rollout"):
            self.__dict__.pop(name, None)
        self._setup = None

    @property
    def spec(self) -> EnvSpec:
        assert self.pool.spec is not None
        return self.pool.spec

    def open(self, setup: Setup) -> None:
        """Lay out the shared memory and let every worker reset its environments."""
        self._setup, self.sequences = setup, list(setup.sequences)
        metrics = self.pool.about["metrics"]
        layout = memory_layout(self.spec, self.lanes, len(metrics))
        self._segment.allocate(layout.size)
        self.memory = LaneMemory(self._segment, layout)
        self._layout = msgspec.to_builtins(layout)
        nets = setup.algorithm.nets()
        self._published = Published(setup.algorithm, nets)
        self.rollout = Rollout(setup.algorithm, nets, self.lanes, self.config.seed, self.first, metrics)
        self._free = [empty_arrays(setup.shapes) for _ in range(setup.ahead)]
        group, window = self.config.group, WINDOW * self.rollout.steps
        chooses = self.config.ranks > 1 and group.preempt < 1
        self._times = StepTimes(self.lanes, window) if chooses else None
        self._state = setup.states[0] if setup.states else None
        if self._state is not None:
            known = self._state["env"].get("lanes") if isinstance(self._state["env"], dict) else None
            if not isinstance(known, list) or len(known) != self.lanes:
                raise CheckpointError(f"the stored state of an actor has not {self.lanes} environments")
            self.rollout.restore(self._state)
        self.pool.open(self._opened, self._failed)
        self.openings.extend([0] * setup.ahead)

    def _opened(self, index: int) -> dict[str, Any]:
        life = f"{self.sequences[0]}.{self.pool.places[index].incarnation}"
        own, first = self.own[index].tolist(), self.first * self.lanes
        seeds = [seed_of(self.config.seed, "env", first + lane, life) % 2**31 for lane in own]
        states = None
        if self._state is not None and self.pool.places[index].incarnation == 0:
            states = [pack(self._state["env"]["lanes"][lane]) for lane in own]
        return {
            "op": "memory", "size": self._segment.size, "layout": self._layout, "actor": self.first, "first": first,
            "seeds": seeds, "states": states,
        }  # fmt: skip

    def _came_up(self, index: int) -> None:
        if self._state is None or self.pool.places[index].incarnation > 0:
            self.rollout.restart(self.own[index].tolist(), self.memory.obs)

    # Orders and deliveries

    @property
    def ordered(self) -> int:
        return int(self._order)

    @property
    def busy(self) -> bool:
        return self._order

    def publish(self, read: Callable[[], torch.Tensor], version: int) -> None:
        self._published.load(read())
        self.version = version

    def order(self, actor: int, progress: float) -> None:
        self._order = True

    def arrived(self, patience: float) -> Iterator[Delivery]:
        if self._order:
            yield self._filled(self._free.pop())

    def _filled(self, arrays: Arrays) -> Delivery:
        """One rollout, from its first step to its last."""
        if torch.get_num_threads() > 1:
            torch.set_num_threads(1)  # as all acting does; the learner takes its own number again
        started, rollout = time.perf_counter(), self.rollout
        if self._times is not None:
            self._times.begin()
            if self._delivered:
                self._times.learnt(started - self._delivered)
        self._waited = self._acted = 0.0
        rollout.begin(as_unroll(arrays), self.version or 0, self.sequences[0])
        lives = [place.incarnation for place in self.pool.places]
        for deadline in self._deadlines:
            deadline.rearm()
        self._collect(self._target())
        report: ActorReport = rollout.finish()
        self._delivered = time.perf_counter()
        report.env_s, report.inference_s, report.total_s = self._waited, self._acted, self._delivered - started
        for place, life, own in zip(self.pool.places, lives, self.own):
            if place.state is State.UP and place.incarnation == life and rollout.rows[own].any():
                place.restarts.worked()
        self._order, self.sequences[0] = False, self.sequences[0] + 1
        return Delivery(0, self.sequences[0] - 1, arrays, report, partial(self._release, arrays))

    def _release(self, arrays: Arrays) -> None:
        self._free.append(arrays)
        self.openings.append(0)

    # One rollout

    def _target(self) -> int:
        """Steps of this rollout."""
        rollout, target = self.rollout, self.rollout.steps * self.lanes
        if self._times is None:
            return target
        least = max(1, int(self.config.group.preempt_after * target))
        return self._times.best(target, rollout.plan.unroll, least)

    def _collect(self, target: int) -> None:
        rollout, memory = self.rollout, self.memory
        patience = Patience(self.signals, FOREVER, self._hurried)
        least = self.config.group.preempt_after * rollout.steps * self.lanes
        while (missing := target - int(rollout.rows.sum())) > 0:
            lanes = np.flatnonzero((rollout.status == FLYING) & memory.answered())[:missing]
            if len(lanes):
                rollout.take(lanes, memory)
                if self._times is not None:
                    self._times.stepped(lanes, time.perf_counter())
                if len(lanes) == missing:
                    return
            if target - missing >= least and self._is_cut():
                return
            if len(ready := rollout.actable()):
                self._act(ready)
            elif not len(lanes):
                self._wait()
                if patience.left() <= 0 or self._stuck():
                    return
            if time.monotonic() - self._looked >= LOOK:
                self._watch(0.0)

    def _act(self, lanes: np.ndarray) -> None:
        started = time.perf_counter()
        action = self.rollout.act(lanes)
        for index in set(self._owner[lanes].tolist()):
            if not self._working(index):
                self._deadlines[index].rearm()  # what was before says nothing about its health
        self.memory.ask(lanes, action)
        for index in set(self._owner[lanes].tolist()):
            ring(self._bells[index].writer)
        self._acted += time.perf_counter() - started

    def _working(self, index: int) -> bool:
        own = self.own[index]
        return bool((self.memory.asked[own] != self.memory.done[own]).any())

    def _wait(self) -> None:
        """Until an environment has answered, or it is time to look around."""
        started = time.perf_counter()
        hush(self._results.reader)
        if not ((self.rollout.status == FLYING) & self.memory.answered()).any():
            self._watch(CUT_LOOK if self.cut is not None else LOOK)
        self._waited += time.perf_counter() - started

    def _is_cut(self) -> bool:
        if self.cut is None or (now := time.monotonic()) - self._asked < CUT_LOOK:
            return False
        self._asked = now
        return self.cut()

    def _stuck(self) -> bool:
        """Whether nothing will come any more: workers are not replaced while we shut down."""
        return self.pool.leaving and not self.pool.restarting and not (self.rollout.status == FLYING).any()

    # Failures

    def _watch(self, timeout: float) -> None:
        """Hear of workers that have failed, and notice those that hang."""
        for index in self.pool.poll(timeout):
            self._hear(index)
        now = time.monotonic()
        if now - self._looked < LOOK:
            return
        self._looked = now
        hurried = self.signals.requested is not None
        for index, deadline in enumerate(self._deadlines):
            if self.pool.places[index].state is State.UP and self._working(index):
                late = deadline.expired(int(self.memory.done[self.own[index]].sum()))
                idle = deadline.seconds - deadline.left()
                if late or (hurried and idle > self._hurried):
                    self.pool.lose(index, self.pool.hung(index, idle))

    def _hear(self, index: int) -> None:
        """A worker that is up has nothing to say, except that it has failed."""
        try:
            while self.pool.places[index].state is State.UP and self.pool.channel(index).poll():
                self.pool.read(index)
        except Lost as lost:
            self.pool.lose(index, lost)

    def _ended(self, index: int) -> int:
        if self._setup is None:
            return 0
        self.memory.forget(self.own[index])
        return self.rollout.drop(self.own[index].tolist())

    def _failed(self, failure: Failure) -> None:
        """The actor itself goes on, with the other environments."""
        assert self._setup is not None
        self._setup.failed(replace(failure, actor=0, replaced=False))

    def _where(self, index: int) -> str:
        own = self.first * self.lanes + self.own[index]
        lanes = f"lane {own[0]}" if len(own) == 1 else f"lanes {own[0]} to {own[-1]}"
        return f" in environment {self.config.env} ({lanes}), unroll {self.sequences[0]}"

    def finish(self) -> None:
        self.pool.finish()

    # Checkpoints

    def snapshots(self) -> States:
        """The state of the actor; what is under way is awaited. None where an environment cannot be restored."""
        limit = self.config.supervisor.step_deadline
        patience = Patience(self.signals, limit, self._hurried, since=time.monotonic())
        while self._under_way() and patience.left() > 0:
            hush(self._results.reader)
            if self._under_way():
                self._watch(min(LOOK, patience.left()))
        asked = {place.index for place in self.pool.places if place.state is State.UP}
        for index in asked:
            self.pool.tell(index, {"op": "snapshot"})
        states: dict[int, Any] = {}
        while asked and (left := patience.left()) > 0:
            hush(self._results.reader)
            for index in asked.intersection(self.pool.poll(min(left, LOOK))):
                if self.pool.channel(index).poll():
                    self._read_states(index, states)
                    asked.discard(index)
            asked = {index for index in asked if self.pool.places[index].state is State.UP}
        for index in asked:
            self.pool.lose(index, self.pool.hung(index, patience.spent()))
        while self.pool.restarting:  # a checkpoint counts what was lost with those that failed, or is not written
            hush(self._results.reader)
            self.pool.poll(LOOK)
        if len(states) < self.lanes or any(state is None for state in states.values()) or self._under_way():
            return [None]
        env = {"lanes": [states[lane] for lane in range(self.lanes)]}
        return [self.rollout.snapshot(self.memory) | {"env": env, "sequence": self.sequences[0]}]

    def _under_way(self) -> bool:
        """Whether an environment that is there has not answered."""
        return bool(((self.rollout.status == FLYING) & ~self.memory.answered()).any())

    def _read_states(self, index: int, states: dict[int, Any]) -> None:
        try:
            message = self.pool.read(index)
        except Lost as lost:
            return self.pool.lose(index, lost)
        assert self._setup is not None
        if message["said"] and not self._complained:
            self._complained = True
            self._setup.say(
                f"environment {self.config.env}: its get_state gives nothing that can be stored ({message['said']}); "
                "checkpoints go without, and resuming begins new episodes"
            )
        for lane, state in zip(self.own[index].tolist(), message["states"] or ()):
            states[lane] = None if state is None else unpack(state)
