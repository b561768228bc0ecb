"""n-step transitions from unrolls: every live row becomes one item, once, as soon as what it needs has been seen.

Row t of an episode becomes (obs[t], action[t], R, d, obs[t+m]) with m = n, or less where the episode ends before:
R = sum of gamma^k reward[t+k] over k < m, and d = gamma^m, or 0 if the episode terminated within these m rows. A
learner multiplies its value of obs[t+m] by d and by nothing else. Rows that still wait for their successor are kept
for the next unroll.

Columns of an item: obs, action, reward, discount, next_obs, version (of row t), steps (always 1), priority.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rookery.core.types import Arrays, DataPlan, EnvSpec, Shapes
from rookery.core.unroll import Unroll
from rookery.tables.frames import fill
from rookery.tables.window import Priorities, Window, obs_columns, replay_of


def most_items(plan: DataPlan, lanes: int) -> int:
    """Items of one parcel, at most: the rows of an unroll, and the n - 1 before them that may have waited for it.

    Where items wait until their last observation has been acted on, n rows may have waited, but the last row of an
    unroll waits for the next one, unless it is dead.
    """
    return lanes * (plan.unroll + replay_of(plan).n_step - 1)


def item_shapes(spec: EnvSpec, plan: DataPlan, lanes: int) -> Shapes:
    obs = obs_columns(spec)
    columns = {f"obs/{key}": column for key, column in obs.items()}
    columns |= {"action": (spec.action.shape, spec.action.dtype)}
    columns |= dict.fromkeys(("reward", "discount"), ((), "float32"))
    columns |= {f"next_obs/{key}": column for key, column in obs.items()}
    columns |= {"version": ((), "int64"), "steps": ((), "int32"), "priority": ((), "float32")}
    most = most_items(plan, lanes)
    return {path: ((most, *shape), dtype) for path, (shape, dtype) in columns.items()}


class NStepBuilder:
    skipped = 0  # every live row becomes an item

    def __init__(self, spec: EnvSpec, plan: DataPlan, lanes: int, start_priorities: Priorities | None = None):
        table = replay_of(plan)
        n, gamma = table.n_step, table.gamma
        if n < 1:
            raise ValueError(f"n_step {n}: a transition spans at least 1 step")
        self._n, self._lanes = n, lanes
        self._start = start_priorities if table.memory.start == "actor" else None
        self._extras = list(plan.extras) if self._start else []
        # What a policy says of a row (extras) is known once the row has been acted on: one row later than the row.
        lag = 1 if plan.extras else 0
        self._window = Window(spec, plan, lanes, back=n - 1 + lag)
        height = self._window.back + plan.unroll
        self._known = height - lag  # the last row that may be an item's last
        self._row = np.arange(height)[:, None]
        self._waiting = np.zeros((height, lanes), bool)  # live rows that are no item yet
        self._powers = np.array([gamma**k for k in range(n + 1)])
        self._flat = {path: rows.reshape(-1, *rows.shape[2:]) for path, rows in self._window.rows.items()}
        self._obs = list(spec.obs)
        self.reset()

    def reset(self) -> None:
        """A new life of the actor: waiting rows are dropped and frames are numbered from 0 again."""
        self._window.reset()
        self._waiting[...] = False

    def cut(self, age: np.ndarray) -> None:
        """Rows were lost: those that waited for them are dropped. Frame numbers count on."""
        self._window.cut()
        self._waiting[...] = False

    @property
    def pending(self) -> int:
        """Environment steps that came in and are no item yet."""
        return int(np.count_nonzero(self._waiting[: self._window.back]))

    def build(self, unroll: Unroll, out: Arrays) -> None:
        """Fill `out` (see `builder.parcel_shapes`) with the items that this unroll completes, by row, then lane."""
        window, waiting = self._window, self._waiting
        window.push(unroll, out)
        waiting[window.back :] = unroll.live
        total, steps, going = self._look_ahead()
        last = steps + self._row
        done = waiting & (last <= self._known) & (~going | (steps == self._n))
        items = np.flatnonzero(done)
        out["count"][0] = len(items)
        if len(items):
            self._write(items, total.ravel()[items], steps.ravel()[items], out)
        waiting &= ~done
        waiting[: window.back] = waiting[window.unroll :]
        window.slide()

    def _look_ahead(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For each waiting row: sum of rewards, how many rows it spans, whether its episode goes on behind them.

        Sums are taken in float64 and rounded to float32 once.
        """
        rows, height = self._window.rows, len(self._waiting)
        goes_on = ~(rows["terminated"] | rows["truncated"])
        reward = rows["reward"].astype(np.float64)
        going = self._waiting.copy()
        total, steps = np.zeros_like(reward), np.zeros(reward.shape, np.int64)
        for k in range(self._n):
            here, sums = going[: height - k], total[: height - k]
            np.add(sums, reward[k:] * self._powers[k], out=sums, where=here)
            steps[: height - k] += here
            here &= goes_on[k:]
        return total, steps, going

    def _write(self, items: np.ndarray, total: np.ndarray, steps: np.ndarray, out: Arrays) -> None:
        """`items` [M] are flat positions (row, lane) in the window."""
        flat, count = self._flat, len(items)
        assert count <= len(out["reward"]), (count, out["reward"].shape)
        behind = items + steps * self._lanes
        columns = {path: column[:count] for path, column in out.items() if path.split("/")[0] in _ITEM}
        for key in self._obs:
            _take(flat[f"obs/{key}"], items, columns[f"obs/{key}"])
            _take(flat[f"obs/{key}"], behind, columns[f"next_obs/{key}"])
        _take(flat["action"], items, columns["action"])
        _take(flat["version"], items, columns["version"])
        columns["reward"][:] = total
        columns["discount"][:] = self._powers[steps]
        columns["discount"][flat["terminated"][behind - self._lanes]] = 0.0
        columns["steps"][:] = 1
        priority = None
        if self._start is not None:
            for name in self._extras:
                rows = flat[f"extras/{name}"]
                columns[name], columns[f"next_{name}"] = rows[items], rows[behind]
            priority = self._start(columns)
        out["priority"][:count] = np.nan if priority is None else priority

    def state(self) -> dict[str, Any]:
        return {"window": self._window.state(), "waiting": self._waiting[: self._window.back].copy()}

    def load(self, state: dict[str, Any]) -> None:
        self._window.load(state["window"])
        fill(self._waiting[: self._window.back], state["waiting"], "waiting rows")


_ITEM = ("obs", "action", "reward", "discount", "next_obs", "version", "steps")


def _take(rows: np.ndarray, index: np.ndarray, out: np.ndarray) -> None:
    rows.take(index, axis=0, out=out, mode="clip")  # any other mode makes a copy of `out` first
