"""Parcels of items as no builder would make them: any references to any recent frames, every value its own.

Each item carries a serial number in "version" and says what its images must look like, so that whatever comes out of a
memory can be compared with what went in.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rookery.core.config import ReplayConfig
from rookery.core.types import ActionSpec, EnvSpec, Leaf, Replay
from rookery.tables.frames import frame_shape, image_leaves

DISCRETE = ActionSpec("discrete", choices=(3,), starts=(0,))
VECTOR = EnvSpec("vector", {"obs": Leaf((4,), "float32", "vector")}, DISCRETE)
STACKED = EnvSpec("stacked", {"obs": Leaf((3, 2, 5), "uint8", "image", stack=3)}, DISCRETE)
MIXED = EnvSpec(
    "mixed",
    {
        "eye": Leaf((2, 3, 3), "uint8", "image", stack=2),
        "map": Leaf((3, 2, 2), "float32", "image"),  # three colours, no stack
        "place": Leaf((3,), "float64", "vector"),
        "room": Leaf((), "int64", "discrete", n=9),
        "touch": Leaf((5,), "bool", "vector"),
    },
    ActionSpec("box", size=2, low=(-1.0, -1.0), high=(1.0, 1.0), box_shape=(2,)),
)
SERIAL = "version"


def replay(n_step: int = 1, sequence: int = 0, burn_in: int = 0, overlap: int = 0, **memory: Any) -> Replay:
    settings = {"capacity": 8, "min_size": 1, "batch": 4, "samples_per_insert": 0.0} | memory
    return Replay(ReplayConfig(**settings), 0.99, n_step, sequence, burn_in, overlap)


def shapes_of(spec: EnvSpec, plan: Replay, items: int, frames: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """As `parcel_shapes` gives them, for at most that many items and new frames."""
    rows = plan.burn_in + plan.sequence
    shapes: dict[str, tuple[tuple[int, ...], str]] = {"count": ((2,), "int64")}
    for top, lead in {"obs": (rows + 1,)}.items() if plan.sequence else {"obs": (), "next_obs": ()}.items():
        for key, leaf in spec.obs.items():
            image = leaf.kind == "image"
            shape, dtype = ((leaf.stack,), "int64") if image else (leaf.shape, leaf.dtype)
            shapes[f"{top}/{key}"] = ((items, *lead, *shape), dtype)
    lead = (rows,) if plan.sequence else ()
    shapes["action"] = ((items, *lead, *spec.action.shape), spec.action.dtype)
    if plan.sequence:
        shapes |= dict.fromkeys(("terminated", "truncated", "live"), ((items, rows), "bool"))
        shapes |= {"reward": ((items, rows), "float32"), "state/core/h": ((items, 3), "float32")}
    else:
        shapes |= {"reward": ((items,), "float32"), "discount": ((items,), "float32")}
    shapes |= {"version": ((items,), "int64"), "steps": ((items,), "int32"), "priority": ((items,), "float32")}
    for key, leaf in image_leaves(spec).items():
        shapes[f"frames/{key}"] = ((frames, *frame_shape(leaf)), leaf.dtype)
        shapes[f"first_frame/{key}"] = ((1,), "int64")
    return shapes


class Maker:
    """Makes the parcels of one actor, always in the same arrays; `serials` runs over all makers that share it."""

    def __init__(self, spec: EnvSpec, plan: Replay, items: int, frames: int, seed: int, serials: list[int], reach: int):
        self.spec, self.plan, self.reach, self.serials = spec, plan, reach, serials
        self.shapes = shapes_of(spec, plan, items, frames)
        self.parcel = {path: np.zeros(shape, dtype) for path, (shape, dtype) in self.shapes.items()}
        self.rng = np.random.default_rng(seed)
        self.restart()

    def restart(self) -> None:
        self.seen: dict[str, list[np.ndarray]] = {key: [] for key in image_leaves(self.spec)}  # frames by number

    def make(self, items: int, frames: int = 0, priority: float = np.nan) -> tuple[dict[str, np.ndarray], list[dict]]:
        """A parcel, and what each of its items must look like when it is drawn: column -> array, images whole."""
        parcel, rng = self.parcel, self.rng
        for column in parcel.values():  # what lies behind the counts is rubbish
            column[...] = rng.integers(0, 2 if column.dtype == bool else 100, column.shape)
        if self.spec.action.kind != "box":
            parcel["action"] %= np.reshape(self.spec.action.choices, self.spec.action.shape)
        for path, column in parcel.items():
            leaf = self.spec.obs.get(path.partition("/")[2])
            if leaf is not None and leaf.kind == "discrete":
                column %= leaf.n
        parcel["count"][:] = items, frames
        parcel["steps"][:items] = rng.integers(0, 4, items)
        parcel["priority"][:items] = priority
        for path, column in parcel.items():
            if column.dtype in (np.float32, np.float64) and path != "priority":
                column[...] = rng.normal(size=column.shape)
        parcel[SERIAL][:items] = range(self.serials[0], self.serials[0] + items)
        self.serials[0] += items
        for key, seen in self.seen.items():
            parcel[f"first_frame/{key}"][0] = len(seen)
            seen.extend(parcel[f"frames/{key}"][:frames].copy())
            for path in (f"obs/{key}", f"next_obs/{key}"):
                if path in parcel:
                    low = max(-1, len(seen) - self.reach)
                    numbers = rng.integers(low, max(len(seen), low + 1), parcel[path].shape)
                    parcel[path][...] = np.where(rng.random(numbers.shape) < 0.1, -1, numbers)
        return parcel, [self._expected(index) for index in range(items)]

    def _expected(self, index: int) -> dict[str, np.ndarray]:
        item = {
            path: column[index].copy()
            for path, column in self.parcel.items()
            if path != "count" and not path.startswith(("frames/", "first_frame/"))
        }
        for key, seen in self.seen.items():
            leaf = self.spec.obs[key]
            for path in (f"obs/{key}", f"next_obs/{key}"):
                if path in item:
                    numbers = item[path]
                    item[f"{path}#"] = numbers  # numbers of its frames
                    zero = np.zeros(frame_shape(leaf), leaf.dtype)
                    whole = np.stack([zero if n < 0 else seen[n] for n in numbers.ravel()])
                    item[path] = whole.reshape(*numbers.shape[:-1], *leaf.shape)
        return item
