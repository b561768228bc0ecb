"""Base of our own vector environments: next-step reset, one random generator per lane, restorable.

A lane draws from its own generator what the single environment draws with the same seed, so a vector version plays
exactly the episodes of the single one, for any number of lanes. A subclass says how lanes begin and what a step does.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from rookery.envs.snapshot import generator_state, restored_generator


class Batch(VectorEnv):
    lane_seeds = True  # reset(seed=...) takes a list, one per lane

    def __init__(self, num_envs: int, observation: Space, action: Space):
        self.num_envs, self.metadata = num_envs, {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.single_observation_space, self.single_action_space = observation, action
        self.observation_space = batch_space(observation, num_envs)
        self.action_space = batch_space(action, num_envs)
        self.generators = [seeding.np_random()[0] for _ in range(num_envs)]
        self.ended = np.zeros(num_envs, bool)

    @abstractmethod
    def begin(self, lane: int, generator: np.random.Generator) -> None:
        """Start an episode in one lane."""

    @abstractmethod
    def advance(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Step every lane: reward, terminated, truncated, all [B]. What it does to lanes that had ended is undone."""

    @abstractmethod
    def observe(self) -> Any: ...

    @abstractmethod
    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays that make up the state of all lanes, by name; they are restored in place."""

    def reset(
        self, *, seed: int | Sequence[int] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            seeds = [seed + lane for lane in range(self.num_envs)] if isinstance(seed, int) else seed
            self.generators = [seeding.np_random(int(each))[0] for each in seeds]
            assert len(self.generators) == self.num_envs, (len(self.generators), self.num_envs)
        self.ended[:] = False
        for lane, generator in enumerate(self.generators):
            self.begin(lane, generator)
        return self.observe(), {}

    def step(self, actions: np.ndarray) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        reward, terminated, truncated = self.advance(actions)
        before = self.ended
        if before.any():
            for lane in np.flatnonzero(before).tolist():
                self.begin(lane, self.generators[lane])
            reward[before] = 0.0
            terminated[before] = truncated[before] = False
        self.ended = terminated | truncated
        return self.observe(), reward, terminated, truncated, {}

    def get_state(self) -> dict[str, Any]:
        return {
            "arrays": {name: array.copy() for name, array in self.arrays().items()},
            "ended": self.ended.copy(),
            "generators": [generator_state(generator) for generator in self.generators],
        }

    def set_state(self, state: dict[str, Any]) -> None:
        for name, array in self.arrays().items():
            array[...] = state["arrays"][name]
        self.ended = np.array(state["ended"], bool)
        self.generators = [restored_generator(each) for each in state["generators"]]
