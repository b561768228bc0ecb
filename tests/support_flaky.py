"""Environments that fail on command, once or for good. In one process; `plan` says what happens next."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

plan: dict[str, int] = {}  # "make", "reset", "step": the call that fails, counted down from here
closed: list[int] = []


def fails(call: str) -> bool:
    plan[call] = plan.get(call, -1) - 1
    return plan[call] == 0


class Flaky(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple:
        if fails("reset"):
            raise RuntimeError("no reset today")
        self.steps = 0
        return np.zeros(3, np.float32), {}

    def step(self, action: int) -> tuple:
        if fails("step"):
            raise RuntimeError("no step today")
        self.steps += 1
        return np.zeros(3, np.float32), 1.0, self.steps == 7, False, {}

    def close(self) -> None:
        closed.append(1)


def make() -> Flaky:
    if fails("make"):
        raise ModuleNotFoundError("a library has gone")
    return Flaky()
