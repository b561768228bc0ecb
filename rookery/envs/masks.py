"""Where an environment says which actions are legal, and the mask as one more observation.

    observation     an entry "action_mask" of a Dict observation space that fits the actions (`spaces.py` reads it)
    method          `action_masks()`, on the environment or a wrapper around it (the convention of sb3-contrib)
    info            info["action_mask"] of `reset` and `step` (Gymnasium's Taxi)

The first of these counts. Only a reset shows whether there is one in `info`: that is found out where spaces are read
(`look`), and everyone who makes the environment later is told by `net.action_mask`. Lanes that were not told and are
shown one refuse to go on: to ignore it in silence would be to train on another task.

Behind the end of an episode no action follows. The mask there may be missing, or allow nothing; all is legal then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from rookery.core.errors import UsageError
from rookery.core.legal import all_if_none, possible
from rookery.core.types import MASK, EnvSpec
from rookery.envs.spaces import Mismatch, as_mask, mask_leaf

Setting = Literal["auto", "info", "off"]  # net.action_mask
INFO, METHOD = f"a mask info[{MASK!r}]", "a mask from action_masks()"
MISSING = f"returned no {MASK!r} in `info`, where masks are read from"
NOTHING = "returned a mask that allows no action, in the middle of an episode"


class MaskInInfo(UsageError):
    """The environment has a mask in `info`, and net.action_mask does not say what to do with it."""

    def __init__(self, env_id: str):
        super().__init__(
            f"{env_id} gives a mask of legal actions, info[{MASK!r}]: set net.action_mask to 'info' to have it "
            "applied, or to 'off' to ignore it"
        )


def source(spec: EnvSpec, setting: Setting, method: Callable[[], Any] | None) -> EnvSpec:
    """The spec with the mask, if there is one; `spec` has that of the observations already."""
    if setting == "off" or spec.action.kind == "box":
        return spec
    if spec.masked:
        return replace(spec, mask_from="observation")
    if setting == "auto" and method is None:
        return spec
    if MASK in spec.obs:
        size = sum(spec.action.choices)
        raise UsageError(
            f"{spec.id} has an observation {MASK!r} that is no mask of its {size} choices, and another mask besides; "
            "rename the observation, or use net.action_mask 'off' to ignore the mask"
        )
    told: Literal["info", "method"] = "info" if setting == "info" else "method"
    return replace(spec, obs=spec.obs | {MASK: mask_leaf(spec.action)}, mask_from=told)


def method_of(env: Any) -> Callable[[], Any] | None:
    """`action_masks` of an environment, or of the outermost wrapper that has one."""
    layer = env
    while layer is not None:
        found = getattr(layer, "action_masks", None)
        if callable(found):
            return found
        layer = vars(layer).get("env")
    return None


class Masks:
    """Reads what environments say into the masks of lanes, one lane or all of them at a time."""

    def __init__(self, spec: EnvSpec, setting: Setting):
        self.on, self._from, self._id = spec.masked, spec.mask_from, spec.id
        self._choices, self._leaf = spec.action.choices, mask_leaf(spec.action)
        self._watching = setting == "auto" and not spec.masked and spec.action.kind != "box"

    def allocate(self, lanes: int) -> dict[str, np.ndarray]:
        return {MASK: np.zeros((lanes, *self._leaf.shape), bool)} if self.on else {}

    def watch(self, info: Any, shape: tuple[int, ...] = ()) -> None:
        """MaskInInfo if the `info` of a reset has a mask that these lanes were not made for."""
        if self._watching and isinstance(info, Mapping) and MASK in info:
            with suppress(Mismatch):
                as_mask(info[MASK], (*shape, *self._leaf.shape))
                raise MaskInInfo(self._id)
            self._watching = False

    def read(self, row: np.ndarray, env: Any, info: Any, terminated: bool = False, ended: bool = False) -> None:
        """The mask of one environment, after a step or reset, into `row` [n]; Mismatch if it allows no action.

        A mask from the observation is there already.
        """
        if self._from == "method":
            # Behind a terminal state no value is ever looked at, and the method need not work there.
            row[:] = True if terminated else as_mask(_method(env)(), self._leaf.shape, METHOD)
        elif self._from == "info":
            if MASK in info:
                row[:] = as_mask(info[MASK], self._leaf.shape, INFO)
            elif ended:
                row[:] = True
            else:
                raise Mismatch(MISSING)
        if not possible(row, self._choices):
            if not ended:
                raise Mismatch(NOTHING)
            row[:] = all_if_none(row, self._choices)

    def told(self, obs: dict[str, np.ndarray], env: Any, info: Any, lanes: int) -> np.ndarray:
        """What a vector environment says, [B, n]; nothing is legal in lanes of which it says nothing."""
        shape = (lanes, *self._leaf.shape)
        if self._from == "observation":
            return obs[MASK]
        if self._from == "method":
            return as_mask(_method(env)(), shape, METHOD)
        if MASK not in info:
            return np.zeros(shape, bool)
        mask = as_mask(info[MASK], shape, INFO)
        return mask & np.asarray(info[f"_{MASK}"], bool)[:, None] if f"_{MASK}" in info else mask

    def settled(self, mask: np.ndarray, ended: np.ndarray) -> tuple[np.ndarray, int]:
        """Masks [B, n] that allow something, and the first lane that goes on and cannot act; -1: there is none."""
        some = possible(mask, self._choices)
        if some.all():
            return mask, -1
        stuck = ~some & ~ended
        return all_if_none(mask, self._choices), int(stuck.argmax()) if stuck.any() else -1


def _method(env: Any) -> Callable[[], Any]:
    found = method_of(env)
    assert found is not None, env
    return found
