"""Gymnasium spaces at the border: how observations and actions are converted to Rookery's form and back.

Vectors come out as float32, images as they are (uint8 or float32), integers counted from 0: int64, or where there are
several side by side the smallest type that holds them. Dict and Tuple are taken apart. A space that has no such form is
refused with a way to give it one. Not here: stepping, resets, the finite check.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from rookery.core.errors import UsageError
from rookery.core.types import MASK, ActionSpec, Leaf

COMPONENTS = 1 << 16  # of one MultiDiscrete: each is listed in the files of a run
UNBOUNDED = 1e10  # a bound beyond this is a way to write infinity (e.g. the largest float32), not a scale


class Mismatch(Exception):
    """An environment returned what its own space does not allow."""


@dataclass(frozen=True)
class Port:
    """One leaf of an observation: where the environment keeps it and what we make of it."""

    name: str
    path: tuple[str | int, ...]  # keys and places in tuples that lead to it; empty for a single observation
    leaf: Leaf
    source: np.dtype  # what the space declares
    start: Any = 0  # first value of an integer; an array for several
    stop: Any = 0  # the value behind the last one

    @property
    def integers(self) -> bool:
        return self.leaf.kind in ("discrete", "multi")


class Observations:
    """Copies observations of one space into arrays of Rookery's, checking shape and dtype on the way."""

    def __init__(self, space: Space, env_id: str, action: ActionSpec | None = None):
        """`action`: an entry "action_mask" that fits these actions is a mask of them; None: it is like any other."""
        if action is not None and isinstance(space, spaces.Dict) and MASK in space.spaces and fits(space[MASK], action):
            self.ports = _with_mask(space, action, env_id)
        else:
            self.ports = _ports(space, (), env_id)
        if not self.ports:
            raise UsageError(f"{env_id}: the observation space {space} has no entries: there is nothing to act on")
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
            if port.leaf.kind == "mask":
                value = as_mask(value, port.leaf.shape)
            elif value.shape != port.leaf.shape:
                raise Mismatch(f"returned {_named(port)} of shape {value.shape}, expected {port.leaf.shape}")
            elif value.dtype is not port.source:
                self._admit(port, value.dtype)
            out[port.name][lane] = _counted(value, port) if port.integers else value

    def read(self, obs: Any, out: dict[str, np.ndarray], lanes: int) -> dict[str, np.ndarray]:
        """A vector environment's batch; leaves that fit are passed through, the others are converted into `out`."""
        batch = {}
        for port in self.ports:
            value = _follow(obs, port)
            shape = (lanes, *port.leaf.shape)
            if port.leaf.kind == "mask":
                batch[port.name] = as_mask(value, shape)
                continue
            if value.shape != shape:
                raise Mismatch(f"returned {_named(port)} of shape {value.shape}, expected {shape}")
            if value.dtype is not port.source:
                self._admit(port, value.dtype)
            if port.integers:
                value = _counted(value, port)
            if value.dtype != port.leaf.dtype:
                np.copyto(out[port.name], value, casting="unsafe")  # e.g. float64 to float32, after _admit
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
            raise Mismatch(f"returned an observation without {'.'.join(map(str, port.path))!r}") from error
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
    value = value.astype(np.int64, copy=False)
    if port.leaf.kind == "multi":
        wrong = (value < port.start) | (value >= port.stop)
        if wrong.any():
            at = tuple(int(i) for i in np.argwhere(wrong)[0])
            here = at[len(at) - len(port.leaf.shape) :]
            low, high = port.start[here], port.stop[here] - 1
            where = ", ".join(map(str, here))
            raise Mismatch(f"returned {_named(port)} outside its space, [{where}] is {low} to {high}: {value[at]}")
    elif value.size and not (value.min() >= port.start and value.max() < port.stop):
        raise Mismatch(f"returned {_named(port)} outside its space, {port.start} to {port.stop - 1}: {value}")
    return value - port.start


def as_mask(value: Any, shape: tuple[int, ...], name: str = f"an observation {MASK!r}") -> np.ndarray:
    """A mask as the environment gives it: bool, or numbers that are 0 and 1. Axes of several branches are joined."""
    try:
        value = np.asarray(value)
    except ValueError as error:
        raise Mismatch(f"returned {name} that is no array ({error})") from error
    if value.size != math.prod(shape) or (len(shape) > 1 and value.shape[:1] != shape[:1]):
        raise Mismatch(f"returned {name} of shape {value.shape}, expected {shape}")
    if value.dtype != bool:
        truth = value == 1
        if not (truth | (value == 0)).all():
            raise Mismatch(f"returned {name} with other numbers than 0 and 1: {value}")
        value = truth
    return value.reshape(shape)


