"""An environment in which most actions are illegal most of the time, and an error when taken.

Every step allows other actions, drawn at random. The reward is the number of the action over the number of choices, so
the best is the highest legal one; nothing in the observation says which that is, only the mask does.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rookery.core.types import MASK

CHOICES = (3, 5)  # of the branches of a MultiDiscrete
COUNT = 6  # choices of a Discrete
WAYS = ("observation", "info", "method")


class Illegal(RuntimeError):
    """An action was taken that the mask does not allow."""


class Maskable(gymnasium.Env):
    """`way`: where the mask is told. `multi`: two branches. Episodes end in turns by termination and truncation."""

    legal_steps = 0  # of all environments of this process

    def __init__(
        self, way: str = "info", multi: bool = False, length: int = 7, final: str = "none", dtype: str = "int8"
    ):
        """`final`: what the mask says behind an episode's end: "none" is legal, it is "missing", or it is "drawn"."""
        self.way, self.final, self.length, self.dtype = way, final, length, dtype
        self.choices = CHOICES if multi else (COUNT,)
        self.action_space: Any = spaces.MultiDiscrete(CHOICES) if multi else spaces.Discrete(COUNT)
        vector = spaces.Box(-1, 1, (3,), np.float32)
        size = sum(self.choices)
        self.observation_space: Any = vector
        if way == "observation":
            self.observation_space = spaces.Dict({MASK: spaces.Box(0, 1, (size,), np.dtype(dtype)), "seen": vector})
        if way == "method":
            self.action_masks = lambda: self.mask.copy()
        self.t = self.episode = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t, self.episode = 0, self.episode + 1
        return self._shown(False)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        parts = np.atleast_1d(action)
        starts = np.cumsum([0, *self.choices[:-1]])
        if not self.mask[starts + parts].all():
            raise Illegal(f"{parts} of {self.mask}")
        type(self).legal_steps += 1
        self.t += 1
        over = self.t >= self.length
        terminated, truncated = over and self.episode % 2 == 0, over and self.episode % 2 == 1
        reward = float(np.mean(parts / (np.array(self.choices) - 1)))
        obs, info = self._shown(over)
        return obs, reward, terminated, truncated, info

    def _shown(self, over: bool) -> tuple[Any, dict[str, Any]]:
        self.mask = np.concatenate([self._drawn(n) for n in self.choices])
        told = np.zeros_like(self.mask) if over and self.final == "none" else self.mask
        if over and self.final == "none":
            self.mask = told
        seen = self.np_random.uniform(-1, 1, 3).astype(np.float32)
        obs = {MASK: told.astype(self.dtype), "seen": seen} if self.way == "observation" else seen
        hidden = self.way != "info" or (over and self.final == "missing")
        return obs, {} if hidden else {MASK: told.astype(self.dtype)}

    def _drawn(self, n: int) -> np.ndarray:
        mask = self.np_random.random(n) < 0.35
        mask[self.np_random.integers(n)] = True
        return mask


def masks(rows: int, choices: tuple[int, ...], rng: np.random.Generator, share: float = 0.3) -> np.ndarray:
    """[rows, sum(choices)] bool, at least one legal choice in each branch."""
    out = []
    for n in choices:
        mask = rng.random((rows, n)) < share
        mask[np.arange(rows), rng.integers(n, size=rows)] = True
        out.append(mask)
    return np.concatenate(out, 1)


class ManyMaskable(gymnasium.vector.VectorEnv):
    """The same task for many lanes at once, for millions of steps. What is illegal is counted, and is worth nothing."""

    steps = illegal = 0  # of all environments of this process

    def __init__(self, num_envs: int, multi: bool = False, length: int = 50):
        self.num_envs, self.choices = num_envs, CHOICES if multi else (COUNT,)
        self.length = length + np.arange(num_envs) % 7  # lanes end at different times
        self.metadata = {"autoreset_mode": gymnasium.vector.AutoresetMode.NEXT_STEP}
        self.single_observation_space = spaces.Box(-1, 1, (3,), np.float32)
        self.single_action_space = spaces.MultiDiscrete(CHOICES) if multi else spaces.Discrete(COUNT)
        self.observation_space = gymnasium.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gymnasium.vector.utils.batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.rng = np.random.default_rng(seed)
        self.t = np.zeros(self.num_envs, np.int64)
        self.over = np.zeros(self.num_envs, bool)
        return self._shown(), {}

    def action_masks(self) -> np.ndarray:
        return self.mask

    def step(self, actions: np.ndarray) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        parts = actions.reshape(self.num_envs, -1)
        starts = np.cumsum([0, *self.choices[:-1]])
        legal = np.take_along_axis(self.mask, parts + starts, 1).all(1)
        live = ~self.over
        type(self).steps += int(live.sum())
        type(self).illegal += int((live & ~legal).sum())
        reward = np.where(live & legal, (parts / (np.array(self.choices) - 1)).mean(1), 0.0)
        self.t = np.where(live, self.t + 1, 0)
        self.over = live & (self.t >= self.length)
        truncated = self.over & (np.arange(self.num_envs) % 2 == 0)
        return self._shown(), reward, self.over & ~truncated, truncated, {}

    def _shown(self) -> np.ndarray:
        self.mask = masks(self.num_envs, self.choices, self.rng)
        return self.rng.uniform(-1, 1, (self.num_envs, 3)).astype(np.float32)


def share_of_best(mean: float, multi: bool = False) -> float:
    """A mean reward of `ManyMaskable` as a share of that of a policy that always takes the highest legal action."""
    choices = CHOICES if multi else (COUNT,)
    parts = np.split(masks(20_000, choices, np.random.default_rng(1)), np.cumsum(choices)[:-1], 1)
    highest = [(n - 1 - part[:, ::-1].argmax(1)) / (n - 1) for n, part in zip(choices, parts)]
    return mean / float(np.mean(highest))
