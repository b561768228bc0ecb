"""Streams of unrolls whose every number says where it belongs, and the episodes in them, cut by hand.

Episodes follow `support_lanes.ScriptedLanes`; images, recurrent states and extras are added here. Frames are tiny and
of few values, so that zero frames and equal neighbours, where numbering can go wrong, are common.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st
from support_lanes import BOX, DISCRETE, MULTI, ScriptedLanes

from rookery.core import tree
from rookery.core.config import ReplayConfig
from rookery.core.types import ActionSpec, DataPlan, EnvSpec, Leaf, Replay
from rookery.core.unroll import Unroll, as_unroll, empty_unroll, unroll_shapes
from rookery.tables.builder import Builder, make_builder, parcel_shapes

VECTOR = {"obs": Leaf((3,), "float32", "vector")}
DICT = VECTOR | {
    "mode": Leaf((), "int64", "discrete", n=8),
    "eye": Leaf((3, 2, 1), "uint8", "image", stack=3),
    "map": Leaf((1, 2, 2), "uint8", "image"),
}
EXTRAS = {"q": ((), "float32"), "q_max": ((2,), "float32")}
STATE = {"core": {"h": np.zeros((1, 2), np.float32)}, "noise": np.zeros((1, 1), np.float32)}
POISON = 77


class Part(NamedTuple):
    """One episode of a lane, as rows [first, first + length) of the stream; `ended` if its end was seen."""

    lane: int
    first: int
    length: int
    ended: bool


@dataclass
class Stream:
    """`rows`: path -> [rows, B, ...] of all unrolls one behind the other, obs one row more."""

    spec: EnvSpec
    plan: DataPlan
    lanes: int
    rows: dict[str, np.ndarray]
    age: np.ndarray | None = None  # behind a cut: rows of each lane's episode before row 0, -1 where that is dead

    def first(self, unrolls: int) -> Stream:
        return self._part(0, unrolls * self.plan.unroll)

    def behind(self, row: int) -> Stream:
        """The whole unrolls from a row on."""
        live, steps = self.rows["live"], (len(self.rows["live"]) - row) // self.plan.unroll * self.plan.unroll
        dead = [np.flatnonzero(~live[:row, lane])[-1:] for lane in range(self.lanes)]
        age = [row - int(last[0]) - 1 if len(last) else row for last in dead]
        part = self._part(row, steps)
        part.rows["version"] = np.repeat(10 * (np.arange(steps) // self.plan.unroll), self.lanes).reshape(steps, -1)
        part.age = np.where(live[row], age, -1)
        return part

    def _part(self, row: int, steps: int) -> Stream:
        rows = {path: column[row : row + steps + path.startswith("obs/")] for path, column in self.rows.items()}
        return Stream(self.spec, self.plan, self.lanes, rows)

    @property
    def unrolls(self) -> list[Unroll]:
        return [self.unroll(index) for index in range(len(self.rows["reward"]) // self.plan.unroll)]

    def unroll(self, index: int) -> Unroll:
        """A copy: builders may not rely on the memory they were given before."""
        first, steps = index * self.plan.unroll, self.plan.unroll
        cut = {p: rows[first : first + steps + p.startswith("obs/")].copy() for p, rows in self.rows.items()}
        cut["version"], cut["lane"] = cut["version"][0], np.arange(self.lanes)
        return as_unroll(cut)

    def episodes(self) -> Iterator[Part]:
        live, end = self.rows["live"], self.rows["terminated"] | self.rows["truncated"]
        for lane in range(self.lanes):
            first = 0
            for row in range(len(live)):
                if not live[row, lane]:
                    first = row + 1
                elif end[row, lane] or row == len(live) - 1:
                    yield Part(lane, first, row + 1 - first, bool(end[row, lane]))

    def seen(self, row: int) -> int:
        """Number of the unroll in which observation `row` is known (with extras: has been acted on)."""
        return max(0, row - 1) // self.plan.unroll if not self.plan.extras else row // self.plan.unroll


def stream(
    plan: DataPlan,
    count: int,
    lengths: Sequence[Sequence[int]] = ((3, 5, 1, 2), (5, 6, 1, 1, 4), (13, 2, 4), (1,)),
    ends: Sequence[Sequence[str]] = (("terminated", "truncated", "both"), ("truncated", "terminated")),
    lanes: int = 4,
    obs: dict[str, Leaf] = VECTOR,
    action: ActionSpec = DISCRETE,
    recurrent: bool = False,
    seed: int = 0,
) -> Stream:
    """`count` unrolls of ScriptedLanes under random actions."""
    rng = np.random.default_rng(seed)
    game = ScriptedLanes(lanes, action, lengths, ends)
    spec = EnvSpec("scripted", obs, action)
    steps = count * plan.unroll
    shapes = unroll_shapes(spec, DataPlan(steps, 1, plan.table, plan.extras), lanes, STATE if recurrent else {})
    rows = tree.flatten({k: v for k, v in vars(empty_unroll(shapes)).items() if isinstance(v, dict | np.ndarray)})
    rows["version"] = np.repeat(10 * (np.arange(steps) // plan.unroll), lanes).reshape(steps, lanes)
    rows["live"][:] = True
    _look(rows, 0, game.reset(range(lanes))["obs"], np.ones(lanes, bool), rng, obs)
    for row in range(steps):
        if action.kind == "box":
            rows["action"][row] = np.round(rng.uniform(-1, 1, (lanes, action.size)) * 8) / 8
        else:
            rows["action"][row] = rng.integers(action.choices, size=(lanes, len(action.choices))).reshape(
                lanes, *action.shape
            )
        seen, rows["reward"][row], rows["terminated"][row], rows["truncated"][row] = game.step(rows["action"][row])
        _look(rows, row + 1, seen["obs"], ~rows["live"][row], rng, obs)
        if row + 1 < steps:
            rows["live"][row + 1] = ~(rows["terminated"][row] | rows["truncated"][row])
        for path in rows:
            if path.startswith(("extras/", "state0/")):
                rows[path][row] = rng.integers(1, 1000, rows[path][row].shape)
            if path.startswith("state0/"):
                rows[path][row, rows["obs/obs"][row, :, 2] == 0] = 0  # an episode begins with a state of zero
    return Stream(spec, plan, lanes, rows)


def _look(rows: dict[str, np.ndarray], row: int, code: np.ndarray, begins: np.ndarray, rng: Any, obs: dict) -> None:
    """Observation `row` of every lane; where an episode `begins`, a stack is filled with zeros, repeats or whatever."""
    for key, leaf in obs.items():
        now = rows[f"obs/{key}"][row]
        if key == "obs":
            now[:] = code
        elif leaf.kind == "discrete":
            now[:] = (3 * code[:, 1] + code[:, 2]) % leaf.n
        elif leaf.stack == 1:
            now[:] = rng.integers(0, 3, now.shape)
        else:
            for lane in range(len(now)):
                if begins[lane]:
                    now[lane] = rng.integers(0, 2, leaf.shape)
                    now[lane, :-1] = (0, now[lane, -1], now[lane, :-1].copy())[rng.integers(3)]
                else:
                    now[lane, :-1] = rows[f"obs/{key}"][row - 1, lane, 1:]
                    now[lane, -1] = rng.integers(0, 2, leaf.shape[1:])


def plan_of(unroll: int, extras: bool = False, start: str = "max", gamma: float = 0.9, **table: int) -> DataPlan:
    replay = Replay(ReplayConfig(start=start), gamma, **table)  # type: ignore[arg-type]
    return DataPlan(unroll, 1 if table.get("sequence") else unroll, replay, EXTRAS if extras else {})


def poisoned(made: Stream) -> dict[str, np.ndarray]:
    recurrent = any(path.startswith("state0/") for path in made.rows)
    shapes = parcel_shapes(made.spec, made.plan, made.lanes, STATE if recurrent else {})
    return {path: np.full(shape, POISON, dtype) for path, (shape, dtype) in shapes.items()}


def builder_of(made: Stream, start_priorities: Callable | None = None) -> Builder:
    return make_builder(made.spec, made.plan, made.lanes, start_priorities)


def parcels(made: Stream, start_priorities: Callable | None = None, builder: Builder | None = None) -> list[dict]:
    """What a builder makes of every unroll, each array cut to what counts."""
    builder = builder or builder_of(made, start_priorities)
    return [parcel(made, builder, unroll) for unroll in made.unrolls]


def parcel(made: Stream, builder: Builder, unroll: Unroll) -> dict[str, np.ndarray]:
    out = poisoned(made)
    builder.build(unroll, out)
    items, frames = out["count"]
    cut = {"count": 2, "first_frame": 1, "frames": frames}
    return {path: array[: cut.get(path.split("/")[0], items)] for path, array in out.items()}


def steps_in(made: Stream, unrolls: int) -> int:
    return int(made.rows["live"][: unrolls * made.plan.unroll].sum())


class Frames:
    """What a table would keep: frames by number, as parcels bring them."""

    def __init__(self, spec: EnvSpec):
        self.spec = spec
        self.kept = {key: [] for key, leaf in spec.obs.items() if leaf.kind == "image"}

    def take(self, parcel: dict[str, np.ndarray]) -> None:
        for key, kept in self.kept.items():
            assert parcel[f"first_frame/{key}"][0] == len(kept), "numbers have a gap"
            kept.extend(parcel[f"frames/{key}"])

    def seen(self, key: str, column: np.ndarray) -> np.ndarray:
        """A column of items as observations: numbers become stacks, other leaves stay."""
        if key not in self.kept:
            return column
        leaf = self.spec.obs[key]
        zero = np.zeros(leaf.shape[1:] if leaf.stack > 1 else leaf.shape, leaf.dtype)
        assert column.dtype == np.int64 and column.shape[-1] == leaf.stack
        frames = [self.kept[key][number] if number >= 0 else zero for number in column.ravel()]
        return np.array(frames, leaf.dtype).reshape(*column.shape[:-1], *leaf.shape)


def same(a: Any, b: Any) -> bool:
    """Trees of arrays, equal in every bit, dtypes too."""
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def cut_in_two(made: Stream, unrolls: int, lost: int, builder: Builder) -> tuple[tuple, tuple]:
    """So many unrolls, so many rows that nobody saw, and the rest, through one builder: (stream, parcels) of both.

    Every step behind the cut is in an item, pending, or skipped.
    """
    before, behind = made.first(unrolls), made.behind(unrolls * made.plan.unroll + lost)
    first = parcels(before, builder=builder)
    builder.cut(behind.age)
    assert builder.pending == 0
    carried, got = 0, []
    for index, unroll in enumerate(behind.unrolls):
        got.append(parcel(behind, builder, unroll))
        carried += int(got[-1]["steps"].sum()) + builder.skipped
        assert carried + builder.pending == steps_in(behind, index + 1)
    return (before, first), (behind, got)


@st.composite
def scripts(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of `stream` besides the plan: any episodes, any observation."""
    lanes = draw(st.integers(1, 3))
    one = st.lists(st.integers(1, 7), min_size=1, max_size=4)
    kinds = st.lists(st.sampled_from(("terminated", "truncated", "both")), min_size=1, max_size=3)
    return {
        "count": draw(st.integers(1, 5)),
        "lanes": lanes,
        "lengths": draw(st.lists(one, min_size=lanes, max_size=lanes)),
        "ends": draw(st.lists(kinds, min_size=lanes, max_size=lanes)),
        "obs": draw(st.sampled_from((VECTOR, DICT))),
        "action": draw(st.sampled_from((DISCRETE, MULTI, BOX))),
        "seed": draw(st.integers(0, 9)),
    }
