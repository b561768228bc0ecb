"""Rings of frames: numbers of actors, rows, what is gone and who needs it; memory that has one holder at a time."""

from __future__ import annotations

import tracemalloc
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rookery.core.errors import CheckpointError
from rookery.tables.ring import NEVER, FrameRing, PackedRing, Pool, Watch, runs


def test_the_zero_frame_is_number_minus_one_and_stays_zero():
    ring = FrameRing("x", 4, (2, 2), reach=4)
    for round in range(5):
        ring.write(np.full((3, 2, 2), 9, np.uint8), 0, 3 * round, None)
    rows, oldest = ring.locate(0, np.array([[-1, -1], [-1, 14]]))
    (frames,) = ring.gather([rows])
    assert frames[0].max() == 0 and frames[1, 0].max() == 0 and frames[1, 1].min() == 9
    assert oldest.tolist() == [NEVER, 14]


def test_a_ring_knows_the_frames_of_each_actor_by_the_numbers_that_actor_gave_them():
    ring = FrameRing("x", 20, (1,), reach=9)
    written = {0: [], 1: []}
    for value, (actor, count) in enumerate([(0, 3), (1, 2), (1, 3), (0, 1), (1, 4), (0, 2)]):
        frames = np.arange(count, dtype=np.uint8)[:, None] + 10 * value
        ring.write(frames, actor, len(written[actor]), None)
        written[actor].extend(frames[:, 0].tolist())
    for actor, values in written.items():
        rows, _ = ring.locate(actor, np.arange(len(values))[None])
        assert ring.gather([rows])[0][0, :, 0].tolist() == values


def test_frames_that_are_gone_are_known_to_be_gone():
    ring = FrameRing("x", 6, (1,), reach=9)
    for actor, first, count in [(0, 0, 3), (1, 0, 2), (0, 3, 3)]:
        ring.write(np.zeros((count, 1), np.uint8), actor, first, None)
    # 8 came, 6 are here: numbers 0 and 1 of actor 0 are gone
    _, oldest = ring.locate(0, np.array([[1, 5], [0, -1], [2, 5], [5, 3]]))
    assert oldest.tolist() == [-1, -1, 2, 5]
    _, oldest = ring.locate(1, np.array([[0], [1]]))
    assert oldest.tolist() == [3, 4]


def test_a_new_life_of_an_actor_numbers_from_zero_and_has_to_be_announced():
    ring = FrameRing("x", 9, (1,), reach=2)
    ring.write(np.full((4, 1), 1, np.uint8), 3, 0, None)
    with pytest.raises(ValueError, match=r"actor 3 numbers its frames from 0 on, and 4 was due.*forget"):
        ring.write(np.full((1, 1), 2, np.uint8), 3, 0, None)
    ring.forget(3)
    ring.forget(8)  # one that was never heard of
    with pytest.raises(ValueError, match="actor 3"):
        ring.locate(3, np.array([[0]]))  # of the former life
    ring.write(np.full((2, 1), 2, np.uint8), 3, 0, None)
    rows, oldest = ring.locate(3, np.array([[0, 1]]))
    assert ring.gather([rows])[0].ravel().tolist() == [2, 2] and oldest.tolist() == [4]


@pytest.mark.parametrize("number", [-2, 4, 1000])
def test_a_frame_that_was_never_sent_is_an_error(number):
    ring = FrameRing("x", 9, (1,), reach=2)
    ring.write(np.zeros((4, 1), np.uint8), 0, 0, None)
    with pytest.raises(ValueError, match="items of actor 0 refer to frames"):
        ring.locate(0, np.array([[2, number]]))


def test_an_actor_that_takes_turns_with_many_is_still_known_by_few_parcels():
    """The list of late parcels stays short, and covers what items may reach back to: one row a parcel at least."""
    ring = FrameRing("x", 1000, (1,), reach=5)
    for turn in range(40):
        for actor in range(3):
            ring.write(np.full((2, 1), turn, np.uint8), actor, 2 * turn, None)
    assert max(len(spans) for spans in ring._spans.values()) <= 9
    rows, oldest = ring.locate(1, np.arange(2 * 35, 2 * 40)[None])
    assert ring.gather([rows])[0].ravel().tolist() == [turn for turn in range(35, 40) for _ in range(2)]
    assert oldest[0] == 35 * 6 + 2


