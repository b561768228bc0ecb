"""The blind cliffwalk of prioritised replay (Schaul et al. 2016, section 3.1), single and as a vector version.

A chain of n states and two actions. The right one moves on, the wrong one ends the episode with 0; the right one in the
last state ends it with 1. Random play earns the reward once in 2^n episodes, so that nearly everything in a replay
memory is the same, and the rare rewarded transition matters. The paper's discount is 1 - 1/n.
Nothing here is random.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rookery.envs.batch import Batch


def right(state: Any) -> Any:
    """The right action. It alternates: a constant policy fails in the first or the second step."""
    return state % 2


def _space(n: int, one_hot: bool) -> gymnasium.Space:
    if n < 1:
        raise ValueError(f"n={n}: a walk has at least one state")
    return spaces.Box(0.0, 1.0, (n,), np.float32) if one_hot else spaces.Discrete(n)


class CliffWalk(gymnasium.Env):
    """`n` states. Observations are one-hot, or numbers; the final one is the state that the episode ended in."""

    def __init__(self, n: int = 8, one_hot: bool = True):
        self.n, self.one_hot = n, one_hot
        self.observation_space = _space(n, one_hot)
        self.action_space = spaces.Discrete(2)
        self.state = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.state = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        goes_on = int(action) == right(self.state)
        last = self.state == self.n - 1
        self.state += goes_on and not last
        return self._observe(), float(goes_on and last), last or not goes_on, False, {}

    def _observe(self) -> Any:
        if not self.one_hot:
            return self.state
        obs = np.zeros(self.n, np.float32)
        obs[self.state] = 1.0
        return obs

    def get_state(self) -> dict[str, Any]:
        return {"state": self.state}

    def set_state(self, state: dict[str, Any]) -> None:
        self.state = int(state["state"])


class CliffWalkVector(Batch):
    def __init__(self, num_envs: int, n: int = 8, one_hot: bool = True):
        super().__init__(num_envs, _space(n, one_hot), spaces.Discrete(2))
        self.n, self.state = n, np.zeros(num_envs, np.int64)
        self._shown = np.eye(n, dtype=np.float32) if one_hot else np.arange(n)

    def begin(self, lane: int, generator: np.random.Generator) -> None:
        self.state[lane] = 0

    def advance(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        goes_on, last = action == right(self.state), self.state == self.n - 1
        self.state += goes_on & ~last
        return (goes_on & last).astype(np.float32), last | ~goes_on, np.zeros(self.num_envs, bool)

    def observe(self) -> np.ndarray:
        return self._shown[self.state]

    def arrays(self) -> dict[str, np.ndarray]:
        return {"state": self.state}
