"""Catch, the smallest game of pixels, as a single environment and as a quick vector version.

It is the task of bsuite (Osband et al. 2020), after Mnih et al. 2014. A policy that sees the newest frame can play it
perfectly: it needs no memory and no stack of frames.
Both versions can be restored exactly (`get_state`, `set_state`), generators included.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rookery.envs.batch import Batch
from rookery.envs.snapshot import generator_state, restored_generator

BRIGHT = 255


def _space(rows: int, columns: int, scale: int) -> spaces.Box:
    if min(rows - 1, columns, scale) < 1:
        raise ValueError(f"rows={rows}, columns={columns}, scale={scale}: at least 2 rows, 1 column and scale 1")
    if columns // 2 > rows - 1:
        raise ValueError(
            f"columns={columns}: the paddle starts in the middle and makes rows - 1 = {rows - 1} moves, so it cannot "
            f"reach a ball in column 0; use {2 * rows - 1} columns or fewer"
        )
    return spaces.Box(0, BRIGHT, (1, rows * scale, columns * scale), np.uint8)


class Catch(gymnasium.Env):
    """A ball falls from a random column of the top row; a paddle in the bottom row moves left (0), stays (1) or moves
    right (2), starting in the middle.

    After rows - 1 steps the ball is in the bottom row and the episode ends, with reward 1 if the paddle is there and -1
    if not. All other rewards are 0. A perfect policy always earns 1, a random one 2 / columns - 1 on average (-0.6).
    A frame is [1, rows, columns], 255 where ball and paddle are; each cell is drawn as `scale` x `scale` pixels.
    """

    def __init__(self, rows: int = 10, columns: int = 5, scale: int = 1):
        self.observation_space = _space(rows, columns, scale)
        self.action_space = spaces.Discrete(3)
        self.rows, self.columns, self.scale = rows, columns, scale
        self.ball, self.paddle, self.row = 0, columns // 2, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.ball, self.paddle, self.row = int(self.np_random.integers(self.columns)), self.columns // 2, 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.paddle = min(max(self.paddle + int(action) - 1, 0), self.columns - 1)
        self.row += 1
        down = self.row == self.rows - 1
        reward = (1.0 if self.paddle == self.ball else -1.0) if down else 0.0
        return self._observe(), reward, down, False, {}

    def _observe(self) -> np.ndarray:
        frame = np.zeros((1, self.rows, self.columns), np.uint8)
        frame[0, self.row, self.ball] = frame[0, -1, self.paddle] = BRIGHT
        return frame if self.scale == 1 else frame.repeat(self.scale, 1).repeat(self.scale, 2)

    def get_state(self) -> dict[str, Any]:
        generator = generator_state(self.np_random)
        return {"ball": self.ball, "paddle": self.paddle, "row": self.row, "generator": generator}

    def set_state(self, state: dict[str, Any]) -> None:
        self.ball, self.paddle, self.row = (int(state[name]) for name in ("ball", "paddle", "row"))
        self._np_random = restored_generator(state["generator"])


class CatchVector(Batch):
    def __init__(self, num_envs: int, rows: int = 10, columns: int = 5, scale: int = 1):
        super().__init__(num_envs, _space(rows, columns, scale), spaces.Discrete(3))
        self.rows, self.columns, self.scale = rows, columns, scale
        self.ball, self.paddle, self.row = (np.zeros(num_envs, np.int64) for _ in range(3))
        self._lanes = np.arange(num_envs)

    def begin(self, lane: int, generator: np.random.Generator) -> None:
        self.ball[lane], self.paddle[lane], self.row[lane] = generator.integers(self.columns), self.columns // 2, 0

    def advance(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        np.clip(self.paddle + action - 1, 0, self.columns - 1, out=self.paddle)
        np.minimum(self.row + 1, self.rows - 1, out=self.row)  # lanes that have ended stay until they begin
        down = self.row == self.rows - 1
        reward = np.where(self.paddle == self.ball, 1, -1) * down
        return reward.astype(np.float32), down, np.zeros(self.num_envs, bool)

    def observe(self) -> np.ndarray:
        frames = np.zeros((self.num_envs, 1, self.rows, self.columns), np.uint8)
        frames[self._lanes, 0, self.row, self.ball] = frames[self._lanes, 0, -1, self.paddle] = BRIGHT
        return frames if self.scale == 1 else frames.repeat(self.scale, 2).repeat(self.scale, 3)

    def arrays(self) -> dict[str, np.ndarray]:
        return {"ball": self.ball, "paddle": self.paddle, "row": self.row}
