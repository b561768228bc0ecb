"""Frame numbers: every stack is rebuilt exactly, and no frame is kept twice without need."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support_lanes import DISCRETE
from support_stream import DICT, Stream, plan_of, scripts, stream

from rookery.core.errors import CheckpointError
from rookery.core.types import EnvSpec, Leaf
from rookery.tables.frames import ZERO, FrameNumbers, frame_shape, image_leaves, most_frames

exact = settings(deadline=None, derandomize=True)
STACK = Leaf((3, 2, 1), "uint8", "image", stack=3)
EYE = EnvSpec("eye", {"eye": STACK}, DISCRETE)


def frame(value: int) -> np.ndarray:
    return np.full((2, 1), value, np.uint8)


def numbered(
    numbers: FrameNumbers, stacks: list[list[int]], live: list[bool], leaf: Leaf = STACK
) -> tuple[list[list[int]], list[int]]:
    """One lane: stacks by the values of their frames -> numbers of every row, values of the new frames."""
    obs = np.array([[frame(v) for v in stack] for stack in stacks], np.uint8).reshape(len(stacks), 1, *leaf.shape)
    frames = np.full((len(stacks) * leaf.stack, *frame_shape(leaf)), 99, np.uint8)
    out = np.full((len(stacks), 1, leaf.stack), 99, np.int64)
    count = numbers.number(obs, np.array(live)[:, None], frames, out)
    numbers.advance(count)
    assert (frames[count:] == 99).all()
    return out[:, 0].tolist(), frames[:count].reshape(count, -1)[:, 0].tolist()


def test_a_row_brings_its_newest_frame_only():
    numbers = FrameNumbers(STACK, 3, 1)
    rows, new = numbered(numbers, [[0, 0, 7], [0, 7, 8], [7, 8, 9], [8, 9, 9]], [True] * 3)
    assert rows == [[ZERO, ZERO, 0], [ZERO, 0, 1], [0, 1, 2], [1, 2, 3]]
    assert new == [7, 8, 9, 9]


def test_row_0_of_the_next_unroll_is_known():
    numbers = FrameNumbers(STACK, 1, 1)
    numbered(numbers, [[0, 0, 7], [0, 7, 8]], [True])
    assert numbered(numbers, [[0, 7, 8], [7, 8, 9]], [True]) == ([[ZERO, 0, 1], [0, 1, 2]], [9])
    numbers.reset()
    assert numbered(numbers, [[7, 8, 9], [8, 9, 1]], [True]) == ([[0, 1, 2], [1, 2, 3]], [7, 8, 9, 1])


@pytest.mark.parametrize(
    "first, numbers, new",
    [
        ([0, 0, 5], [ZERO, ZERO, 2], [5]),
        ([5, 5, 5], [2, 2, 2], [5]),
        ([0, 5, 5], [ZERO, 2, 2], [5]),
        ([4, 4, 5], [2, 2, 3], [4, 5]),
        ([3, 4, 5], [2, 3, 4], [3, 4, 5]),
        ([5, 4, 5], [2, 3, 4], [5, 4, 5]),
        ([0, 0, 0], [ZERO, ZERO, 2], [0]),
        ([4, 0, 5], [2, ZERO, 3], [4, 5]),
        ([0, 4, 0], [ZERO, 2, 3], [4, 0]),
    ],
)
def test_a_first_stack_keeps_what_is_neither_zero_nor_a_repetition(first: list, numbers: list, new: list):
    """P12: row 0 ends its episode, row 1 is dead, row 2 begins the next one."""
    made = FrameNumbers(STACK, 2, 1)
    rows, frames = numbered(made, [[0, 0, 7], [0, 7, 8], first], [True, False])
    assert rows[2] == numbers and frames == [7, 8, *new]
    following, _ = numbered(made, [first, [*first[1:], 6], [*first[2:], 6, 6]], [True, True])
    assert following[:2] == [numbers, [*numbers[1:], 2 + len(new)]]


def test_an_episode_that_ends_with_an_unroll_begins_anew_in_the_next():
    numbers = FrameNumbers(STACK, 1, 1)
    numbered(numbers, [[0, 0, 7], [0, 7, 8]], [True])
    assert numbered(numbers, [[0, 7, 8], [0, 0, 3]], [False]) == ([[ZERO, 0, 1], [ZERO, ZERO, 2]], [3])


def test_an_image_that_is_no_stack_has_one_number_a_row():
    leaf = Leaf((1, 2, 1), "uint8", "image")
    numbers = FrameNumbers(leaf, 2, 1)
    assert numbered(numbers, [[4], [4], [0]], [True, False], leaf) == ([[0], [1], [2]], [4, 4, 0])
    assert numbered(numbers, [[0], [5], [6]], [True, True], leaf) == ([[2], [3], [4]], [5, 6])


def walk(made: Stream, key: str) -> tuple[list[np.ndarray], np.ndarray, list[int]]:
    """All frames by number, numbers [rows + 1, B, k] of the whole stream, new frames of each unroll."""
    leaf, plan = made.spec.obs[key], made.plan
    numbers = FrameNumbers(leaf, plan.unroll, made.lanes)
    kept, rows, counts = [], [], []
    for unroll in made.unrolls:
        frames = np.full((most_frames(made.spec, plan.unroll, made.lanes), *frame_shape(leaf)), 99, np.uint8)
        out = np.full((plan.unroll + 1, made.lanes, leaf.stack), -9)
        assert numbers.next == len(kept)
        counts.append(numbers.number(unroll.obs[key], unroll.live, frames, out))
        numbers.advance(counts[-1])
        kept += list(frames[: counts[-1]])
        assert not rows or np.array_equal(rows[-1], out[0])
        rows += list(out[1:] if rows else out)
    return kept, np.array(rows), counts


@exact
@given(st.integers(1, 7), scripts(), st.sampled_from(("eye", "map")))
def test_every_stack_is_rebuilt_exactly(unroll: int, script: dict, key: str):
    made = stream(plan_of(unroll), **(script | {"obs": DICT}))
    kept, rows, _ = walk(made, key)
    leaf = made.spec.obs[key]
    memory = np.array([*kept, np.zeros(frame_shape(leaf), np.uint8)])  # ZERO is the last one
    rebuilt = memory[rows].reshape(*rows.shape[:2], *leaf.shape)
    assert np.array_equal(rebuilt, made.rows[f"obs/{key}"])
    assert sorted(set(rows.ravel()) - {ZERO}) == list(range(len(kept)))  # every frame that is kept is used


@exact
@given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 3), st.integers(0, 9))
def test_the_room_for_frames_is_enough_and_no_more(unroll: int, stack: int, lanes: int, seed: int):
    """Episodes of one step that begin with frames nobody has seen."""
    leaf = Leaf((stack, 16), "uint8", "image", stack=stack) if stack > 1 else Leaf((16,), "uint8", "image")
    spec, rng = EnvSpec("eye", {"eye": leaf}, DISCRETE), np.random.default_rng(seed)
    numbers, counts = FrameNumbers(leaf, unroll, lanes), []
    most = most_frames(spec, unroll, lanes)
    for index in range(3):
        obs = rng.integers(1, 255, (unroll + 1, lanes, *leaf.shape), np.uint8)
        live = (np.arange(unroll) + index * unroll) % 2 == 0
        frames, out = np.zeros((most, 16), np.uint8), np.zeros((unroll + 1, lanes, stack), np.int64)
        counts.append(numbers.number(obs, np.repeat(live[:, None], lanes, 1), frames, out))
        numbers.advance(counts[-1])
    assert max(counts) == counts[0] == most


@exact
@given(st.integers(1, 9), st.integers(1, 4), st.booleans(), st.integers(0, 9))
def test_behind_a_cut_row_0_is_new_unless_it_is_dead_and_there_is_room(unroll: int, stack: int, dead: bool, seed: int):
    """Numbers count on; episodes of one step that begin with frames nobody has seen."""
    leaf = Leaf((stack, 16), "uint8", "image", stack=stack) if stack > 1 else Leaf((16,), "uint8", "image")
    rng, numbers = np.random.default_rng(seed), FrameNumbers(leaf, unroll, 2)
    most = most_frames(EnvSpec("eye", {"eye": leaf}, DISCRETE), unroll, 2)
    for before in (0, 5):
        obs = rng.integers(1, 255, (unroll + 1, 2, *leaf.shape), np.uint8)
        live = np.repeat((np.arange(unroll) + (before > 0 and dead))[:, None] % 2 == 0, 2, 1)
        for row in np.flatnonzero(live[:, 0]) + 1:  # within an episode a stack moves on by one frame
            obs[row].reshape(2, stack, 16)[:, :-1] = obs[row - 1].reshape(2, stack, 16)[:, 1:]
        frames, out = np.zeros((most, 16), np.uint8), np.full((unroll + 1, 2, stack), 99)
        count = numbers.number(obs, live, frames, out)
        memory = np.concatenate([frames[:count], np.zeros((1, 16), np.uint8)])
        shown = memory[np.where(out < 0, count, out - numbers.next)].reshape(unroll + 1, 2, *leaf.shape)
        if before and dead:
            assert (out[0] == ZERO).all() and np.array_equal(shown[1:], obs[1:])
        else:
            assert np.array_equal(shown, obs)
        numbers.advance(count)
        numbers.cut()


def test_two_dead_rows_in_a_row_are_no_stream():
    numbers = FrameNumbers(STACK, 4, 1)
    room = most_frames(EYE, 4, 1)
    obs = np.random.default_rng(0).integers(1, 255, (5, 1, *STACK.shape), np.uint8)
    frames, out = np.zeros((room, 2, 1), np.uint8), np.zeros((5, 1, 3), np.int64)
    with pytest.raises(AssertionError, match="dead row"):
        numbers.number(obs, np.zeros((4, 1), bool), frames, out)


def test_in_the_long_run_a_step_costs_one_frame():
    """At most 7.3 kB a transition of Atari: frames and final observations, not stacks."""
    made = stream(plan_of(20), 20, [[100]], lanes=2, obs=DICT)
    kept, rows, counts = walk(made, "eye")
    assert counts[0] <= 20 * 2 + 3 * 2 and set(counts[1:5]) == {40}
    assert len(kept) <= rows[..., 0].size + 2 * 2 * 5  # at each beginning up to two more


def test_state_of_other_lanes_is_refused():
    numbers = FrameNumbers(STACK, 4, 2)
    stored = FrameNumbers(STACK, 4, 1).state()
    with pytest.raises(CheckpointError, match="frame numbers"):
        numbers.load(stored)


def test_image_leaves_and_the_shape_of_their_frames():
    spec = EnvSpec("dict", DICT, DISCRETE)
    assert {key: frame_shape(leaf) for key, leaf in image_leaves(spec).items()} == {"eye": (2, 1), "map": (1, 2, 2)}
