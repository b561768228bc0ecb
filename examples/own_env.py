"""A small environment of your own: hold a drone at height 0 in gusty wind.

    rookery check-env examples.own_env:make
    rookery train ppo --env examples.own_env:make --env-kwargs '{"wind": 0.01}'
"""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.wrappers import TimeLimit

from rookery.envs.snapshot import generator_state, restored_generator


class Hover(gymnasium.Env):
    """Observation (height, speed); action 0, 1, 2: thrust down, none, up. Beyond height 1 it crashes."""

    def __init__(self, wind: float = 0.01):
        self.wind = wind
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = spaces.Discrete(3)
        self.height, self.speed = 0.0, 0.0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.height, self.speed = (float(x) for x in self.np_random.uniform(-0.5, 0.5, 2) * (1.0, 0.1))
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.speed += 0.02 * (int(action) - 1) + self.wind * float(self.np_random.normal())
        self.height += self.speed
        crashed = abs(self.height) > 1
        return self._observe(), 0.0 if crashed else 1 - abs(self.height), crashed, False, {}

    def _observe(self) -> np.ndarray:
        return np.array([self.height, self.speed], np.float32)

    # Optional: with these two, a resumed run continues in the middle of its episodes, bit for bit.

    def get_state(self) -> dict[str, Any]:
        return {"height": self.height, "speed": self.speed, "generator": generator_state(self.np_random)}

    def set_state(self, state: dict[str, Any]) -> None:
        self.height, self.speed = state["height"], state["speed"]
        self._np_random = restored_generator(state["generator"])


def make(wind: float = 0.01, limit: int = 200) -> gymnasium.Env:
    """The factory: plain keyword arguments in, one environment out."""
    return TimeLimit(Hover(wind), limit)
