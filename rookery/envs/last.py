"""The last action and the last reward as observations (IMPALA, R2D2): lanes with two leaves more.

"last_action" is one-hot for discrete actions, one-hots side by side for several choices, the values in Rookery's own
form for boxes. "last_reward" is the reward that trains: clipped where training clips, in evaluation too, since a policy
must be shown what it learnt from. Both are 0 in the first observation of an episode; the final one shows how it ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rookery.core.errors import UsageError
from rookery.core.types import ActionSpec, EnvSpec, Leaf
from rookery.envs.lanes import LaneFault, Lanes, Step

ACTION, REWARD = "last_action", "last_reward"


def width(action: ActionSpec) -> int:
    """Numbers that show one action."""
    return action.size if action.kind == "box" else sum(action.choices)


def with_last(spec: EnvSpec) -> EnvSpec:
    if taken := {ACTION, REWARD} & spec.obs.keys():
        raise UsageError(
            f"{spec.id} has observations of its own named {', '.join(sorted(taken))}, the names that net.feed_last "
            "gives to what it adds; rename them in the environment, or leave net.feed_last off"
        )
    last = {ACTION: Leaf((width(spec.action),), "float32", "vector"), REWARD: Leaf((1,), "float32", "vector")}
    return replace(spec, obs=spec.obs | last)


class Last:
    """The last action and its reward, in the form of observations. The arrays are overwritten by each call."""

    def __init__(self, spec: EnvSpec, lanes: int, clip: bool):
        self.action = np.zeros((lanes, width(spec.action)), np.float32)
        self.reward = np.zeros((lanes, 1), np.float32)
        self._clip, self._box = clip, spec.action.kind == "box"
        self._rows = np.arange(lanes)[:, None]
        self._firsts = np.cumsum([0, *spec.action.choices[:-1]])  # where the one-hot of each choice begins

    def write(self, action: np.ndarray, reward: Any) -> None:
        """action [B, ...] in Rookery's form, reward [B]."""
        if self._box:
            self.action[:] = action
        else:
            self.action.fill(0.0)
            self.action[self._rows, self._firsts + action.reshape(len(action), -1)] = 1.0
        self.reward[:, 0] = reward
        if self._clip:
            np.clip(self.reward, -1.0, 1.0, out=self.reward)

    def forget(self, lanes: np.ndarray | slice = slice(None)) -> None:
        self.action[lanes] = self.reward[lanes] = 0.0

    def leaves(self) -> dict[str, np.ndarray]:
        return {ACTION: self.action, REWARD: self.reward}


class LastLanes(Lanes):
    """`inner`, whose observations also show the last action and reward. Other attributes are the inner lanes'."""

    def __init__(self, inner: Lanes, clip: bool | None = None):
        """`clip`: whether the reward shown is clipped; None: as the lanes say that training does."""
        self.inner, self.count = inner, inner.count
        self.score, self.mendable, self.metrics = inner.score, inner.mendable, inner.metrics
        self.spec = with_last(inner.spec)
        self._last = Last(inner.spec, inner.count, inner.spec.clipped if clip is None else clip)
        self._ended = np.zeros(inner.count, bool)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def reset(self, seeds: Sequence[int]) -> dict[str, np.ndarray]:
        obs = self.inner.reset(seeds)
        self._last.forget()
        self._ended = np.zeros(self.count, bool)
        return obs | self._last.leaves()

    def step(self, action: np.ndarray) -> Step:
        try:
            return self._shown(action, *self.inner.step(action))
        except LaneFault as fault:
            if fault.row is not None:
                fault.row = self._shown(action, *fault.row)
            raise

    def _shown(self, action: np.ndarray, obs: Any, reward: Any, terminated: np.ndarray, truncated: np.ndarray) -> Step:
        self._last.write(action, reward)
        if self._ended.any():  # these have just been reset: the action was not taken, and an episode begins
            self._last.forget(self._ended)
        self._ended = terminated | truncated
        return obs | self._last.leaves(), reward, terminated, truncated

    def rebuild(self, lane: int, seed: int) -> dict[str, np.ndarray]:
        obs = self.inner.rebuild(lane, seed)
        self._last.forget(slice(lane, lane + 1))
        self._ended[lane] = False
        return obs | self._last.leaves()

    def close(self) -> None:
        self.inner.close()

    def number_lanes(self, first: int) -> None:
        self.inner.number_lanes(first)

    def take_infos(self) -> list[list[dict[str, float]]] | None:
        return self.inner.take_infos()

    def get_state(self) -> dict[str, Any] | None:
        """Without the last action and reward: they are part of the observation that the caller holds already."""
        inner = self.inner.get_state()
        return None if inner is None else {"inner": inner, "ended": self._ended.copy()}

    def set_state(self, state: dict[str, Any]) -> None:
        self.inner.set_state(state["inner"])
        self._ended = np.array(state["ended"], bool)
