"""The rows that a builder of items looks at: those of the unroll at hand and a few before them, one array a column.

Images stand in it as frame numbers. What of it becomes an item, and when, is decided by the builders (`nstep.py`,
`sequence.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rookery.core import tree
from rookery.core.types import Arrays, DataPlan, EnvSpec, Replay, Shapes
from rookery.core.unroll import Unroll
from rookery.tables.frames import FrameNumbers, fill, image_leaves
from rookery.tables.verify import check_columns, check_ends

Priorities = Callable[[Arrays], "np.ndarray | None"]  # as `Algorithm.start_priorities`

_COLUMNS = ("action", "reward", "terminated", "truncated", "live", "version")


def replay_of(plan: DataPlan) -> Replay:
    """The plan's table. Items are only built for a replay memory."""
    assert isinstance(plan.table, Replay), plan.table
    return plan.table


class Window:
    """Row `back + t` is row t of the unroll at hand; before it stand the `back` rows that preceded it."""

    def __init__(self, spec: EnvSpec, plan: DataPlan, lanes: int, back: int):
        self.back, self.unroll, self._spec = back, plan.unroll, spec
        self.numbers = {key: FrameNumbers(leaf, plan.unroll, lanes) for key, leaf in image_leaves(spec).items()}
        self._vectors = [key for key in spec.obs if key not in self.numbers]
        self._extras = list(plan.extras)
        shapes = {"action": (spec.action.shape, spec.action.dtype), "reward": ((), "float32"), "version": ((), "int64")}
        shapes |= dict.fromkeys(("terminated", "truncated", "live"), ((), "bool"))
        shapes |= {f"extras/{name}": column for name, column in plan.extras.items()}
        height = back + plan.unroll
        self.rows = {path: np.zeros((height, lanes, *shape), dtype) for path, (shape, dtype) in shapes.items()}
        for key, (shape, dtype) in obs_columns(spec).items():
            self.rows[f"obs/{key}"] = np.zeros((height + 1, lanes, *shape), dtype)

    def reset(self) -> None:
        """A new life of the actor."""
        self._clear()
        for numbers in self.numbers.values():
            numbers.reset()

    def cut(self) -> None:
        """The next unroll does not follow the last one."""
        self._clear()
        for numbers in self.numbers.values():
            numbers.cut()

    def _clear(self) -> None:
        for rows in self.rows.values():
            rows[...] = 0

    def push(self, unroll: Unroll, out: Arrays) -> None:
        """Take the next unroll in; new frames and their count go to the parcel `out`."""
        rows, back = self.rows, self.back
        for name in _COLUMNS:
            rows[name][back:] = getattr(unroll, name)
        for name in self._extras:
            rows[f"extras/{name}"][back:] = unroll.extras[name]
        for key in self._vectors:
            rows[f"obs/{key}"][back:] = unroll.obs[key]
        counts = {
            key: numbers.number(unroll.obs[key], unroll.live, out[f"frames/{key}"], rows[f"obs/{key}"][back:])
            for key, numbers in self.numbers.items()
        }
        # A parcel has one count of frames: a leaf that brings fewer than another leaves numbers unused.
        most = max(counts.values(), default=0)
        for key, numbers in self.numbers.items():
            out[f"first_frame/{key}"][0] = numbers.next
            out[f"frames/{key}"][counts[key] : most] = 0
            numbers.advance(most)
        out["count"][1] = most

    def slide(self) -> None:
        """Keep the last `back` rows for the next unroll. The row of obs behind them comes again, as its row 0."""
        if self.back:
            for rows in self.rows.values():
                rows[: self.back] = rows[self.unroll : self.unroll + self.back]

    def state(self) -> dict[str, Any]:
        return {
            "rows": tree.unflatten({path: rows[: self.back].copy() for path, rows in self.rows.items()}),
            "frames": {key: numbers.state() for key, numbers in self.numbers.items()},
        }

    def load(self, state: dict[str, Any]) -> None:
        stored = tree.flatten(state["rows"])
        for path, rows in self.rows.items():
            fill(rows[: self.back], stored[path], f"rows of {path}")
        for key, numbers in self.numbers.items():
            numbers.load(state["frames"][key])
        stored = {path: rows[: self.back] for path, rows in self.rows.items()}
        check_columns(stored, self._spec, frames={key: numbers.next for key, numbers in self.numbers.items()})
        check_ends(stored["live"], stored["terminated"] | stored["truncated"])


def obs_columns(spec: EnvSpec) -> Shapes:
    """Shape and dtype of one row of each part of an observation, as items hold it: images are frame numbers."""
    return {
        key: ((leaf.stack,), "int64") if leaf.kind == "image" else (leaf.shape, leaf.dtype)
        for key, leaf in spec.obs.items()
    }
