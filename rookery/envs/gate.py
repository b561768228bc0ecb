"""The gate for non-finite numbers at the border: observations and rewards are checked in the step that returns them,
actions once per unroll.

`watch` is for every step and says only whether a row may be taken as finite: a sum of squares per column of floats.
`find_nonfinite` says where it is not, `check_finite` raises that as the fault of its lanes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from rookery.core.errors import LearnerError, NumericError
from rookery.core.legal import includes
from rookery.core.types import EnvSpec
from rookery.envs.lanes import LaneFault, Step


def watch(obs: dict[str, np.ndarray], reward: np.ndarray) -> Callable[[int], bool]:
    """A function of the row of an unroll: whether obs[row + 1] and reward[row] are finite. It looks at these arrays.

    Finite numbers whose squares overflow are reported too: `find_nonfinite` finds nothing in them. The product of a row
    with itself is the quickest that numpy has for this, and gives no warning for what is not finite, as a product with
    zeros does. Between act and step it costs 2.5 us a row.
    """
    columns = []
    for x in obs.values():
        if x.dtype.kind == "f":
            assert x.flags.c_contiguous, "what is reshaped would be a copy, and not a view"
            columns.append(x.reshape(len(x), -1))
    first, *others = columns or [reward]
    ahead, isfinite = (1 if columns else 0), math.isfinite

    def finite(row: int) -> bool:
        try:
            seen, gain = first[row + ahead], reward[row]
            if not (isfinite(seen.dot(seen)) and isfinite(gain.dot(gain))):
                return False
            for rows in others:
                seen = rows[row + 1]
                if not isfinite(seen.dot(seen)):
                    return False
            return True
        except (RuntimeWarning, FloatingPointError):  # numpy's warnings were turned into errors: an overflow
            return False

    return finite


def find_nonfinite(obs: Any, reward: np.ndarray) -> tuple[int, int, str] | None:
    """The first (row, lane, what) that is NaN or infinite in obs [T(+1), B, ...] and reward [T, B], or None.

    The row is that of the step which returned the number. Where `obs` has a row more than `reward`, as in an unroll,
    obs[t + 1] was returned by row t; a bad obs[0] (a reset's, before the first row) is reported as row 0.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        # The reward first: of two faults in a row it is named, since an observation may only repeat it (`last.py`).
        columns = [("reward", reward), *_floats(obs, "observation")]
        suspects = [(name, x) for name, x in columns if not math.isfinite(x.sum())]
    found = []
    for name, x in suspects:  # a finite row whose sum overflows ends here
        flat = x.reshape(*x.shape[:2], -1)
        bad = ~np.isfinite(flat)
        if bad.any():
            row, lane = (int(i) for i in np.argwhere(bad.any(axis=2))[0])
            value = flat[row, lane, int(np.argmax(bad[row, lane]))]
            shift = 1 if name != "reward" and len(x) > len(reward) else 0
            found.append((max(row - shift, 0), lane, f"{'an' if name[0] == 'o' else 'a'} {name} of {value}"))
    return min(found, key=lambda at: at[:2]) if found else None


def check_row(obs: dict[str, np.ndarray], reward: np.ndarray, row: int, step: Step) -> None:
    """LaneFault if one row of an unroll is not finite; `step` is what brought it."""
    check_finite({name: rows[row + 1] for name, rows in obs.items()}, reward[row], step)


def check_finite(obs: dict[str, np.ndarray], reward: np.ndarray, step: Step | None = None) -> None:
    """LaneFault if what one step has brought, [B, ...], is not finite; `step` is that, as the lanes returned it."""
    if find_nonfinite({name: now[None] for name, now in obs.items()}, reward[None]) is None:
        return
    first, *others = filter(None, (nonfinite_lane(lane, obs, reward) for lane in range(len(reward))))
    first.others, first.row = others, step
    raise first


def nonfinite_lane(lane: int, obs: dict[str, np.ndarray], reward: np.ndarray) -> LaneFault | None:
    """What is not finite of one lane's observation and reward, [B, ...]."""
    mine = slice(lane, lane + 1)
    bad = find_nonfinite({name: now[None, mine] for name, now in obs.items()}, reward[None, mine])
    return None if bad is None else LaneFault(lane, f"returned {bad[2]}", reason="nonfinite")


def check_actions(action: np.ndarray, env: str, actor: int, first_lane: int, unroll: int) -> None:
    """NumericError if actions [R, B, ...] of a policy are not finite. Its observations were finite."""
    if not np.issubdtype(action.dtype, np.floating) or np.isfinite(action).all():
        return
    row, lane = (int(i) for i in np.argwhere(~np.isfinite(action))[0][:2])
    raise NumericError(
        f"the policy chose {action[row, lane]} in environment {env} (actor {actor}, lane {first_lane + lane}, unroll "
        f"{unroll}): it has diverged; the last good checkpoint was kept. Lower the step sizes, or scale the rewards"
    )


def check_legal(mask: np.ndarray, action: np.ndarray, live: np.ndarray, spec: EnvSpec, first_lane: int) -> None:
    """LearnerError if an action [R, B, ...] of a live row is one that mask [R(+1), B, n] forbids."""
    wrong = live & ~includes(mask[: len(action)], action, spec.action.choices)
    if wrong.any():
        row, lane = (int(i) for i in np.argwhere(wrong)[0])
        raise LearnerError(
            f"the policy chose {action[row, lane]} in environment {spec.id} (lane {first_lane + lane}), which is not "
            "legal by its action mask: the algorithm does not apply masks. In one of your own make the head with "
            "`masked=spec.masked` and use `head.params(features, obs)`; or set net.action_mask to 'off'"
        )


def _floats(part: Any, name: str) -> list[tuple[str, np.ndarray]]:
    if isinstance(part, dict):
        single = len(part) == 1
        return [leaf for key, value in part.items() for leaf in _floats(value, name if single else f"{name} {key!r}")]
    return [(name, part)] if np.issubdtype(part.dtype, np.floating) else []
