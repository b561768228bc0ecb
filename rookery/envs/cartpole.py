"""CartPole for many lanes, and CartPole without velocities: a task for recurrent policies.

`CartPoleVector` plays what gymnasium's CartPole-v1 plays: the same equations in the same order on float64, and for a
lane the same episodes as a single environment with the lane's seed. Gymnasium's own vector version draws all resets
from one generator, so that a lane's episodes depend on its neighbours; besides, it takes twice as long.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

from rookery.envs.batch import Batch
from rookery.envs.snapshot import generator_state, restored_generator

VISIBLE = [0, 2]  # position and angle


def _masked(space: spaces.Space) -> spaces.Box:
    assert isinstance(space, spaces.Box), space
    return spaces.Box(space.low[VISIBLE], space.high[VISIBLE], dtype=np.float32)


class CartPoleVector(Batch):
    visible: slice = slice(None)

    def __init__(self, num_envs: int, max_episode_steps: int = 500, sutton_barto_reward: bool = False):
        self.one = CartPoleEnv()  # for its constants and spaces
        space = self.one.observation_space
        super().__init__(num_envs, space if self.visible == slice(None) else _masked(space), self.one.action_space)
        self.limit, self.sutton_barto = max_episode_steps, sutton_barto_reward
        self.state = np.zeros((4, num_envs))  # position, velocity, angle, angular velocity
        self.steps = np.zeros(num_envs, np.int64)
        self._change = np.zeros((4, num_envs))
        self._bounds = np.array([[self.one.x_threshold], [self.one.theta_threshold_radians]])

    def begin(self, lane: int, generator: np.random.Generator) -> None:
        self.state[:, lane] = generator.uniform(low=-0.05, high=0.05, size=(4,))
        self.steps[lane] = 0

    def advance(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        # CartPoleEnv.step, Euler integration. The order of the operations is kept: it decides the last bits.
        one, change = self.one, self._change
        angle, spin = self.state[2:]
        force = action * (2 * one.force_mag) - one.force_mag
        cos, sin = np.cos(angle), np.sin(angle)
        temp = (force + one.polemass_length * np.square(spin) * sin) / one.total_mass
        twist = (one.gravity * sin - cos * temp) / (
            one.length * (4.0 / 3.0 - one.masspole * np.square(cos) / one.total_mass)
        )
        change[::2], change[3] = self.state[1::2], twist
        np.subtract(temp, one.polemass_length * twist * cos / one.total_mass, out=change[1])
        change *= one.tau
        self.state += change
        self.steps += 1
        far, tilted = np.abs(self.state[::2]) > self._bounds
        terminated = far | tilted
        truncated = self.steps >= self.limit
        reward = -terminated.astype(np.float32) if self.sutton_barto else np.ones(self.num_envs, np.float32)
        return reward, terminated, truncated

    def observe(self) -> np.ndarray:
        return self.state[self.visible].T.astype(np.float32, order="C")

    def arrays(self) -> dict[str, np.ndarray]:
        return {"state": self.state, "steps": self.steps}


class MaskedCartPoleVector(CartPoleVector):
    visible = slice(0, 4, 2)


class MaskedCartPole(CartPoleEnv):
    """CartPole that shows position and angle only: velocities have to be inferred from the past."""

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.observation_space = _masked(self.observation_space)

    def reset(self, **kwargs: Any) -> tuple[np.ndarray, dict[str, Any]]:
        obs, info = super().reset(**kwargs)
        return obs[VISIBLE], info

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        obs, *rest = super().step(action)
        return obs[VISIBLE], *rest

    def get_state(self) -> dict[str, Any] | None:
        if self.state is None:  # not reset yet
            return None
        return {
            "state": np.array(self.state),
            "beyond": self.steps_beyond_terminated,
            "generator": generator_state(self.np_random),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        self.state = np.array(state["state"], np.float64)
        self.steps_beyond_terminated = state["beyond"]
        self._np_random = restored_generator(state["generator"])
