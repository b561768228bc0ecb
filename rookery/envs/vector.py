"""Vector environments as Lanes, by the reset mode they declare in metadata["autoreset_mode"].

NEXT_STEP is our own convention: `VectorLanes` converts and checks. DISABLED is brought to it by `MaskedLanes`.
SAME_STEP cannot be: its lanes are already in the next episode when they report an end, and a vector environment
cannot hold one lane back while the others step. It is refused, except for gymnasium's SyncVectorEnv, whose single
environments we can drive ourselves. An undeclared mode is refused: a wrong guess would train on wrong data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from rookery.core.errors import UsageError
from rookery.core.types import MASK, EnvSpec
from rookery.envs.lanes import LaneFault, Lanes, Step, SyncLanes, tell_lane
from rookery.envs.masks import NOTHING, Masks, Setting, method_of, source
from rookery.envs.spaces import Actions, Mismatch, Observations


def adapt(env: VectorEnv, env_id: str, masks: Setting = "auto") -> Lanes:
    """The right Lanes for a vector environment, or UsageError that says what to change."""
    if type(env) is SyncVectorEnv:
        return SyncLanes(env_id, env.envs, lambda lane: env.env_fns[lane](), masks)
    mode = reset_mode(env)
    if mode is AutoresetMode.NEXT_STEP:
        return VectorLanes(env_id, env, masks)
    if mode is AutoresetMode.DISABLED:
        return MaskedLanes(env_id, env, masks)
    if mode is AutoresetMode.SAME_STEP:
        raise UsageError(
            f"{env_id}: the vector environment resets in the step that ends an episode (SAME_STEP), which cannot be "
            "turned into the next-step reset that Rookery trains on; build it with autoreset_mode NEXT_STEP or "
            "DISABLED, or let the factory return a single environment"
        )
    raise UsageError(
        f"{env_id}: the vector environment does not say how it resets (metadata['autoreset_mode'] is "
        f"{env.metadata.get('autoreset_mode')!r}); set it to AutoresetMode.NEXT_STEP if the step after "
        "an end resets and returns the first observation, or let the factory return a single environment"
    )


def reset_mode(env: VectorEnv) -> AutoresetMode | None:
    declared = env.metadata.get("autoreset_mode")
    try:
        return AutoresetMode(declared)
    except ValueError:
        return None


class VectorLanes(Lanes):
    """A vector environment in NEXT_STEP mode. Rewards and flags of reset rows are made to keep the convention."""

    def __init__(self, env_id: str, env: VectorEnv, masks: Setting = "auto"):
        self.env: Any = env  # seeds and states are not the same type in all of them
        self.count = env.num_envs
        self._actions = Actions(env.single_action_space, env_id)
        action = None if masks == "off" else self._actions.spec
        self._observations = Observations(env.single_observation_space, env_id, action)
        spec = EnvSpec(env_id, self._observations.leaves, self._actions.spec)
        self.spec = source(spec, masks, method_of(env))
        self._masks = Masks(self.spec, masks)
        self._obs = self._observations.allocate(self.count)
        self._reward = np.zeros(self.count, np.float32)
        self._ended = np.zeros(self.count, bool)
        self.metrics = tuple(env.metadata.get("episode_metrics", ()))

    def number_lanes(self, first: int) -> None:
        tell_lane(self.env, first)

    def reset(self, seeds: Sequence[int]) -> dict[str, np.ndarray]:
        assert len(seeds) == self.count, (len(seeds), self.count)
        self._ended, self._infos = np.zeros(self.count, bool), None
        obs, info = self._call("reset", lambda: self.env.reset(seed=self._seed(seeds)))
        self._masks.watch(info, (self.count,))
        return self._with_mask(self._read(obs), info, self._ended)

    def step(self, action: np.ndarray) -> Step:
        batch = self._actions.batch(action)
        obs, reward, terminated, truncated, info = self._call("step", lambda: self.env.step(batch))
        return self._row(self._read(obs), reward, terminated, truncated, info)

    def _row(
        self, obs: dict[str, np.ndarray], reward: Any, terminated: Any, truncated: Any, info: Any, fresh: Any = None
    ) -> Step:
        """`fresh`: the `info` of a reset, for lanes that were reset behind the step."""
        reward, terminated, truncated = np.asarray(reward), np.asarray(terminated, bool), np.asarray(truncated, bool)
        if not reward.shape == terminated.shape == truncated.shape == (self.count,):
            found = f"reward {reward.shape}, terminated {terminated.shape}, truncated {truncated.shape}"
            raise LaneFault(0, f"returned columns of shape {found}, expected ({self.count},)", reason="bad_shape")
        self._reward[:] = reward
        ends, before = terminated | truncated, self._ended
        if before.any():
            if (ends & before).any():
                lane = int(np.argmax(ends & before))
                raise LaneFault(lane, "ended an episode in the row that resets it", reason="bad_shape")
            self._reward[before] = 0.0
        self._ended = ends
        obs = self._with_mask(obs, info, ends, before if fresh is not None else None, fresh)
        if self.metrics and ends.any():
            for lane in np.flatnonzero(ends).tolist():
                # Gymnasium's form: an array for each name, and one more that says which lanes have it.
                has = [name for name in info if f"_{name}" not in info or info[f"_{name}"][lane]]
                self._keep_info(lane, {name: _of_lane(info[name], lane) for name in has if name in self.metrics})
        return obs, self._reward, terminated, truncated

    def _with_mask(
        self, obs: dict[str, np.ndarray], info: Any, ends: np.ndarray, new: np.ndarray | None = None, fresh: Any = None
    ) -> dict[str, np.ndarray]:
        """With the masks, if there are any; those of lanes in `new` episodes are in `fresh`."""
        if not self._masks.on:
            return obs
        try:
            mask = self._call("action_masks", lambda: self._masks.told(obs, self.env, info, self.count))
            if new is not None:
                mask = np.where(new[:, None], self._masks.told(obs, self.env, fresh, self.count), mask)
        except Mismatch as error:
            raise LaneFault(0, str(error), reason="bad_shape") from error
        mask, stuck = self._masks.settled(mask, ends)
        if stuck >= 0:
            raise LaneFault(stuck, NOTHING, reason="bad_shape")
        return obs | {MASK: mask}

    def _seed(self, seeds: Sequence[int]) -> Any:
        """One per lane where the environment can (gymnasium's own, those that say `lane_seeds`), else one for all."""
        inner = self.env.unwrapped
        if isinstance(inner, SyncVectorEnv | AsyncVectorEnv) or getattr(inner, "lane_seeds", False):
            return [int(seed) for seed in seeds]
        return int(np.random.SeedSequence([int(seed) for seed in seeds]).generate_state(1)[0])

    def _call(self, verb: str, call: Any) -> Any:
        try:
            return call()
        except Mismatch:
            raise
        except (Exception, SystemExit) as error:
            # The lanes are one object here: it does not say which of them it was.
            raise LaneFault(0, f"raised in {verb} (a vector environment: some lane)", error) from error

    def _read(self, obs: Any) -> dict[str, np.ndarray]:
        try:
            return self._observations.read(obs, self._obs, self.count)
        except Mismatch as error:
            raise LaneFault(0, str(error), reason="bad_shape") from error

    def close(self) -> None:
        self.env.close()

    def get_state(self) -> dict[str, Any] | None:
        if self.env is not self.env.unwrapped or not hasattr(self.env, "get_state"):
            return None
        return {"env": self.env.get_state(), "ended": self._ended.copy()}

    def set_state(self, state: dict[str, Any]) -> None:
        if not hasattr(self.env, "set_state"):
            super().set_state(state)
        self.env.set_state(state["env"])
        self._ended = np.array(state["ended"], bool)


class MaskedLanes(VectorLanes):
    """A vector environment in DISABLED mode: lanes that ended are reset by mask.

    A batch cannot step without its ended lanes, and to step an ended lane is undefined. So such a lane is reset, takes
    the step with the others, and is reset again; the row carries the second reset's observation. The rows are exact,
    at the price of one discarded reset and step per episode.
    """

    def step(self, action: np.ndarray) -> Step:
        batch, before = self._actions.batch(action), self._ended
        if not before.any():
            obs, reward, terminated, truncated, info = self._call("step", lambda: self.env.step(batch))
            return self._row(self._read(obs), reward, terminated, truncated, info)
        shown, begun = self._mask_reset(before)
        if self._masks.on:  # what was chosen on a final observation may be illegal in the new episode
            batch = self._actions.batch(np.where(self._of_lanes(before), self._first_legal(shown, begun), action))
        obs, reward, terminated, truncated, info = self._call("step", lambda: self.env.step(batch))
        obs = {name: column.copy() for name, column in self._read(obs).items()}
        terminated, truncated = np.array(terminated, bool), np.array(truncated, bool)
        terminated[before] = truncated[before] = False
        shown, fresh = self._mask_reset(before)
        for name, column in obs.items():
            column[before] = shown[name][before]
        return self._row(obs, reward, terminated, truncated, info, fresh)

    def _of_lanes(self, lanes: np.ndarray) -> np.ndarray:
        """[B] beside actions [B, *shape]."""
        return lanes.reshape(-1, *[1] * len(self.spec.action.shape))

    def _first_legal(self, obs: dict[str, np.ndarray], info: Any) -> np.ndarray:
        """A legal action of each lane, [B, *shape]."""
        told = self._call("action_masks", lambda: self._masks.told(obs, self.env, info, self.count))
        mask, choices = self._masks.settled(told, self._ended)[0], self.spec.action.choices
        parts = np.split(mask, np.cumsum(choices)[:-1], axis=1)
        return np.stack([part.argmax(1) for part in parts], 1).reshape(self.count, *self.spec.action.shape)

    def _mask_reset(self, mask: np.ndarray) -> tuple[dict[str, np.ndarray], Any]:
        # A new dict and mask each time: gymnasium takes the options apart.
        obs, info = self._call("reset", lambda: self.env.reset(options={"reset_mask": mask.copy()}))
        return self._read(obs), info


def _of_lane(value: Any, lane: int) -> Any:
    """What a vector's `info` says of one lane; in a dictionary, `_name` says which lanes have `name`."""
    if not isinstance(value, dict):
        return value[lane]
    names = [key for key in value if not (key.startswith("_") and key[1:] in value)]
    return {key: _of_lane(value[key], lane) for key in names if f"_{key}" not in value or value[f"_{key}"][lane]}
