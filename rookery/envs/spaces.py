"""Gymnasium spaces at the border: how observations and actions are converted to Rookery's form and back.

Vectors come out as float32, images as they are (uint8 or float32), integers as int64 counted from 0. A space that has
no such form is refused with the wrapper that gives it one. Not here: stepping, resets, the finite check.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from rookery.core.errors import UsageError
from rookery.core.types import ActionSpec, Leaf

UNBOUNDED = 1e10  # a bound beyond this is a way to write infinity (e.g. the largest float32), not a scale


class Mismatch(Exception):
    """An environment returned what its own space does not allow."""


@dataclass(frozen=True)
class Port:
    """One leaf of an observation: where the environment keeps it and what we make of it."""

    name: str
    path: tuple[str, ...]  # keys that lead to it; empty for a single observation
    leaf: Leaf
    source: np.dtype  # what the space declares
    start: int = 0  # first value, for kind "discrete"


class Observations:
    """Copies observations of one space into arrays of Rookery's, checking shape and dtype on the way."""

    def __init__(self, space: Space, env_id: str):
        self.ports = _ports(space, (), env_id)
        self.leaves = {port.name: port.leaf for port in self.ports}
        if len(self.leaves) < len(self.ports):
            names = sorted(port.name for port in self.ports)
            raise UsageError(f"{env_id}: two observations have the same name once joined by '.': {names}; rename one")
        self._admitted = {(port.name, port.source) for port in self.ports}

    def allocate(self, lanes: int) -> dict[str, np.ndarray]:
        return {name: np.zeros((lanes, *leaf.shape), leaf.dtype) for name, leaf in self.leaves.items()}

    def write(self, obs: Any, out: dict[str, np.ndarray], lane: int) -> None:
        """One environment's observation into row `lane`. It is copied at once: environments may reuse the object."""
        for port in self.ports:
            value = _follow(obs, port)
            if value.shape != port.leaf.shape:
                raise Mismatch(f"returned {_named(port)} of shape {value.shape}, expected {port.leaf.shape}")
            if value.dtype is not port.source:
                self._admit(port, value.dtype)
            out[port.name][lane] = value if port.leaf.kind != "discrete" else _counted(value, port)

    def read(self, obs: Any, out: dict[str, np.ndarray], lanes: int) -> dict[str, np.ndarray]:
        """A vector environment's batch; leaves that fit are passed through, the others are converted into `out`."""
        batch = {}
        for port in self.ports:
            value = _follow(obs, port)
            shape = (lanes, *port.leaf.shape)
            if value.shape != shape:
                raise Mismatch(f"returned {_named(port)} of shape {value.shape}, expected {shape}")
            if value.dtype is not port.source:
                self._admit(port, value.dtype)
            if port.leaf.kind == "discrete":
                value = _counted(value, port)
            if value.dtype != port.leaf.dtype:
                np.copyto(out[port.name], value, casting="unsafe")  # float64 to float32, after _admit
                value = out[port.name]
            batch[port.name] = value
        return batch

    def _admit(self, port: Port, dtype: np.dtype) -> None:
        """Another dtype than declared is accepted where nothing but precision is lost, e.g. float64 for float32."""
        if (port.name, dtype) in self._admitted:
            return
        if not np.can_cast(dtype, port.source, "same_kind"):
            raise Mismatch(f"returned {_named(port)} of dtype {dtype}, expected {port.source}")
        self._admitted.add((port.name, dtype))


def _follow(obs: Any, port: Port) -> np.ndarray:
    for key in port.path:
        try:
            obs = obs[key]
        except (KeyError, TypeError, IndexError) as error:
            raise Mismatch(f"returned an observation without {'.'.join(port.path)!r}") from error
    if type(obs) is np.ndarray:
        return obs
    try:
        return np.asarray(obs)
    except ValueError as error:
        raise Mismatch(f"returned {_named(port)} that is no array ({error})") from error


def _named(port: Port) -> str:
    return f"an observation {port.name!r}" if port.path else "an observation"


def _counted(value: np.ndarray, port: Port) -> np.ndarray:
    """Integers counted from 0. One outside the space would index beyond an embedding later, so it stops here."""
    value = value.astype(np.int64, copy=False) - port.start
    if value.size and not (value.min() >= 0 and value.max() < port.leaf.n):
        low, high = port.start, port.start + port.leaf.n - 1
        raise Mismatch(f"returned {_named(port)} outside its space, {low} to {high}: {value + port.start}")
    return value


