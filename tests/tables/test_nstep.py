"""n-step transitions against sums by hand: every live row once, none across an end, and truncation still counts on."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support_stream import (
    DICT,
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
from rookery.core.types import DataPlan
from rookery.tables.nstep import NStepBuilder, most_items

exact = settings(deadline=None, derandomize=True)
PLANS = st.builds(plan_of, unroll=st.integers(1, 7), extras=st.booleans(), n_step=st.integers(1, 5))


def expected(made: Stream) -> list[list[dict]]:
    """The items of each parcel by the definition (spec §1.2), row by row."""
    rows, n, gamma = made.rows, made.plan.table.n_step, made.plan.table.gamma
    found: list[tuple[int, int, int, dict]] = []
    for lane, first, length, ended in made.episodes():
        stop = first + length
        for row in range(first, stop):
            m = min(n, stop - row)
            if m < n and not ended:
                continue
            total = 0.0
            for k in range(m):
                total += gamma**k * float(rows["reward"][row + k, lane])
            terminated = rows["terminated"][row + m - 1, lane]
            item = {
                "action": rows["action"][row, lane],
                "reward": np.float32(total),
                "discount": np.float32(0.0 if terminated else gamma**m),
                "version": rows["version"][row, lane],
            }
            for key in made.spec.obs:
                item[f"obs/{key}"], item[f"next_obs/{key}"] = (rows[f"obs/{key}"][at, lane] for at in (row, row + m))
            for name in made.plan.extras:
                column = rows[f"extras/{name}"][:, lane]
                item[name], item[f"next_{name}"] = column[row], column[row + m] if row + m < len(column) else None
            found.append((made.seen(row + m), row, lane, item))
    found.sort(key=lambda item: item[:3])
    return [[item for index, *_, item in found if index == unroll] for unroll in range(len(made.unrolls))]


def check(made: Stream, got: list[dict], names: tuple[str, ...] = (), frames: Frames | None = None) -> None:
    frames = frames or Frames(made.spec)
    for items, each in zip(expected(made), got, strict=True):
        frames.take(each)
        assert each["count"][0] == len(items)
        assert (each["steps"] == 1).all()
        for path in [path for path in each if path in (items or [{}])[0] or path in names]:
            key = path.split("/")[1] if "obs/" in path else ""
            column = frames.seen(key, each[path])
            want = np.array([item[path] for item in items], column.dtype)
            assert np.array_equal(column, want), path


@exact
@given(PLANS, scripts())
def test_items_are_those_of_the_definition(plan: DataPlan, script: dict):
    made = stream(plan, **script)
    got = parcels(made)
    check(made, got)
    assert all(np.isnan(each["priority"]).all() for each in got)


@exact
@given(PLANS, scripts())
def test_every_live_step_is_in_one_item_or_pending(plan: DataPlan, script: dict):
    made = stream(plan, **script)
    builder, carried = builder_of(made), 0
    for index, unroll in enumerate(made.unrolls):
        carried += int(parcel(made, builder, unroll)["steps"].sum())
        assert carried + builder.pending == steps_in(made, index + 1)
        assert builder.pending <= made.lanes * (plan.table.n_step - (not plan.extras))


@exact
@given(PLANS, scripts(), st.data())
def test_a_builder_goes_on_from_its_state(plan: DataPlan, script: dict, data: st.DataObject):
    made = stream(plan, **script)
    whole = parcels(made)
    cut = data.draw(st.integers(0, len(whole)))
    first, second = builder_of(made), builder_of(made)
    for unroll in made.unrolls[:cut]:
        parcel(made, first, unroll)
    state = first.state()
    stored = tree.unflatten(tree.map(np.copy, tree.flatten(state)))  # as a checkpoint may hold it
    for unroll in made.unrolls[cut:]:
        parcel(made, first, unroll)  # what was handed out does not change behind the back of who has it
    assert same(tree.flatten(state), tree.flatten(stored))
    if made.unrolls[:cut]:
        second.build(made.unroll(0), poisoned(made))  # whatever it saw before is gone
    second.load(stored)
    rest = [parcel(made, second, unroll) for unroll in made.unrolls[cut:]]
    assert all(same(a, b) for a, b in zip(rest, whole[cut:], strict=True))
    assert second.pending == first.pending


@exact
@given(PLANS, scripts())
def test_after_a_reset_a_builder_is_as_new(plan: DataPlan, script: dict):
    made = stream(plan, **script)
    builder = builder_of(made)
    whole = parcels(made, builder=builder)
    builder.reset()
    assert builder.pending == 0
    assert all(same(a, b) for a, b in zip(parcels(made, builder=builder), whole, strict=True))


@exact
@given(PLANS, scripts(), st.integers(0, 5), st.integers(0, 20))
def test_nothing_is_built_across_a_cut(plan: DataPlan, script: dict, unrolls: int, lost: int):
    made = stream(plan, **(script | {"count": unrolls + 20 // plan.unroll + script["count"] + 1}))
    frames = Frames(made.spec)
    for part, got in cut_in_two(made, unrolls, lost, builder_of(made)):
        check(part, got, frames=frames)


def golden(ends: str, n: int = 3, extras: bool = False, unroll: int = 6) -> list[tuple]:
    """(reward, discount, step of next_obs) of the items of one episode with rewards 1, 2, 3, 4 and gamma 0.9."""
    made = stream(plan_of(unroll, extras, n_step=n), 6 // unroll, [[4, 9]], [[ends]], lanes=1)
    made.rows["reward"][:4, 0] = 1, 2, 3, 4
    got = parcels(made)
    columns = [np.concatenate([each[path] for each in got]) for path in ("reward", "discount", "next_obs/obs")]
    return [(r, d, int(o[2])) for r, d, o in zip(*columns) if o[1] == 0]


@pytest.mark.parametrize("unroll", [1, 2, 3, 6])
@pytest.mark.parametrize("extras", [False, True])
def test_golden_vectors_of_an_episode_of_four(unroll: int, extras: bool):
    """N1, N2 of the spec; P6, P7: as many items as steps, short tails have the power of their own length."""
    n1 = [(5.23, 0.729, 3), (7.94, 0, 4), (6.6, 0, 4), (4, 0, 4)]
    n2 = [(5.23, 0.729, 3), (7.94, 0.729, 4), (6.6, 0.81, 4), (4, 0.9, 4)]
    for ends, wanted in (("terminated", n1), ("both", n1), ("truncated", n2)):
        items = golden(ends, extras=extras, unroll=unroll)
        assert len(items) == 4
        np.testing.assert_allclose(items, wanted, rtol=1e-6)


def test_a_value_of_one_without_rewards_gives_the_discount_itself():
    """P8: gamma^n is in the item, and nowhere else."""
    made = stream(plan_of(8, n_step=3), 1, [[20]], lanes=1)
    made.rows["reward"][:] = 0
    (got,) = parcels(made)
    assert (got["reward"] + got["discount"] * 1.0 == np.float32(0.9**3)).all()


def test_sums_are_rounded_once():
    """1 + 2^-24 + 2^-24 is 1 in float32 steps, and 1 + 2^-23 if summed exactly."""
    made = stream(plan_of(3, n_step=3, gamma=1.0), 1, [[9]], lanes=1)
    made.rows["reward"][:, 0] = 1, 2**-24, 2**-24
    assert parcels(made)[0]["reward"].tolist() == [1 + 2**-23]


@pytest.mark.parametrize("unroll", [1, 2, 3, 6])
def test_no_item_mixes_episodes_and_dead_rows_make_none(unroll: int):
    """P4, with every kind of end and episodes of one step."""
    made = stream(plan_of(unroll, n_step=3), 48 // unroll, obs=DICT)
    got = parcels(made)
    assert sum(each["count"][0] for each in got) > 100
    for each in got:
        obs, after = each["obs/obs"], each["next_obs/obs"]
        assert np.array_equal(obs[:, :2], after[:, :2])  # lane and episode
        assert ((after - obs)[:, 2] >= 1).all() and ((after - obs)[:, 2] <= 3).all()


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("extras", [False, True])
def test_the_room_for_items_is_enough_and_no_more(n: int, extras: bool):
    """n - 1 rows wait, an unroll of live rows comes, and the episode ends with it: all of them complete."""
    most = []
    for length in range(1, 25):
        made = stream(plan_of(6, extras, n_step=n), 4, [[length]], lanes=2)
        most.append(max(int(each["count"][0]) for each in parcels(made)))
    assert max(most) == most_items(plan_of(6, extras, n_step=n), 2)


@exact
@given(st.integers(1, 7), st.integers(1, 5), st.booleans())
def test_episodes_of_one_step_everywhere(unroll: int, n: int, extras: bool):
    made = stream(plan_of(unroll, extras, n_step=n), 5, [[1]], lanes=2, obs=DICT)
    check(made, parcels(made))


def test_start_priorities_see_the_items_and_what_the_policy_said_of_them():
    seen: list[dict] = []

    def priorities(items: dict[str, np.ndarray]) -> np.ndarray:
        seen.append({path: column.copy() for path, column in items.items()})
        return np.abs(items["reward"] + items["discount"] * items["next_q_max"][:, 0] - items["q"])

    made = stream(plan_of(5, extras=True, start="actor", n_step=3), 6, obs=DICT)
    got = parcels(made, priorities)
    names = ("q", "q_max", "next_q", "next_q_max")
    calls = iter(seen)
    merged = [each | (next(calls) if each["count"][0] else {}) for each in got]
    check(made, merged, names)
    for each in merged:
        if each["count"][0]:
            want = np.abs(each["reward"] + each["discount"] * each["next_q_max"][:, 0] - each["q"])
            assert same(each["priority"], want)
    assert "frames/eye" not in seen[0] and "priority" not in seen[0] and "count" not in seen[0]


def test_without_an_opinion_the_priority_is_the_largest_so_far():
    made = stream(plan_of(5, extras=True, start="actor", n_step=2), 2)
    assert all(np.isnan(each["priority"]).all() for each in parcels(made, lambda items: None))
    calls: list[dict] = []
    made = stream(plan_of(5, extras=True, start="max", n_step=2), 2)
    assert all(np.isnan(each["priority"]).all() for each in parcels(made, calls.append))
    assert not calls


def test_items_wait_for_the_policy_only_where_it_has_something_to_say():
    """Without extras the last row of an unroll becomes an item at once: its successor is the unroll's row T."""
    for extras, items in ((False, 4), (True, 3)):
        made = stream(plan_of(4, extras, n_step=1), 1, [[9]], lanes=1)
        assert parcels(made)[0]["count"][0] == items


def test_a_span_below_one_is_refused():
    made = stream(plan_of(4), 1)
    with pytest.raises(ValueError, match="n_step 0"):
        NStepBuilder(made.spec, plan_of(4, n_step=0), 4, None)
