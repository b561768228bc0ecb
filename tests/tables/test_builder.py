"""Parcels: their shapes, who builds them, and what they cost to send."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support_lanes import MULTI
from support_stream import DICT, STATE, VECTOR, Frames, builder_of, parcels, plan_of, same, scripts, stream

from rookery.core import tree
from rookery.core.errors import CheckpointError
from rookery.core.types import EnvSpec, Leaf
from rookery.storage.codec import decode_tree, encode_tree
from rookery.tables.builder import make_builder, parcel_shapes
from rookery.tables.nstep import NStepBuilder
from rookery.tables.sequence import SequenceBuilder

SPEC = EnvSpec("dict", DICT, MULTI)


def test_the_plan_says_which_builder():
    assert isinstance(make_builder(SPEC, plan_of(4), 2), NStepBuilder)
    assert isinstance(make_builder(SPEC, plan_of(4, sequence=3), 2), SequenceBuilder)


def test_shapes_of_transitions():
    """3 lanes, unrolls of 4, 2 steps: 15 items; 3 first stacks of 3 frames and 2 single frames a lane."""
    assert parcel_shapes(SPEC, plan_of(4, n_step=2), 3, {}) == {
        "count": ((2,), "int64"),
        "obs/obs": ((15, 3), "float32"),
        "obs/mode": ((15,), "int64"),
        "obs/eye": ((15, 3), "int64"),
        "obs/map": ((15, 1), "int64"),
        "action": ((15, 2), "int64"),
        "reward": ((15,), "float32"),
        "discount": ((15,), "float32"),
        "next_obs/obs": ((15, 3), "float32"),
        "next_obs/mode": ((15,), "int64"),
        "next_obs/eye": ((15, 3), "int64"),
        "next_obs/map": ((15, 1), "int64"),
        "version": ((15,), "int64"),
        "steps": ((15,), "int32"),
        "priority": ((15,), "float32"),
        "frames/eye": ((33, 2, 1), "uint8"),
        "first_frame/eye": ((1,), "int64"),
        "frames/map": ((33, 1, 2, 2), "uint8"),
        "first_frame/map": ((1,), "int64"),
    }


def test_shapes_of_sequences():
    assert parcel_shapes(SPEC, plan_of(4, sequence=3, burn_in=2, overlap=1), 2, STATE) == {
        "count": ((2,), "int64"),
        "obs/obs": ((6, 6, 3), "float32"),
        "obs/mode": ((6, 6), "int64"),
        "obs/eye": ((6, 6, 3), "int64"),
        "obs/map": ((6, 6, 1), "int64"),
        "action": ((6, 5, 2), "int64"),
        "reward": ((6, 5), "float32"),
        "terminated": ((6, 5), "bool"),
        "truncated": ((6, 5), "bool"),
        "live": ((6, 5), "bool"),
        "state/core/h": ((6, 2), "float32"),
        "state/noise": ((6, 1), "float32"),
        "version": ((6,), "int64"),
        "steps": ((6,), "int32"),
        "priority": ((6,), "float32"),
        "frames/eye": ((22, 2, 1), "uint8"),
        "first_frame/eye": ((1,), "int64"),
        "frames/map": ((22, 1, 2, 2), "uint8"),
        "first_frame/map": ((1,), "int64"),
    }


def test_without_images_there_are_no_frames():
    for plan in (plan_of(4), plan_of(4, sequence=3)):
        made = stream(plan, 3, obs=VECTOR)
        assert not any("frame" in path for path in parcel_shapes(made.spec, plan, 4, {}))
        assert all(each["count"][1] == 0 for each in parcels(made))


@pytest.mark.parametrize("table", [{"n_step": 3}, {"sequence": 3, "burn_in": 2}])
def test_leaves_that_bring_different_numbers_of_frames_keep_step(table: dict):
    """A parcel has one count: `Frames.take` fails where a leaf's numbers have a gap to it."""
    made = stream(plan_of(5, **table), 12, obs=DICT)
    frames, uneven = Frames(made.spec), 0
    for each in parcels(made):
        frames.take(each)
        assert each["first_frame/eye"][0] == each["first_frame/map"][0]
        uneven += not each["frames/map"][-1].any()
    assert uneven > 3
    assert len(frames.kept["eye"]) == len(frames.kept["map"])


@pytest.mark.parametrize("table", [{"n_step": 3}, {"sequence": 3, "burn_in": 2}])
def test_a_parcel_may_lie_in_the_same_memory_each_time(table: dict):
    made = stream(plan_of(5, **table), 6, obs=DICT, recurrent=True)
    shapes = parcel_shapes(made.spec, made.plan, made.lanes, STATE)
    slot = {path: np.zeros(*shape) for path, shape in shapes.items()}
    builder = builder_of(made)
    for unroll, want in zip(made.unrolls, parcels(made), strict=True):
        builder.build(unroll, slot)
        assert all(array[: len(want[path])].tobytes() == want[path].tobytes() for path, array in slot.items())


@settings(deadline=None, max_examples=25, derandomize=True)
@given(st.sampled_from(({"n_step": 1}, {"n_step": 4}, {"sequence": 3, "burn_in": 2})), st.booleans(), scripts())
def test_state_survives_a_checkpoint(table: dict, extras: bool, script: dict):
    made = stream(plan_of(3, extras, **table), recurrent=True, **script)
    first, second = builder_of(made), builder_of(made)
    parcels(made, builder=first)
    state = first.state()
    assert all(isinstance(leaf, np.ndarray) for leaf in tree.leaves(state))
    second.load(decode_tree(*encode_tree(state)))
    assert second.pending == first.pending
    assert all(same(a, b) for a, b in zip(parcels(made, builder=second), parcels(made, builder=first), strict=True))


@pytest.mark.parametrize("table", [{"n_step": 3}, {"sequence": 3, "burn_in": 9}])
def test_state_survives_a_checkpoint_behind_a_cut(table: dict):
    made = stream(plan_of(3, **table), 12, [[30], [2]], lanes=2, obs=DICT, recurrent=True)
    first, second = builder_of(made), builder_of(made)
    parcels(made.first(2), builder=first)
    behind = made.behind(7)
    first.cut(behind.age)
    parcels(behind.first(2), builder=first)
    second.load(decode_tree(*encode_tree(first.state())))
    rest = behind.behind(6)
    assert all(same(a, b) for a, b in zip(parcels(rest, builder=second), parcels(rest, builder=first), strict=True))
    assert second.skipped == first.skipped


@pytest.mark.parametrize("table", [{"n_step": 3}, {"sequence": 3, "burn_in": 2}])
def test_state_of_another_run_is_refused(table: dict):
    made, other = (stream(plan_of(5, **table), 1, lanes=lanes) for lanes in (2, 1))
    with pytest.raises(CheckpointError, match="of another run"):
        builder_of(made).load(builder_of(other).state())


def test_float_images_keep_their_type():
    leaf = Leaf((3, 4, 4), "float32", "image")
    shapes = parcel_shapes(EnvSpec("float", {"obs": leaf}, MULTI), plan_of(4), 1, {})
    assert shapes["frames/obs"] == ((5, 3, 4, 4), "float32")
    assert shapes["obs/obs"] == ((4, 1), "int64")
