"""Sequences from unrolls, for recurrent nets (R2D2, Kapturowski et al. 2019): rows of one episode, and a start state.

An item has S = burn_in + sequence rows. Item k of an episode trains on its rows from k * stride on, `sequence` of
them, with stride = sequence - overlap; up to `burn_in` rows before them warm the recurrent state up. What an item
lacks, before the episode's start or behind its end, is padding: not live, all zero (frame number `ZERO`). The row of
obs behind the last live one is its successor, an episode's final observation included. An item all of whose rows an
earlier one trained on is not made.

Where rows were lost amid an episode (`cut`), the state before what is left of it is not zero, and an item that padding
begins would have to start with it. So the first `burn_in` rows there only warm up item 0 and are trained on by none.

Columns of an item: obs (S+1 rows), action, reward, terminated, truncated, live (S rows), state (before the first row;
zero where that is padding), version (of the last live row), steps (live rows that no earlier item trained on) and
priority.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rookery.core import tree
from rookery.core.errors import CheckpointError
from rookery.core.types import Arrays, DataPlan, EnvSpec, Shapes, Tree
from rookery.core.unroll import Unroll
from rookery.tables.frames import ZERO, fill
from rookery.tables.window import Priorities, Window, obs_columns, replay_of

_ROWS = ("action", "reward", "terminated", "truncated")


def most_items(plan: DataPlan, lanes: int) -> int:
    """Items of one parcel, at most.

    A row completes one item at most. Give each item two rows: the one that completes it, and the one behind it (dead)
    if it is an episode's last, else the one before it. With a stride of 2 or more no row is given twice, and at each
    end of an unroll one item may have a row outside of it: 2 * items <= unroll + 2.
    """
    table = replay_of(plan)
    stride = table.sequence - table.overlap
    return lanes * (plan.unroll if stride == 1 else plan.unroll // 2 + 1)


def item_shapes(spec: EnvSpec, plan: DataPlan, lanes: int, state: Tree) -> Shapes:
    """`state` is an initial state of any number of lanes."""
    table = replay_of(plan)
    rows, most = table.burn_in + table.sequence, most_items(plan, lanes)
    shapes: Shapes = {
        f"obs/{key}": ((most, rows + 1, *shape), dtype) for key, (shape, dtype) in obs_columns(spec).items()
    }
    shapes["action"] = ((most, rows, *spec.action.shape), spec.action.dtype)
    shapes["reward"] = ((most, rows), "float32")
    shapes |= dict.fromkeys(("terminated", "truncated", "live"), ((most, rows), "bool"))
    shapes |= {path: ((most, *leaf.shape[1:]), "float32") for path, leaf in tree.flatten(state, "state").items()}
    return shapes | {"version": ((most,), "int64"), "steps": ((most,), "int32"), "priority": ((most,), "float32")}


class SequenceBuilder:
    def __init__(self, spec: EnvSpec, plan: DataPlan, lanes: int, start_priorities: Priorities | None = None):
        table = replay_of(plan)
        if not 0 <= table.overlap < table.sequence or table.burn_in < 0:
            raise ValueError(
                f"sequence {table.sequence}, overlap {table.overlap}, burn_in {table.burn_in}: "
                "the overlap must be shorter than the sequence, and neither may be negative"
            )
        self._sequence, self._burn_in = table.sequence, table.burn_in
        self._stride, self._size = table.sequence - table.overlap, table.burn_in + table.sequence
        self._start = start_priorities if table.memory.start == "actor" else None
        # What a policy says of a row (extras) is known once the row has been acted on: one row later than the row.
        self._lag = 1 if plan.extras else 0
        self._window = Window(spec, plan, lanes, back=self._size - 1 + self._lag)
        self._base = self._size - 1  # window row of the next one to look at: a row whose successor is then known
        self._age = np.zeros(lanes, np.int64)  # rows of the open episode before that; -1: it is a dead one
        self._item = np.zeros(lanes, np.int64)  # number of the open episode's next item
        self._warm = np.zeros(lanes, np.int64)  # rows before the open episode's row 0 that are there: behind a cut
        self.skipped = 0  # of these, rows that the last unroll brought
        self._kept = self._size // self._stride + 1  # items of an episode that may have begun and be incomplete
        self._states: Arrays = {}  # path -> [B, kept, ...]: the start states of those, item k in place k % kept
        self._fillers = dict.fromkeys(_ROWS, 0)
        self._fillers |= {f"obs/{key}": ZERO if leaf.kind == "image" else 0 for key, leaf in spec.obs.items()}
        most = most_items(plan, lanes)
        self._extras = {
            name: np.zeros((most, self._size + 1, *shape), dtype)
            for name, (shape, dtype) in (plan.extras.items() if self._start else ())
        }
        self.reset()

    def reset(self) -> None:
        """A new life of the actor: incomplete items are dropped and frames are numbered from 0 again."""
        self._window.reset()
        self._begin(np.zeros(len(self._age), np.int64))

    def cut(self, age: np.ndarray) -> None:
        """Rows were lost: incomplete items are dropped. Frame numbers count on."""
        self._window.cut()
        self._begin(age)

    def _begin(self, age: np.ndarray) -> None:
        self._warm[:] = np.where(age > 0, self._burn_in, 0)
        self._age[:] = -self._lag - self._warm - (age < 0)  # items count from the row behind the warm ones
        self._item[:] = 0

    @property
    def pending(self) -> int:
        """Environment steps that came in and that no item has trained on yet."""
        unseen = int(np.count_nonzero(self._window.rows["live"][self._base : self._window.back]))
        return int((np.maximum(self._age, 0) - self._carried(self._item)).sum()) + unseen

    def build(self, unroll: Unroll, out: Arrays) -> None:
        """Fill `out` (see `builder.parcel_shapes`) with the items that this unroll completes, lane by lane."""
        window, rows = self._window, self._window.rows
        window.push(unroll, out)
        states = self._checked(unroll.state0)
        low, top = self._base, self._base + window.unroll
        ends = rows["terminated"][low:top] | rows["truncated"][low:top]
        count = self.skipped = 0
        for lane in range(ends.shape[1]):
            first, item = low - int(self._age[lane]), int(self._item[lane])  # window row of the episode's row 0
            for stop in (low + 1 + np.flatnonzero(ends[:, lane])).tolist():
                self._skip(lane, low, first, stop)
                for each in range(item, self._due(stop - first, True)):
                    count = self._write(count, lane, each, first, stop, states, out)
                first, item, self._warm[lane] = stop + 1, 0, 0
            self._skip(lane, low, first, top)
            due = self._due(top - first, False)
            for each in range(item, due):
                count = self._write(count, lane, each, first, top, states, out)
            self._age[lane], self._item[lane] = top - first, max(item, due)
            self._keep_states(lane, first, states)
        out["count"][0] = count
        if count:
            self._prioritise(count, out)
        window.slide()

    def _skip(self, lane: int, low: int, first: int, stop: int) -> None:
        """Count the warm rows among [low, stop), which no item will train on."""
        if warm := int(self._warm[lane]):
            self.skipped += max(0, min(first, stop) - max(low, first - warm))

    def _checked(self, state0: Tree) -> Arrays:
        states = tree.flatten(state0, "state")
        for path, rows in states.items():
            assert len(rows) == self._window.unroll, f"{path}: {len(rows)} states a lane; sequences need a chunk of 1"
            if path not in self._states:
                self._states[path] = np.zeros((rows.shape[1], self._kept, *rows.shape[2:]), rows.dtype)
        return states

    def _due(self, length: int, ended: bool) -> int:
        """How many items an episode of that length makes: those that it fills, and once it has ended, the rest."""
        if length <= 0:  # what was left of it behind a cut ended while it warmed up
            return 0
        more = length - self._sequence  # rows beyond those of item 0
        if ended:
            return 1 + max(0, -(-more // self._stride))
        return max(0, 1 + more // self._stride)

    def _write(self, at: int, lane: int, item: int, first: int, stop: int, states: Arrays, out: Arrays) -> int:
        """Write item `item` of the episode in rows [first, stop) of the window to place `at`; the next place."""
        assert at < len(out["reward"]), (at, out["reward"].shape)
        window, row = self._window.rows, first + item * self._stride - self._burn_in
        start = first - int(self._warm[lane])
        low, high = max(row, start), min(row + self._size, stop)  # its live rows
        left, right = low - row, high - row
        for path, filler in self._fillers.items():
            column, end = out[path][at], right + (path not in _ROWS)  # obs: the successor too
            column[:left], column[end:] = filler, filler
            column[left:end] = window[path][low : row + end, lane]
        for name, column in self._extras.items():
            column[at] = 0
            column[at, left : right + 1] = window[f"extras/{name}"][low : high + 1, lane]
        for path, kept in self._states.items():
            since = row - self._window.back  # row of the unroll
            state = states[path][since, lane] if since >= 0 else kept[lane, item % self._kept]
            out[path][at] = state if row >= start else 0
        out["live"][at] = False
        out["live"][at, left:right] = True
        out["version"][at] = window["version"][high - 1, lane]
        out["steps"][at] = high - first - self._carried(item)
        return at + 1

    def _carried(self, item: Any) -> Any:
        """Rows of an episode that the items before number `item` trained on, if none of them was cut short."""
        return (item > 0) * ((item - 1) * self._stride + self._sequence)

    def _keep_states(self, lane: int, first: int, states: Arrays) -> None:
        """Start states of those items of the open episode that begin in this unroll and are not complete."""
        first, warm = first - self._window.back, self._burn_in  # row of the unroll that is the episode's row 0
        # That begins neither before the episode nor the unroll.
        earliest = -(-max(warm - int(self._warm[lane]), warm - first) // self._stride)
        latest = (self._window.unroll - 1 - first + warm) // self._stride
        for item in range(max(earliest, int(self._item[lane])), latest + 1):
            for path, kept in self._states.items():
                kept[lane, item % self._kept] = states[path][first + item * self._stride - warm, lane]

    def _prioritise(self, count: int, out: Arrays) -> None:
        priority = None
        if self._start is not None:
            items = {path: column[:count] for path, column in out.items() if path.split("/")[0] in _ITEM}
            for name, column in self._extras.items():
                items[name], items[f"next_{name}"] = column[:count, :-1], column[:count, -1]
            priority = self._start(items)
        out["priority"][:count] = np.nan if priority is None else priority

    def _age_fits(self) -> bool:
        """Whether the rows of the window are those of open episodes of that age."""
        back, base, rows = self._window.back, self._base, self._window.rows
        live, ends = rows["live"][:back], (rows["terminated"] | rows["truncated"])[:back]
        none = np.zeros(len(self._age), bool)
        dead = ~live[base] if base < back else ends[-1] if back else none  # the next row to look at
        seen = np.logical_and.accumulate((live & ~ends)[:base][::-1], axis=0).sum(axis=0)  # rows before it, in a row
        # Behind a cut an episode counts from the row after those that warm its state up.
        seen, least = seen - self._warm, base - self._warm
        age = np.where(seen < least, self._age == seen, self._age >= least)
        warm = (self._warm == 0) | (self._warm == self._burn_in)
        return bool((warm & np.where(dead, self._age == -1, age)).all())

    def state(self) -> dict[str, Any]:
        states = {path: kept.copy() for path, kept in self._states.items()}
        return {
            "window": self._window.state(), "states": tree.unflatten(states),
            "age": self._age.copy(), "item": self._item.copy(), "warm": self._warm.copy(),
        }  # fmt: skip

    def load(self, state: dict[str, Any]) -> None:
        self._window.load(state["window"])
        fill(self._age, state["age"], "ages of episodes")
        fill(self._item, state["item"], "numbers of items")
        fill(self._warm, state.get("warm", np.zeros_like(self._warm)), "warm rows")  # older states have none
        due = [self._due(age, False) for age in self._age.tolist()]
        if not self._age_fits() or self._age.max() >= 2**53 or self._item.tolist() != due:
            raise CheckpointError("stored ages of episodes do not fit their rows or their items: they are not ours")
        self._states = {}
        for path, stored in tree.flatten(state["states"]).items():
            self._states[path] = np.zeros((len(self._age), self._kept, *stored.shape[2:]), stored.dtype)
            fill(self._states[path], stored, path)


_ITEM = ("obs", *_ROWS, "live", "state", "version", "steps")