def _ports(space: Space, path: tuple[str, ...], env_id: str) -> list[Port]:
    if isinstance(space, spaces.Dict):
        return [port for key, inner in space.spaces.items() for port in _ports(inner, (*path, str(key)), env_id)]
    # "/" separates the parts of a path in our trees; dm_control's names contain it.
    name = ".".join(path).replace("/", ".") or "obs"
    if isinstance(space, spaces.Discrete):
        return [Port(name, path, Leaf((), "int64", "discrete", int(space.n)), space.dtype, int(space.start))]
    if isinstance(space, spaces.MultiBinary):
        return [Port(name, path, Leaf(tuple(space.shape), "float32", "vector"), space.dtype)]
    if isinstance(space, spaces.Box):
        return [Port(name, path, _box(space), space.dtype)]
    where = f"observation {name!r}" if path else "observation"
    raise UsageError(
        f"{env_id}: {where} is a {type(space).__name__}, which Rookery does not read; wrap the environment in "
        "gymnasium.wrappers.FlattenObservation (or a wrapper of your own) inside a factory and pass "
        "env='package.module:factory'"
    )


def _box(space: spaces.Box) -> Leaf:
    shape = tuple(int(n) for n in space.shape)
    if space.dtype == np.uint8 and len(shape) in (2, 3):
        return Leaf(shape, "uint8", "image")
    # Float frames: three axes, one of them a few channels at either end, the others wide enough to convolve over.
    sides, channels = sorted(shape)[1:], (shape[:1] + shape[-1:])
    if len(shape) == 3 and min(channels) <= 16 and min(sides) >= 8 and min(shape) in channels:
        return Leaf(shape, "float32", "image")
    return Leaf(shape, "float32", "vector")


class Actions:
    """Turns a batch of Rookery's actions into the environment's own."""

    def __init__(self, space: Space, env_id: str):
        self.spec = _action_spec(space, env_id)
        self._dtype = space.dtype
        self._box = self.spec.kind == "box"
        if self._box:
            self._low, self._high = (
                np.array([unbounded if x is None else x for x in bounds], np.float32)
                for bounds, unbounded in ((self.spec.low, -np.inf), (self.spec.high, np.inf))
            )
            self._bounded = np.isfinite(self._low) & np.isfinite(self._high)
            self._span = np.where(self._bounded, self._high, 0) - np.where(self._bounded, self._low, 0)
        else:
            self._starts = np.asarray(self.spec.starts, np.int64).reshape(self.spec.shape)
            self._shifted = bool(self._starts.any())

    def batch(self, action: np.ndarray) -> np.ndarray:
        """[B, *spec.shape] in Rookery's form -> [B, ...] in the environment's; equals `spec.to_env`, reshaped."""
        if not self._box:
            action = action + self._starts if self._shifted else action
            return action if action.dtype == self._dtype else action.astype(self._dtype)
        scaled = np.where(self._bounded, self._low + (action + np.float32(1)) / np.float32(2) * self._span, action)
        scaled = np.minimum(np.maximum(scaled, self._low), self._high)
        return scaled.astype(self._dtype, copy=False).reshape(len(action), *self.spec.box_shape)


def _action_spec(space: Space, env_id: str) -> ActionSpec:
    if isinstance(space, spaces.Discrete):
        return ActionSpec("discrete", choices=(int(space.n),), starts=(int(space.start),))
    if isinstance(space, spaces.MultiDiscrete) and space.nvec.ndim == 1:
        start = getattr(space, "start", np.zeros_like(space.nvec))
        return ActionSpec("multi", choices=_ints(space.nvec), starts=_ints(start))
    if isinstance(space, spaces.MultiBinary) and len(space.shape) == 1:
        return ActionSpec("multi", choices=(2,) * space.shape[0], starts=(0,) * space.shape[0])
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating) and math.prod(space.shape) > 0:
        return ActionSpec(
            "box", size=math.prod(space.shape), low=_bounds(space.low), high=_bounds(space.high),
            box_shape=tuple(int(n) for n in space.shape),
        )  # fmt: skip
    raise UsageError(
        f"{env_id}: action space {space} is not one Rookery can act in (Discrete, MultiDiscrete or MultiBinary of one "
        "axis, Box of floats); write a gymnasium.ActionWrapper that offers one of these, apply it in a factory and "
        "pass env='package.module:factory'"
    )


def _ints(values: np.ndarray) -> tuple[int, ...]:
    return tuple(int(n) for n in values)


def _bounds(values: np.ndarray) -> tuple[float | None, ...]:
    return tuple(float(x) if abs(x) < UNBOUNDED else None for x in values.ravel())
