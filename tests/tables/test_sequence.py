"""Sequences against cuts by hand: they cover each episode, start where they should, know the state before that."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support_lanes import DISCRETE, ScriptedLanes
from support_stream import (
    DICT,
    STATE,
    Frames,
    Stream,
    builder_of,
    cut_in_two,
    parcel,
    parcels,
    plan_of,
    poisoned,
    same,
    scripts,
    steps_in,
    stream,
)

from rookery.core import tree
from rookery.core.errors import CheckpointError
from rookery.core.types import ActOutput, DataPlan
from rookery.core.unroll import empty_unroll, unroll_shapes
from rookery.roles.actor import Actor
from rookery.tables.builder import parcel_shapes
from rookery.tables.sequence import SequenceBuilder, most_items

exact = settings(deadline=None, derandomize=True)
ROWS = ("action", "reward", "terminated", "truncated")


@st.composite
def plans(draw: st.DrawFn) -> DataPlan:
    sequence = draw(st.integers(1, 5))
    overlap = draw(st.integers(0, sequence - 1))
    burn_in = draw(st.integers(0, 4))
    return plan_of(
        draw(st.integers(1, 7)), draw(st.booleans()), sequence=sequence, overlap=overlap, burn_in=burn_in
    )  # fmt: skip


def expected(made: Stream) -> list[list[dict]]:
    """The items of each parcel by the definition, row by row."""
    table, rows = made.plan.table, made.rows
    size, stride = table.burn_in + table.sequence, table.sequence - table.overlap
    found: list[tuple[int, int, int, dict]] = []
    for lane, first, length, ended in made.episodes():
        trained, begin = 0, 0
        warm = table.burn_in if first == 0 and made.age is not None and made.age[lane] > 0 else 0
        first, length = first + warm, length - warm  # behind a cut amid an episode, rows that only warm up
        while trained < length:
            if begin + table.sequence > length and not ended:
                break
            stop = min(begin + table.sequence, length)
            item: dict = {"steps": stop - trained, "version": rows["version"][first + stop - 1, lane]}
            item["live"] = [-warm <= begin - table.burn_in + at < length for at in range(size)]
            item["row"], item["seen"] = first + begin - table.burn_in, []
            for at in range(size + 1):
                row = begin - table.burn_in + at
                item["seen"].append(first + row if -warm <= row <= length else None)
            before = first + max(-warm, begin - table.burn_in)
            item["state"] = {path: rows[path][before, lane] for path in rows if "state0" in path}
            found.append((made.seen(first + stop), lane, first + begin, item))
            trained, begin = stop, begin + stride
    found.sort(key=lambda item: item[:3])
    return [[(lane, item) for index, lane, _, item in found if index == unroll] for unroll in range(len(made.unrolls))]


def check(made: Stream, got: list[dict], frames: Frames | None = None) -> None:
    frames = frames or Frames(made.spec)
    for items, each in zip(expected(made), got, strict=True):
        frames.take(each)
        assert each["count"][0] == len(items)
        seen = {key: frames.seen(key, each[f"obs/{key}"]) for key in made.spec.obs}
        for at, (lane, item) in enumerate(items):
            assert each["steps"][at] == item["steps"] > 0
            assert each["version"][at] == item["version"]
            assert each["live"][at].tolist() == item["live"]
            for path, state in item["state"].items():
                assert np.array_equal(each[path.replace("state0", "state")][at], state)
            for place, row in enumerate(item["seen"]):
                for key, shown in seen.items():
                    assert (shown[at, place] == (0 if row is None else made.rows[f"obs/{key}"][row, lane])).all(), key
                    if row is None and key in frames.kept:
                        assert (each[f"obs/{key}"][at, place] == -1).all()
            for place, live in enumerate(item["live"]):
                for path in ROWS:
                    want = made.rows[path][item["row"] + place, lane] if live else 0
                    assert (each[path][at, place] == want).all(), path


@exact
@given(plans(), scripts())
def test_items_are_those_of_the_definition(plan: DataPlan, script: dict):
    made = stream(plan, recurrent=True, **script)
    got = parcels(made)
    check(made, got)
    assert all(np.isnan(each["priority"]).all() for each in got)


@exact
@given(plans(), scripts())
def test_every_live_step_is_in_one_item_or_pending(plan: DataPlan, script: dict):
    made = stream(plan, **script)
    builder, carried = builder_of(made), 0
    for index, unroll in enumerate(made.unrolls):
        carried += int(parcel(made, builder, unroll)["steps"].sum())
        assert carried + builder.pending == steps_in(made, index + 1)


@exact
@given(plans(), scripts(), st.data())
def test_a_builder_goes_on_from_its_state(plan: DataPlan, script: dict, data: st.DataObject):
    made = stream(plan, recurrent=True, **script)
    whole = parcels(made)
    cut = data.draw(st.integers(0, len(whole)))
    first, second = builder_of(made), builder_of(made)
    for unroll in made.unrolls[:cut]:
        parcel(made, first, unroll)
    state = first.state()
    stored = tree.map(np.copy, state)
    for unroll in made.unrolls[cut:]:
        parcel(made, first, unroll)  # what was handed out does not change behind the back of who has it
    assert same(state, stored)
    if cut:
        second.build(made.unroll(0), poisoned(made))  # whatever it saw before is gone
    second.load(stored)
    rest = [parcel(made, second, unroll) for unroll in made.unrolls[cut:]]
    assert all(same(a, b) for a, b in zip(rest, whole[cut:], strict=True))
    assert second.pending == first.pending


@exact
@given(plans(), scripts())
def test_after_a_reset_a_builder_is_as_new(plan: DataPlan, script: dict):
    made = stream(plan, recurrent=True, **script)
    builder = builder_of(made)
    whole = parcels(made, builder=builder)
    builder.reset()
    assert builder.pending == 0
    assert all(same(a, b) for a, b in zip(parcels(made, builder=builder), whole, strict=True))


@exact
@given(plans(), scripts(), st.integers(0, 5), st.integers(0, 20))
def test_nothing_is_built_across_a_cut(plan: DataPlan, script: dict, unrolls: int, lost: int):
    made = stream(plan, recurrent=True, **(script | {"count": unrolls + 20 // plan.unroll + script["count"] + 1}))
    frames = Frames(made.spec)
    for part, got in cut_in_two(made, unrolls, lost, builder_of(made)):
        check(part, got, frames)


def test_behind_a_cut_amid_an_episode_the_first_rows_warm_up():
    """Sequences of 3 behind 2 to warm up, of an episode of which 4 rows came, 5 were lost and 11 are to come."""
    plan = plan_of(4, sequence=3, overlap=1, burn_in=2)
    made = stream(plan, 5, [[20, 9]], [["truncated"]], lanes=1, recurrent=True)
    builder, skipped = builder_of(made), []
    _, (behind, got) = cut_in_two(made, 1, 5, builder)
    first = got[1]
    assert first["live"][0].all() and first["obs/obs"][0, :, 2].tolist() == [9, 10, 11, 12, 13, 14]
    assert first["steps"].tolist() == [3, 2]
    assert np.array_equal(first["state/core/h"][0], made.rows["state0/core/h"][9, 0])
    builder.cut(behind.age)
    for unroll in behind.unrolls:
        parcel(behind, builder, unroll)
        skipped.append(builder.skipped)
    assert skipped == [2, 0]


@exact
@given(plans())
def test_episodes_of_one_step_everywhere(plan: DataPlan):
    made = stream(plan, 5, [[1]], lanes=2, obs=DICT, recurrent=True)
    check(made, parcels(made))


@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize("sequence, overlap", [(1, 0), (2, 0), (2, 1), (3, 0), (3, 1)])
@pytest.mark.parametrize("unroll", [4, 5])
def test_the_room_for_items_is_enough_and_hardly_more(sequence: int, overlap: int, unroll: int, extras: bool):
    """Every pattern of four episodes of up to six steps, in all phases to the unrolls."""
    plan, most = plan_of(unroll, extras, sequence=sequence, overlap=overlap), 0
    rng = np.random.default_rng(0)
    for lengths in [[1], [2], [3], *rng.integers(1, 7, (40, 4)).tolist()]:
        made = stream(plan, 12, [lengths], lanes=1)
        most = max(most, *(int(each["count"][0]) for each in parcels(made)))
    assert most_items(plan, 1) - 1 <= most <= most_items(plan, 1)
    if sequence - overlap <= 2:
        assert most == most_items(plan, 1)


def test_an_episode_of_seven_steps():
    """Sequences of 4 with 2 shared and 2 to warm up: rows -2..3, 0..5, 2..6 and padding. P77: item k starts at 2k."""
    made = stream(plan_of(20, sequence=4, overlap=2, burn_in=2), 1, [[7, 50]], [["truncated"]], lanes=1, recurrent=True)
    (got,) = parcels(made)
    first = got["obs/obs"][:, :, 1] + got["live"].any(1)[:, None] == 1  # rows of episode 0
    steps = np.where(first, got["obs/obs"][:, :, 2], -1).astype(int)
    assert got["steps"][:3].tolist() == [4, 2, 1]
    assert got["live"][:3].astype(int).tolist() == [[0, 0, 1, 1, 1, 1], [1] * 6, [1, 1, 1, 1, 1, 0]]
    assert steps[1].tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert steps[2, :6].tolist() == [2, 3, 4, 5, 6, 7]  # the final observation stands behind the last live row
    assert got["obs/obs"][0, :2].tolist() == [[0, 0, 0]] * 2 and got["obs/obs"][2, 6].tolist() == [0, 0, 0]
    assert got["truncated"][2].tolist() == [False] * 4 + [True, False] and not got["terminated"].any()
    assert np.array_equal(got["state/core/h"][2], made.rows["state0/core/h"][2, 0])
    assert np.array_equal(got["state/core/h"][1], made.rows["state0/core/h"][0, 0])


def test_nothing_new_makes_no_item():
    """An episode of 4 with sequences of 4 and 3 shared is one item; one of 5 is two."""
    for length, items in ((4, [4]), (5, [4, 1]), (3, [3]), (1, [1])):
        made = stream(plan_of(6, sequence=4, overlap=3), 1, [[length, 60]], lanes=1)
        (got,) = parcels(made)
        mine = got["obs/obs"][:, 0, 1] == 0
        assert got["steps"][mine].tolist() == items


def test_start_priorities_see_what_the_policy_said_of_every_row():
    """P77: q[t] belongs to obs[t], the final observation's included; nothing is said of padding."""
    seen: list[dict] = []

    def priorities(items: dict[str, np.ndarray]) -> np.ndarray:
        seen.append({path: column.copy() for path, column in items.items()})
        return items["q"].max(1)

    plan = plan_of(5, extras=True, start="actor", sequence=4, overlap=1, burn_in=3)
    made = stream(plan, 9, obs=DICT, recurrent=True)
    got = parcels(made, priorities)
    check(made, got)
    calls, checked = iter(seen), 0
    for items, each in zip(expected(made), got, strict=True):
        if not items:
            continue
        call = next(calls)
        assert same(each["priority"], call["q"].max(1))
        assert {"obs/eye", "state/core/h", "live", "steps", "version"} < set(call)
        assert not {"frames/eye", "priority", "count"} & set(call)
        for name in made.plan.extras:
            said = np.concatenate([call[name], call[f"next_{name}"][:, None]], 1)
            for at, (lane, item) in enumerate(items):
                for place, row in enumerate(item["seen"]):
                    want = 0 if row is None else made.rows[f"extras/{name}"][row, lane]
                    assert (said[at, place] == want).all()
                    checked += 1
    assert checked > 500 and next(calls, None) is None


