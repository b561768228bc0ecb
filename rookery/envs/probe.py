"""Probes of auxiliary losses: tasks in which the right answer of an auxiliary task is known exactly.

`PixelSwitch` is for pixel control and `Cue` for reward prediction (UNREAL, Jaderberg et al. 2017). There is nothing for
the policy to gain: in the first there is no reward, in the second actions do nothing. So what is learnt is learnt from
the auxiliary loss alone. Each is a single environment and a vector version, and both can be restored exactly.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rookery.envs.batch import Batch
from rookery.envs.snapshot import generator_state, restored_generator

BRIGHT = 255
QUADRANT = 10  # pixels, of PixelSwitch
SIDE = 8  # pixels, of Cue
DELAY = 2  # steps from a cue to its reward


def _image(side: int) -> spaces.Box:
    return spaces.Box(0, BRIGHT, (1, side, side), np.uint8)


def _quadrants(lit: np.ndarray) -> np.ndarray:
    """lit [..., 4]: frames [..., 1, 20, 20], with quadrants in reading order."""
    small = (lit.astype(np.uint8) * BRIGHT).reshape(*lit.shape[:-1], 1, 2, 2)
    return small.repeat(QUADRANT, -2).repeat(QUADRANT, -1)


class PixelSwitch(gymnasium.Env):
    """Action a (0 to 3) flips quadrant a of the image between dark and bright. No reward, episodes of `length` steps.

    Quadrants are 10x10 pixels: 0 top left, 1 top right, 2 bottom left, 3 bottom right; an episode begins with random
    ones lit. Learnable: every pixel of quadrant a changes by 255 and no other pixel changes. So the pixel-control
    reward of a cell within quadrant q is 1 if a = q and 0 if not, whatever the frame. With n steps left and discount g,

        Q*(a, q) = [a = q] + g + g^2 + ... + g^(n-1)

    The difference between actions is exactly 1. The level depends on n, which the frame does not show, because the
    last step terminates the episode. With `truncate` it truncates it instead, and Q*(a, q) = [a = q] + g / (1 - g).
    """

    def __init__(self, length: int = 20, truncate: bool = False):
        self.length, self.truncate = _checked(length), truncate
        self.observation_space, self.action_space = _image(2 * QUADRANT), spaces.Discrete(4)
        self.lit, self.t = np.zeros(4, bool), 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.lit, self.t = self.np_random.integers(2, size=4) == 1, 0
        return _quadrants(self.lit), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.lit[int(action)] ^= True
        self.t += 1
        over = self.t == self.length
        return _quadrants(self.lit), 0.0, over and not self.truncate, over and self.truncate, {}

    def get_state(self) -> dict[str, Any]:
        return {"lit": self.lit.copy(), "t": self.t, "generator": generator_state(self.np_random)}

    def set_state(self, state: dict[str, Any]) -> None:
        self.lit, self.t = np.array(state["lit"], bool), int(state["t"])
        self._np_random = restored_generator(state["generator"])


class PixelSwitchVector(Batch):
    def __init__(self, num_envs: int, length: int = 20, truncate: bool = False):
        super().__init__(num_envs, _image(2 * QUADRANT), spaces.Discrete(4))
        self.length, self.truncate = _checked(length), truncate
        self.lit, self.t = np.zeros((num_envs, 4), bool), np.zeros(num_envs, np.int64)
        self._lanes = np.arange(num_envs)

    def begin(self, lane: int, generator: np.random.Generator) -> None:
        self.lit[lane], self.t[lane] = generator.integers(2, size=4) == 1, 0

    def advance(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        self.lit[self._lanes, action] ^= True
        self.t += 1
        over, never = self.t == self.length, np.zeros(self.num_envs, bool)
        return np.zeros(self.num_envs, np.float32), *((never, over) if self.truncate else (over, never))

    def observe(self) -> np.ndarray:
        return _quadrants(self.lit)

    def arrays(self) -> dict[str, np.ndarray]:
        return {"lit": self.lit, "t": self.t}


# What each cue (0 none, 1 left, -1 right) looks like, by the cue as an index: -1 is the last.
_SHOWN = np.zeros((3, 1, SIDE, SIDE), np.uint8)
_SHOWN[1, :, :, : SIDE // 2] = _SHOWN[-1, :, :, SIDE // 2 :] = BRIGHT


def _cues(generator: np.random.Generator, length: int, rate: float) -> np.ndarray:
    """The cue of each frame of an episode, [length + 1]."""
    draw = generator.random(length + 1)
    return (draw < rate / 2).astype(np.int64) - (draw >= 1 - rate / 2)


class Cue(gymnasium.Env):
    """Cues announce rewards: a frame with a bright left half means +1 two steps later, a bright right half -1.

    Frames are dark otherwise. Each is a cue with probability `rate`, left or right alike, independent of the others;
    the two actions do nothing. Let reward t be that of the step from frame t to frame t + 1. It is decided by frame
    t - 2, and is 0 if that is dark or before the episode. Learnable: frames t - 2, t - 1, t determine reward t exactly.
    From frames t - 1 and t alone nothing is known of it: the best guess is "zero", right for 1 - `rate` of the rows
    from the third on. Episodes have `length` steps and terminate; cues in their last three frames earn nothing.
    """

    def __init__(self, length: int = 30, rate: float = 0.2):
        self.length, self.rate = _checked(length, rate), rate
        self.observation_space, self.action_space = _image(SIDE), spaces.Discrete(2)
        self.cues, self.t = np.zeros(length + 1, np.int64), 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.cues, self.t = _cues(self.np_random, self.length, self.rate), 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward = float(self.cues[self.t - DELAY]) if self.t >= DELAY else 0.0
        self.t += 1
        return self._observe(), reward, self.t == self.length, False, {}

    def _observe(self) -> np.ndarray:
        return _SHOWN[self.cues[self.t]].copy()

    def get_state(self) -> dict[str, Any]:
        return {"cues": self.cues.copy(), "t": self.t, "generator": generator_state(self.np_random)}

    def set_state(self, state: dict[str, Any]) -> None:
        self.cues, self.t = np.array(state["cues"]), int(state["t"])
        self._np_random = restored_generator(state["generator"])


class CueVector(Batch):
    def __init__(self, num_envs: int, length: int = 30, rate: float = 0.2):
        super().__init__(num_envs, _image(SIDE), spaces.Discrete(2))
        self.length, self.rate = _checked(length, rate), rate
        self.cues, self.t = np.zeros((num_envs, length + 1), np.int64), np.zeros(num_envs, np.int64)
        self._lanes = np.arange(num_envs)

    def begin(self, lane: int, generator: np.random.Generator) -> None:
        self.cues[lane], self.t[lane] = _cues(generator, self.length, self.rate), 0

    def advance(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        reward = np.where(self.t >= DELAY, self.cues[self._lanes, self.t - DELAY], 0).astype(np.float32)
        np.minimum(self.t + 1, self.length, out=self.t)  # lanes that have ended stay until they begin
        return reward, self.t == self.length, np.zeros(self.num_envs, bool)

    def observe(self) -> np.ndarray:
        return _SHOWN[self.cues[self._lanes, self.t]]

    def arrays(self) -> dict[str, np.ndarray]:
        return {"cues": self.cues, "t": self.t}


def _checked(length: int, rate: float = 0.0) -> int:
    if length < 1:
        raise ValueError(f"length={length}: an episode has at least one step")
    if not 0 <= rate <= 1:
        raise ValueError(f"rate={rate} is the probability of a cue, from 0 to 1")
    return length
