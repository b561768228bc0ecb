"""The arrays of an unroll: their shapes, an `Unroll` over given memory, and how many steps are in it.

The fields are documented at `Unroll` (types.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rookery.core import tree
from rookery.core.types import DataPlan, EnvSpec, Unroll


def live_steps(unroll: Unroll, rows: int) -> int:
    """Environment steps in the first `rows` rows: each end makes the row behind it a dead one."""
    if rows == 0:
        return 0
    ends = np.count_nonzero(unroll.terminated[: rows - 1]) + np.count_nonzero(
        unroll.truncated[: rows - 1] & ~unroll.terminated[: rows - 1]
    )
    return int(unroll.live[0].sum()) + (rows - 1) * unroll.live.shape[1] - int(ends)


def unroll_shapes(spec: EnvSpec, plan: DataPlan, lanes: int, state: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of every array of an unroll, by path; `state` is an initial state of any number of lanes."""
    steps, chunks = plan.unroll, plan.unroll // plan.chunk
    shapes = {f"obs/{name}": ((steps + 1, lanes, *leaf.shape), leaf.dtype) for name, leaf in spec.obs.items()}
    shapes["action"] = ((steps, lanes, *spec.action.shape), spec.action.dtype)
    shapes |= {name: ((steps, lanes), dtype) for name, dtype in _SCALARS.items()}
    for path, leaf in tree.flatten(state, "state0").items():
        shapes[path] = ((chunks, lanes, *leaf.shape[1:]), "float32")
    shapes |= {"version": ((lanes,), "int64"), "lane": ((lanes,), "int64")}
    return shapes | {f"extras/{name}": ((steps, lanes, *shape), dtype) for name, (shape, dtype) in plan.extras.items()}


_SCALARS = {"reward": "float32", "terminated": "bool", "truncated": "bool", "live": "bool", "logp": "float32"}


def as_unroll(arrays: dict[str, np.ndarray]) -> Unroll:
    """An unroll over given arrays, by path as in `unroll_shapes`."""
    return Unroll(**({"state0": {}, "extras": {}} | tree.unflatten(arrays)))


def empty_unroll(shapes: dict[str, tuple[tuple[int, ...], str]]) -> Unroll:
    return as_unroll({path: np.zeros(shape, dtype) for path, (shape, dtype) in shapes.items()})