@given(st.integers(1, 9), st.integers(0, 8), st.data())
def test_runs_cover_a_ring_in_order(rows, first, data):
    first %= rows
    count = data.draw(st.integers(0, rows))
    where = [row for _, there in runs(first, count, rows) for row in range(there.start, there.stop)]
    what = [row for here, _ in runs(first, count, rows) for row in range(here.start, here.stop)]
    assert where == [(first + n) % rows for n in range(count)] and what == list(range(count))


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 200)), max_size=30), st.lists(st.integers(0, 60)))
def test_the_watch_names_every_group_that_may_be_short_once(adds, lows):
    watch, first, due, lows = Watch(), 0, {}, iter(lows)
    for oldest, count in adds:
        watch.add(oldest, first, count)
        due |= dict.fromkeys(range(first, first + count), oldest)
        first += count
        low = next(lows, None)
        if low is not None:
            named = [item for begin, many in watch.overdue(low) for item in range(begin, begin + many)]
            assert len(named) == len(set(named)) and {i for i, oldest in due.items() if oldest < low} <= set(named)
            for item in named:
                del due[item]
    named = [item for begin, many in watch.overdue(NEVER) for item in range(begin, begin + many)]
    assert sorted(named) == sorted(due), "what was never named is still watched"


def test_the_watch_stays_small_however_small_the_parcels():
    watch = Watch()
    for item in range(100_000):
        watch.add(item, item, 1)
    assert len(watch.state()) < 500


HOLDERS = {
    "array": lambda array: array,
    "view": lambda array: array[1:].reshape(2, 9),
    "another type": lambda array: array.view(np.float16),
    "tensor": lambda array: torch.from_numpy(array.reshape(2, 12))[1:, 3:],
    "array of a tensor": lambda array: torch.from_numpy(array).numpy()[2:],
    "buffer": memoryview,
    "iterator": iter,
}


@pytest.mark.parametrize("kind", HOLDERS)
def test_a_pool_gives_an_array_to_one_holder_at_a_time(kind):
    pool = Pool()
    held = HOLDERS[kind](pool.array(4, 6))
    second = pool.array(4, 6)
    second[...] = 1
    assert len(pool._arrays) == 2 and second is pool._arrays[1]
    del second
    assert pool.array(4, 6) is pool._arrays[1], "free again; the first one is not"
    del held
    third = pool.array(4, 6)
    assert third is pool._arrays[0] and pool.array(4, 6) is pool._arrays[1] and len(pool._arrays) == 2
    assert pool.array(5, 6).shape == (5, 6)


def test_frames_of_a_batch_stay_while_any_part_of_it_is_held():
    ring = FrameRing("x", 9, (2, 2), reach=4)
    ring.write(np.arange(36, dtype=np.uint8).reshape(9, 2, 2), 0, 0, None)
    rows, _ = ring.locate(0, np.array([[3, 4], [8, 8]]))
    (batch,) = ring.gather([rows])
    part = torch.from_numpy(batch)[1, :, 0]
    del batch
    for _ in range(3):
        ring.gather([np.zeros_like(rows)])
    assert part.tolist() == [[32, 33], [32, 33]]


def packed_ones(stored: bytes) -> tuple[PackedRing, np.ndarray]:
    """A ring that has a frame replaced, and the rows of two stacks that need it."""
    ring = PackedRing("x", 5, (10, 10), reach=4)
    ring.write(np.ones((3, 10, 10), np.uint8), 0, 0, None)
    ring.packed[1:2] = [stored]
    return ring, ring.locate(0, np.array([[1, 1]]))[0]


@pytest.mark.parametrize("stored", [b"", b"no zlib", zlib.compress(bytes(99)), zlib.compress(bytes(100))[:-6]])
def test_a_damaged_compressed_frame_is_a_clean_error(stored):
    ring, rows = packed_ones(stored)
    with pytest.raises(CheckpointError, match=r"row 1.*Remove the run's replay folder"):
        ring.gather([rows])


def test_a_compressed_frame_takes_no_more_memory_than_a_frame_has():
    ring, rows = packed_ones(zlib.compress(bytes(50_000_000)))
    tracemalloc.start()
    try:
        ring.gather([rows])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_compressed_frames_of_every_kind():
    rng = np.random.default_rng(0)
    ring = PackedRing("x", 5, (84, 84), reach=4)
    frames = np.stack([
        rng.integers(0, 256, (84, 84)), np.full((84, 84), 255), np.eye(84) * 200, np.zeros((84, 84)),
    ]).astype(np.uint8)  # fmt: skip
    ring.write(frames, 0, 0, None)
    ring.write(frames[::-1, ::-1, ::2].repeat(2, axis=2), 0, 4, None)  # not contiguous
    rows, _ = ring.locate(0, np.array([[3, 4, 5, 6, 7, -1, -1, 7]]))
    (out,) = ring.gather([rows])
    again = frames[::-1, ::-1, ::2].repeat(2, axis=2)
    np.testing.assert_array_equal(out[0], np.concatenate([frames[3:], again, np.zeros((2, 84, 84)), again[3:]]))
    assert sum(map(len, ring.packed)) < 3 * frames[0].nbytes and zlib.decompress(ring.packed[3]) == frames[3].tobytes()
