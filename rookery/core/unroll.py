"""The unroll: its fields, the shapes of its arrays, one over given memory, and how many steps are in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rookery.core import tree
from rookery.core.types import DataPlan, EnvSpec, Shapes, Tree


@dataclass(frozen=True)
class Unroll:
    """T steps of B environments: the unit that travels.

    Row t holds the observation, the action taken on it and its result; `obs` has one row more, and that row is
    the next unroll's row 0. Resets happen on the step after an end ("next-step reset"): if row t ends an episode,
    obs[t+1] is its final observation, and row t+1 is not live: its action was ignored, its reward is 0, it has no
    loss weight and is not an environment step.

    An unroll may be cut short: its last rows are dead then, and all of their observations are the one behind the last
    step. So a live row with a dead one behind it is the last of its trace, whether or not its episode has ended.
    """

    obs: Tree  # [T+1, B, ...]
    action: Any  # [T, B, ...]
    reward: Any  # [T, B] float32
    terminated: Any  # [T, B] bool: the task ended; no value beyond
    truncated: Any  # [T, B] bool: a limit ended it; the value of obs[t+1] still counts
    live: Any  # [T, B] bool
    logp: Any  # [T, B] float32, log-probability of the action under the policy that took it
    state0: Tree  # [C, B, ...] recurrent state fed to the first row of each of the C chunks; {} without recurrence
    version: Any  # [B] int64, version of the weights that acted
    lane: Any  # [B] int64, number of the environment in the whole run
    extras: dict[str, Any] = field(default_factory=dict)  # what an algorithm declares, [T, B, ...]
    replayed: Any = None  # [B] bool: trained on before, from a ring; set in batches only. None: everything is new


def live_steps(unroll: Unroll, rows: int) -> int:
    """Environment steps in the first `rows` rows: each end makes the row behind it a dead one."""
    if rows == 0:
        return 0
    ends = np.count_nonzero(unroll.terminated[: rows - 1]) + np.count_nonzero(
        unroll.truncated[: rows - 1] & ~unroll.terminated[: rows - 1]
    )
    return int(unroll.live[0].sum()) + (rows - 1) * unroll.live.shape[1] - int(ends)


def unroll_shapes(spec: EnvSpec, plan: DataPlan, lanes: int, state: Any) -> Shapes:
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


def empty_unroll(shapes: Shapes) -> Unroll:
    return as_unroll({path: np.zeros(shape, dtype) for path, (shape, dtype) in shapes.items()})
