"""Tasks that need memory and nothing else, each as a single environment and as a quick vector version.

Both reward a perfect policy with a return of exactly 1; a policy without memory can do no better than chance.
Both can be restored exactly (`get_state`, `set_state`), generators included.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rookery.envs.batch import Batch
from rookery.envs.snapshot import generator_state, restored_generator


def _symbol_space(symbols: int, one_hot: bool) -> gymnasium.Space:
    return spaces.Box(0.0, 1.0, (symbols,), np.float32) if one_hot else spaces.Discrete(symbols)


class RepeatPrevious(gymnasium.Env):
    """Name the symbol seen `k` steps ago. Memoryless return: 1 / symbols.

    Each step shows a random symbol; every right answer earns the same share of 1. The first k answers do not count,
    since there is nothing to repeat yet.
    """

    def __init__(self, k: int = 2, symbols: int = 4, length: int = 32, one_hot: bool = True):
        if not 0 <= k < length:
            raise ValueError(f"k={k} must lie between 0 and length - 1 = {length - 1}")
        self.k, self.symbols, self.length = k, symbols, length
        self.observation_space = _symbol_space(symbols, one_hot)
        self.action_space = spaces.Discrete(symbols)
        self._shown: Any = np.eye(symbols, dtype=np.float32) if one_hot else range(symbols)
        self.sequence, self.t = np.zeros(length + 1, np.int64), 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.sequence, self.t = self.np_random.integers(self.symbols, size=self.length + 1), 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        right = self.t >= self.k and int(action) == self.sequence[self.t - self.k]
        self.t += 1
        return self._observe(), float(right) / (self.length - self.k), self.t == self.length, False, {}

    def _observe(self) -> Any:
        shown = self._shown[self.sequence[self.t]]
        return shown.copy() if isinstance(shown, np.ndarray) else shown

    def get_state(self) -> dict[str, Any]:
        return {"sequence": self.sequence.copy(), "t": self.t, "generator": generator_state(self.np_random)}

    def set_state(self, state: dict[str, Any]) -> None:
        self.sequence, self.t = np.array(state["sequence"]), int(state["t"])
        self._np_random = restored_generator(state["generator"])


class RepeatPreviousVector(Batch):
    def __init__(self, num_envs: int, k: int = 2, symbols: int = 4, length: int = 32, one_hot: bool = True):
        if not 0 <= k < length:
            raise ValueError(f"k={k} must lie between 0 and length - 1 = {length - 1}")
        super().__init__(num_envs, _symbol_space(symbols, one_hot), spaces.Discrete(symbols))
        self.k, self.symbols, self.length = k, symbols, length
        self._shown = np.eye(symbols, dtype=np.float32) if one_hot else np.arange(symbols)
        self.sequence = np.zeros((num_envs, length + 1), np.int64)
        self.t = np.zeros(num_envs, np.int64)
        self._lanes = np.arange(num_envs)

    def begin(self, lane: int, generator: np.random.Generator) -> None:
        self.sequence[lane] = generator.integers(self.symbols, size=self.length + 1)
        self.t[lane] = 0

    def advance(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        right = (action == self.sequence[self._lanes, self.t - self.k]) & (self.t >= self.k)
        np.minimum(self.t + 1, self.length, out=self.t)  # lanes that have ended stay where they are until they begin
        reward = (right / (self.length - self.k)).astype(np.float32)
        return reward, self.t == self.length, np.zeros(self.num_envs, bool)

    def observe(self) -> np.ndarray:
        return self._shown[self.sequence[self._lanes, self.t]]

    def arrays(self) -> dict[str, np.ndarray]:
        return {"sequence": self.sequence, "t": self.t}


def _maze(length: int) -> np.ndarray:
    """What is seen at each position, [length + 2, 4]: two lamps (lit at the entrance), corridor, junction."""
    if length < 1:
        raise ValueError(f"length={length}: a corridor has at least one step")
    seen = np.zeros((length + 2, 4), np.float32)  # the last row is outside, after the choice
    seen[1:length, 2] = 1.0
    seen[length, 3] = 1.0
    return seen


class TMaze(gymnasium.Env):
    """A lamp at the entrance says which way to turn at the end of the corridor. Memoryless return: 1/2.

    The walk is automatic: actions count at the junction only, where 0 and 1 are the two arms and the one that was lit
    earns 1. So the whole difficulty is to carry one bit over `length` steps (Bakker 2002, without the walking).
    """

    def __init__(self, length: int = 10):
        self.length, self._seen = length, _maze(length)
        self.observation_space = spaces.Box(0.0, 1.0, (4,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.arm, self.t = 0, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.arm, self.t = int(self.np_random.integers(2)), 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        chosen = self.t == self.length
        reward = float(chosen and int(action) == self.arm)
        self.t += 1
        return self._observe(), reward, chosen, False, {}

    def _observe(self) -> np.ndarray:
        seen = self._seen[self.t].copy()
        if self.t == 0:
            seen[self.arm] = 1.0
        return seen

    def get_state(self) -> dict[str, Any]:
        return {"arm": self.arm, "t": self.t, "generator": generator_state(self.np_random)}

    def set_state(self, state: dict[str, Any]) -> None:
        self.arm, self.t = int(state["arm"]), int(state["t"])
        self._np_random = restored_generator(state["generator"])


class TMazeVector(Batch):
    def __init__(self, num_envs: int, length: int = 10):
        super().__init__(num_envs, spaces.Box(0.0, 1.0, (4,), np.float32), spaces.Discrete(2))
        self.length, self._seen = length, _maze(length)
        self.arm, self.t = np.zeros(num_envs, np.int64), np.zeros(num_envs, np.int64)

    def begin(self, lane: int, generator: np.random.Generator) -> None:
        self.arm[lane], self.t[lane] = generator.integers(2), 0

    def advance(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        chosen = self.t == self.length
        reward = (chosen & (action == self.arm)).astype(np.float32)
        np.minimum(self.t + 1, self.length + 1, out=self.t)
        return reward, chosen, np.zeros(self.num_envs, bool)

    def observe(self) -> np.ndarray:
        seen = self._seen[self.t]
        start = np.flatnonzero(self.t == 0)
        if start.size:
            seen[start, self.arm[start]] = 1.0
        return seen

    def arrays(self) -> dict[str, np.ndarray]:
        return {"arm": self.arm, "t": self.t}