class Adder:
    """A policy whose state is a running sum of what it saw, and whose q is that sum: enough of an algorithm to act."""

    def __init__(self, plan: DataPlan):
        self._plan = plan

    def plan(self) -> DataPlan:
        return self._plan

    def initial_state(self, nets: object, lanes: int) -> dict:
        return {"h": torch.zeros(lanes, 1)}

    @staticmethod
    def step(h: np.ndarray, obs: np.ndarray) -> np.ndarray:
        return h / 2 + 1 + obs @ np.array([[1.0], [4.0], [16.0]], np.float32)

    def act(self, nets: object, obs: dict, state: dict, explore: object) -> ActOutput:
        h = torch.from_numpy(self.step(state["h"].numpy(), obs["obs"].numpy()))
        count = len(h)
        return ActOutput(torch.zeros(count, dtype=torch.int64), torch.zeros(count), {"h": h}, {"q": h[:, 0]})


@pytest.mark.parametrize("unroll", [1, 4, 7])
@pytest.mark.parametrize("burn_in", [0, 3])
def test_a_sequence_replayed_from_its_state_says_what_its_actor_said(unroll: int, burn_in: int):
    """P76, P84: state before the first row; a dead row, here padding, ends it."""
    made = plan_of(unroll, start="actor", sequence=4, overlap=2, burn_in=burn_in)
    plan = DataPlan(unroll, 1, made.table, {"q": ((), "float32")})
    lanes = ScriptedLanes(4, DISCRETE)
    algorithm = Adder(plan)
    actor = Actor(algorithm, None, lanes, seed=1)  # type: ignore[arg-type]
    state = algorithm.initial_state(None, 1)
    scratch = empty_unroll(unroll_shapes(lanes.spec, plan, 4, state))
    out = {path: np.zeros(*shape) for path, shape in parcel_shapes(lanes.spec, plan, 4, state).items()}
    replayed = 0

    def priorities(items: dict[str, np.ndarray]) -> None:
        nonlocal replayed
        h = items["state/h"]
        for row in range(items["live"].shape[1]):
            live = items["live"][:, row]
            now = Adder.step(h, items["obs/obs"][:, row])
            assert np.array_equal(now[live, 0], items["q"][live, row])
            h = now * live[:, None]
            replayed += int(live.sum())

    builder = SequenceBuilder(lanes.spec, plan, 4, priorities)
    actor.reset()
    for version in range(60 // unroll):
        actor.unroll(scratch, version)
        builder.build(scratch, out)
    assert replayed > 150


def test_state_of_another_overlap_is_refused():
    """Both keep as many rows, but not the states of the same ones."""
    made, other = (stream(plan_of(4, sequence=4, overlap=overlap), 1, recurrent=True) for overlap in (0, 2))
    builder = builder_of(other)
    parcels(other, builder=builder)
    with pytest.raises(CheckpointError, match="state/core/h"):
        builder_of(made).load(builder.state())


def test_states_of_every_row_are_needed():
    plan = plan_of(4, sequence=3)
    made = stream(plan, 1, recurrent=True)
    unroll, out = made.unroll(0), poisoned(made)
    short = tree.replace(unroll, state0=tree.map(lambda x: x[:1], unroll.state0))
    with pytest.raises(AssertionError, match="chunk of 1"):
        builder_of(made).build(short, out)


@pytest.mark.parametrize("table", [{"overlap": 4}, {"overlap": -1}, {"burn_in": -1}, {"overlap": 5}])
def test_impossible_cuts_are_refused(table: dict):
    made = stream(plan_of(4, sequence=4), 1)
    with pytest.raises(ValueError, match="overlap must be shorter"):
        SequenceBuilder(made.spec, plan_of(4, sequence=4, **table), 4)


def test_a_net_without_a_state_has_no_column_for_one():
    plan = plan_of(6, sequence=3)
    assert not any("state" in path for path in parcel_shapes(stream(plan, 1).spec, plan, 4, {}))
    shapes = parcel_shapes(stream(plan, 1).spec, plan, 4, STATE)
    assert shapes["state/core/h"] == ((most_items(plan, 4), 2), "float32")