def mask_leaf(action: ActionSpec) -> Leaf:
    return Leaf((sum(action.choices),), "bool", "mask")


def fits(space: Space, action: ActionSpec) -> bool:
    """Whether an observation can be a mask of these actions: as many numbers that are 0 or 1 as there are choices."""
    choices = action.choices
    shapes = {(sum(choices),)} | ({(len(choices), choices[0])} if len(set(choices)) == 1 else set())
    binary = (
        isinstance(space, spaces.MultiBinary)
        or (isinstance(space, spaces.Box) and bool((space.low == 0).all() and (space.high == 1).all()))
        or (isinstance(space, spaces.MultiDiscrete) and bool((space.nvec == 2).all() and not np.any(space.start)))
    )
    return action.kind != "box" and binary and space.shape in shapes


def _with_mask(space: spaces.Dict, action: ActionSpec, env_id: str) -> list[Port]:
    if len(space.spaces) == 1:
        raise UsageError(
            f"{env_id}: its only observation is {MASK!r}, the mask of legal actions, and networks do not see masks; "
            "add an observation, or use net.action_mask 'off' to have it as an ordinary one"
        )
    mask = Port(MASK, (MASK,), mask_leaf(action), np.dtype(bool))
    entries = ([mask] if key == MASK else _ports(inner, (str(key),), env_id) for key, inner in space.spaces.items())
    return [port for entry in entries for port in entry]


def _ports(space: Space, path: tuple[str | int, ...], env_id: str) -> list[Port]:
    if isinstance(space, spaces.Dict):
        return [port for key, inner in space.spaces.items() for port in _ports(inner, (*path, str(key)), env_id)]
    if isinstance(space, spaces.Tuple):
        return [port for place, inner in enumerate(space.spaces) for port in _ports(inner, (*path, place), env_id)]
    # "/" separates the parts of a path in our trees; dm_control's names contain it.
    name = ".".join(map(str, path)).replace("/", ".") or "obs"
    if isinstance(space, spaces.Discrete):
        first, n = int(space.start), int(space.n)
        starts = (first,) if first else ()
        return [Port(name, path, Leaf((), "int64", "discrete", n, starts=starts), space.dtype, first, first + n)]
    if isinstance(space, spaces.MultiDiscrete):
        return [_integers(space, name, path, env_id)]
    if isinstance(space, spaces.MultiBinary):
        return [Port(name, path, Leaf(tuple(space.shape), "float32", "vector"), space.dtype)]
    if isinstance(space, spaces.Box):
        return [Port(name, path, _box(space), space.dtype)]
    where = f"observation {name!r}" if path else "observation"
    raise UsageError(
        f"{env_id}: {where} is a {type(space).__name__}, which Rookery does not read (it reads Box, Discrete, "
        f"MultiDiscrete, MultiBinary, and Dict and Tuple of these); {_way_out(space)}, in a "
        "gymnasium.ObservationWrapper inside a factory, and pass env='package.module:factory'"
    )


def _way_out(space: Space) -> str:
    if isinstance(space, spaces.Text):
        return "turn the text into numbers of a fixed length, such as a MultiDiscrete with one integer per character"
    if isinstance(space, spaces.Sequence | spaces.Graph):
        return "its size changes: pad it to the largest size, as a Box beside a MultiBinary that says what is there"
    if isinstance(space, getattr(spaces, "OneOf", ())):
        return "offer a Dict of all the alternatives, with a Discrete that says which one counts"
    return "turn it into one of these"


def _integers(space: spaces.MultiDiscrete, name: str, path: tuple[str | int, ...], env_id: str) -> Port:
    counts = np.asarray(space.nvec, np.int64)
    start = np.asarray(getattr(space, "start", np.zeros_like(counts)), np.int64)
    if not 0 < counts.size <= COMPONENTS:
        raise UsageError(
            f"{env_id}: the MultiDiscrete observation {name!r} has {counts.size} integers, and Rookery reads 1 to "
            f"{COMPONENTS}; offer a Box of integers (np.uint8 with two or three axes is an image), in a "
            "gymnasium.ObservationWrapper inside a factory, and pass env='package.module:factory'"
        )
    starts = _ints(start.ravel()) if start.any() else ()
    leaf = Leaf(counts.shape, _smallest(int(counts.max())), "multi", counts=_ints(counts.ravel()), starts=starts)
    return Port(name, path, leaf, space.dtype, start, start + counts)


def _smallest(count: int) -> str:
    """The integer type that values below `count` travel in."""
    return next(name for name in ("uint8", "int16", "int32", "int64") if count - 1 <= np.iinfo(name).max)


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
