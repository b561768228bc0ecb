"""A small environment of images that can be restored exactly: a walker on a line, seen from above."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

SIZE = 10


class Pixels(gym.Env):
    def __init__(self) -> None:
        self.observation_space = gym.spaces.Box(0, 255, (SIZE, SIZE, 1), np.uint8)
        self.action_space = gym.spaces.Discrete(2)
        self.place = self.step_number = 0

    def _seen(self) -> np.ndarray:
        picture = np.zeros((SIZE, SIZE, 1), np.uint8)
        picture[self.step_number % SIZE, self.place] = 255
        return picture

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.place, self.step_number = SIZE // 2, 0
        return self._seen(), {}

    def step(self, action: int):
        self.place = min(SIZE - 1, max(0, self.place + (1 if action else -1)))
        self.step_number += 1
        return self._seen(), float(self.place == SIZE - 1), self.place == 0, self.step_number >= 25, {}

    def get_state(self) -> dict[str, Any]:
        return {"place": self.place, "step_number": self.step_number}

    def set_state(self, state: dict[str, Any]) -> None:
        self.place, self.step_number = state["place"], state["step_number"]


def make() -> gym.Env:
    return Pixels()
