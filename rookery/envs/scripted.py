"""Environments that follow a script, for tests of Rookery and of your own set-up.

The observation of `Counter` holds its seed, episode and step: a misplaced row is visible.
`Faulty` is an ordinary environment that misbehaves at a given step of a given episode.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import gymnasium
import numpy as np
from gymnasium import spaces

from rookery.envs.snapshot import env_state, restore_env

ENDS = {"terminated": (True, False), "truncated": (False, True), "both": (True, True)}
NAMES = 1_000_003  # `who` is the seed modulo this: float32 holds it exactly


class Counter(gymnasium.Env):
    """Observation (who, episode, t); reward t + action / 4, so that both can be read from it.

    `who` comes from the last seed given. Episode e has lengths[e] steps and ends by ends[e], both lists taken in a
    circle. Action a is one of `actions`, at most 4 of them.
    """

    def __init__(
        self,
        lengths: Sequence[int] = (5,),
        ends: Sequence[str] = ("terminated",),
        actions: int = 2,
        reuse: bool = False,
    ):
        if unknown := set(ends) - set(ENDS):
            raise ValueError(f"ends may be {', '.join(ENDS)}, not {sorted(unknown)}")
        self.lengths, self.ends, self.reuse = tuple(lengths), tuple(ends), reuse
        self.observation_space = spaces.Box(0.0, np.inf, (3,), np.float32)
        self.action_space = spaces.Discrete(actions)
        self.who, self.episode, self.t = 0, -1, 0
        self._obs = np.zeros(3, np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.who, self.episode = seed % NAMES, -1
        self.episode, self.t = self.episode + 1, 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward = self.t + int(action) / 4
        self.t += 1
        over = self.t >= self.lengths[self.episode % len(self.lengths)]
        terminated, truncated = ENDS[self.ends[self.episode % len(self.ends)]] if over else (False, False)
        return self._observe(), reward, terminated, truncated, {}

    def _observe(self) -> np.ndarray:
        """With `reuse`, the same object each time, as some environments do to save memory."""
        self._obs[:] = self.who, self.episode, self.t
        return self._obs if self.reuse else self._obs.copy()

    def get_state(self) -> dict[str, Any]:
        return {"who": self.who, "episode": self.episode, "t": self.t}

    def set_state(self, state: dict[str, Any]) -> None:
        self.who, self.episode, self.t = (int(state[name]) for name in ("who", "episode", "t"))


Fault = Literal[
    "none",
    "raise_init",
    "raise_reset",
    "raise_step",
    "nan_obs",
    "nan_reward",
    "bad_shape",
    "hang",
    "kill",
    "exit",
    "sys_exit",
]


class Faulty(gymnasium.Env):
    """`env`, except for step `at_step` (from 0) of episode `at_episode` (from 0), where `fault` strikes.

    "raise_reset" depends on the episode only, "raise_init" on neither. `marker`: the path of a file that is created
    when the fault strikes; where it exists already there is no fault, so that a replacement does not fail again.
    `seed`: strike only in the environment that was last reset with this seed, that is, in one lane of many.
    """

    def __init__(
        self,
        fault: Fault = "raise_step",
        at_step: int = 0,
        at_episode: int = 0,
        marker: str = "",
        seed: int | None = None,
        env: str = "rookery/Counter-v0",
        hang_seconds: float = 3600.0,
        **kwargs: Any,
    ):
        if fault not in get_args(Fault):
            raise ValueError(f"fault may be {', '.join(get_args(Fault))}, not {fault!r}")
        if ":" in env:  # Gymnasium would import the module named before it
            raise ValueError(f"env may be an id that is registered already, not {env!r}")
        self.fault, self.at_step, self.at_episode = fault, at_step, at_episode
        self.marker, self.only_seed, self.hang_seconds = marker, seed, hang_seconds
        self.episode, self.t = -1, 0
        self.last_seed: int | None = None
        if fault == "raise_init" and self._strikes():
            raise RuntimeError("scripted fault: raise_init")
        self.inner = gymnasium.make(env, disable_env_checker=True, **kwargs)
        self.observation_space, self.action_space = self.inner.observation_space, self.inner.action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self.last_seed = seed
        self.episode, self.t = self.episode + 1, 0
        if self.fault == "raise_reset" and self.episode == self.at_episode and self._strikes():
            raise RuntimeError(f"scripted fault: raise_reset in episode {self.episode}")
        return self.inner.reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        due = self.fault not in ("none", "raise_init", "raise_reset")
        due = due and (self.episode, self.t) == (self.at_episode, self.at_step) and self._strikes()
        self.t += 1
        if due:
            self._act_up()
        obs, reward, terminated, truncated, info = self.inner.step(action)
        if due and self.fault == "nan_obs":
            obs = np.full_like(obs, np.nan)
        if due and self.fault == "bad_shape":
            obs = np.concatenate([obs, obs])
        if due and self.fault == "nan_reward":
            reward = float("nan")
        return obs, reward, terminated, truncated, info

    def _act_up(self) -> None:
        if self.fault == "raise_step":
            raise RuntimeError(f"scripted fault: raise_step in episode {self.episode}, step {self.t - 1}")
        if self.fault == "hang":
            time.sleep(self.hang_seconds)
        if self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "exit":
            os._exit(13)
        if self.fault == "sys_exit":
            sys.exit("scripted fault: sys_exit")

    def _strikes(self) -> bool:
        """Whether the fault strikes here. Creates the marker atomically, so that it strikes in one environment only."""
        if self.only_seed is not None and self.last_seed != self.only_seed:
            return False
        if not self.marker:
            return True
        try:
            Path(self.marker).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def close(self) -> None:
        if hasattr(self, "inner"):
            self.inner.close()

    def get_state(self) -> dict[str, Any] | None:
        inner = env_state(self.inner)
        seed = -1 if self.last_seed is None else self.last_seed
        return None if inner is None else {"inner": inner, "episode": self.episode, "t": self.t, "seed": seed}

    def set_state(self, state: dict[str, Any]) -> None:
        restore_env(self.inner, state["inner"])
        self.episode, self.t = int(state["episode"]), int(state["t"])
        self.last_seed = None if state["seed"] == -1 else int(state["seed"])
