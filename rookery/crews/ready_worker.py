"""`python -m rookery.crews.ready_worker`: a process that steps some environments, each when it is given an action.

The child's side of `ready.py`. It does not load torch. Each environment is a lane by itself (`envs/lanes.py`), so that
resets, clipped rewards and numbers at the end of episodes are those of every other crew. One that fails ends the
process: the parent replaces it.
"""

from __future__ import annotations

import contextlib
import os
import select
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np

from rookery.core.config import AtariConfig, NetConfig
from rookery.core.errors import CheckpointError
from rookery.crews.ready_memory import LaneMemory, share
from rookery.crews.ready_state import pack, unpack
from rookery.pipes.bell import hush, ring
from rookery.pipes.shm import Segment
from rookery.processes.child import IDLE, assigned, serve
from rookery.processes.faults import FaultPlan


class EnvProcess:
    def __init__(self, channel: Any, start: dict[str, Any], fds: dict[str, int]):
        from rookery.envs.make import make

        fields = msgspec.json.decode(start["config"])
        start = assigned(channel, start)  # everything is loaded: a spare process waits here
        self.channel, self.index = channel, start["index"]
        self._plan = FaultPlan.parse(fields["fault_plan"]).only("actor", self.index, start["incarnation"])
        self._plan.fire("actor", self.index, incarnation=start["incarnation"], start=0)
        self._incarnation, self._steps = start["incarnation"], 0
        self.own = share(fields["envs_per_actor"], fields["actors"], self.index)
        self.envs = [make(_config(fields), 1) for _ in self.own]
        self.spec, self._metrics = self.envs[0].spec, self.envs[0].metrics
        about = {"metrics": list(self._metrics), "scored": self.envs[0].score is not None}
        self._send({"op": "ready", "spec": msgspec.to_builtins(self.spec), "about": about})
        told = channel.recv(timeout=IDLE)
        self.memory = LaneMemory(Segment.attach(fds["lanes"], told["size"]), told["layout"])
        self._orders, self._results = fds[f"bell{self.index}"], fds["results"]
        self.actor, self.first = told["actor"], told["first"]
        self._episode, self._t = [0] * len(self.envs), [0] * len(self.envs)
        for number, env in enumerate(self.envs):
            env.number_lanes(self.first + self.own[number])
            self._begin(number, told["seeds"][number], told["states"])

    def _begin(self, number: int, seed: int, states: list[Any] | None) -> None:
        """An episode of an environment, or where a checkpoint has left it; its observation is the parent's then."""
        env = self.envs[number]
        if states is not None:
            lane = self.first + self.own[number]
            try:
                env.set_state(unpack(states[number]))
            except (Exception, SystemExit) as error:  # to try again would not help
                raise CheckpointError(
                    f"environment {self.spec.id} cannot go on from the checkpoint (lane {lane}): "
                    f"{type(error).__name__}: {error}. Use an earlier checkpoint: move the newest one away"
                ) from error
            return
        obs = self._checked(number, lambda: (env.reset([seed]), np.zeros(1, np.float32)))[0]
        self._show(self.own[number], obs)

    def run(self) -> None:
        self._send({"op": "started"})
        poller = select.poll()
        for fd in (self.channel.fileno(), self._orders):
            poller.register(fd, select.POLLIN)
        while True:
            hush(self._orders)  # before the look: what is asked after it rings again
            while self._work():
                pass
            poller.poll(IDLE * 1000)
            while self.channel.poll():
                message = self.channel.recv(0.0)
                if message["op"] == "stop":
                    return
                if message["op"] == "snapshot":
                    self._snapshot()

    def _work(self) -> bool:
        """Step every environment that has an action, one after the other."""
        found = False
        for number, lane in enumerate(self.own):
            if self.memory.waits(lane):
                self._step(number, lane)
                self.memory.answer(lane)
                ring(self._results)
                found = True
        return found

    def _step(self, number: int, lane: int) -> None:
        if self._plan:
            self._plan.fire("actor", self.index, self._steps, incarnation=self._incarnation)
        env, columns = self.envs[number], self.memory.columns
        # A copy: an environment may keep its action, and this memory is written again.
        action = columns["action"][lane : lane + 1].copy()
        obs, reward, terminated, truncated = self._checked(number, lambda: env.step(action))
        self._show(lane, obs)
        columns["reward"][lane], columns["terminated"][lane] = reward[0], terminated[0]
        columns["truncated"][lane] = truncated[0]
        columns["score"][lane] = reward[0] if env.score is None else env.score[0]
        self._t[number], self._steps = self._t[number] + 1, self._steps + 1
        if terminated[0] or truncated[0]:
            self._episode[number], self._t[number] = self._episode[number] + 1, -1  # the reset comes first
            if (infos := env.take_infos()) is not None:
                columns["info"][lane] = [infos[0][-1][name] for name in self._metrics]

    def _checked(self, number: int, call: Any) -> Any:
        """The result of an environment, finite; a failure of it with its place."""
        from rookery.envs.gate import check_finite
        from rookery.envs.lanes import LaneFault

        try:
            result = call()
            check_finite(result[0], result[1])
        except LaneFault as fault:
            place = max(0, self._t[number])
            raise fault.located(
                self.spec.id, self.actor, self.first + self.own[number], self._episode[number], place
            ) from fault
        return result

    def _show(self, lane: int, obs: dict[str, np.ndarray]) -> None:
        for name, column in self.memory.obs.items():
            column[lane] = obs[name][0]

    def _snapshot(self) -> None:
        """The states of the environments; None, and why, where one cannot be told."""
        try:
            states = [env.get_state() for env in self.envs]
            self._send({"op": "snapshot", "states": [None if s is None else pack(s) for s in states], "said": ""})
        except Exception as error:  # the environment's own code, or what it gave; nothing was sent
            self._send({"op": "snapshot", "states": None, "said": f"{type(error).__name__}: {error}"})

    def _send(self, message: dict[str, Any]) -> None:
        self.channel.send(message, timeout=IDLE)


def _config(fields: dict[str, Any]) -> Any:
    """What environments are made from; the rest of the config would load the algorithm, and with it torch."""
    atari, net = msgspec.convert(fields["atari"], AtariConfig), msgspec.convert(fields["net"], NetConfig)
    names = tuple(fields["metrics_from_info"])
    return SimpleNamespace(
        env=fields["env"], env_kwargs=fields["env_kwargs"], atari=atari, net=net, metrics_from_info=names
    )


def _run_as_batch() -> None:
    """Have the kernel not stop the parent to run us when it wakes us: it has others to wake."""
    with contextlib.suppress(AttributeError, OSError):  # not Linux
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def body(channel: Any, start: dict[str, Any], fds: dict[str, int]) -> None:
    _run_as_batch()
    EnvProcess(channel, start, fds).run()


if __name__ == "__main__":
    serve(body)
