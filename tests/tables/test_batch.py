"""Batches of unrolls: the same as plain concatenation, in memory that is used again, by the caller or by threads."""

from __future__ import annotations

import sys
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support_unrolls import POISON, B, ByHand, Source, by_hand, codes, steps_of, unroll

from rookery.core.types import Arrays, Delivery, Sample
from rookery.tables import batch as batch_module
from rookery.tables.batch import FLAT, Batcher, Load, load_of
from rookery.tables.unroll_ring import UnrollRing

PATIENCE = 20.0  # seconds for a thread that works; only a thread that hangs needs them


def load(*made: int, source: Source | None = None) -> Load:
    source = source or Source()
    deliveries = []
    for code in made:
        source.made = code
        deliveries.append(source(code))
    return load_of(deliveries, None)


def loaders() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("loader-")}


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = loaders()
    yield
    for thread in loaders() - before:  # it was told to end; on a busy machine that may take a while
        thread.join(PATIENCE)
    assert loaders() <= before


def taken(batcher: Batcher) -> Sample:
    """The next batch of the threads; the wait is theirs, in the loader's own queue."""
    while (loaded := batcher.take()) is None:
        made = batcher._loader.get(PATIENCE)
        assert made is not None, "no batch in time"
        batcher._made_ahead.append(made)
    return loaded.sample


def same(batch, arrays: Arrays) -> None:
    """A batch against arrays by path; types count."""
    flat = {f"obs/{key}": leaf for key, leaf in batch.obs.items()} | {"state0/core/h": batch.state0}
    for path, array in arrays.items():
        leaf = flat.get(path, getattr(batch, path, None))
        leaf = leaf["core"]["h"] if isinstance(leaf, dict) else leaf
        assert leaf.dtype == torch.from_numpy(array).dtype, path
        np.testing.assert_array_equal(leaf.numpy(), array, err_msg=path)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(0, 3), st.booleans(), st.integers(0, 3))
def test_a_batch_is_what_plain_concatenation_gives(lanes, new, replayed, recurrent, reused):
    """Also where the memory has held batches of other sizes before."""
    batcher = Batcher()
    for earlier in range(reused):
        sample = batcher.now(Load([Source(lanes=1 + earlier)()] * (1 + earlier), (), 0))
        batcher.give_back(sample.keys)
    parts = [unroll(code, 5 * code, lanes, recurrent) for code in range(new + replayed)]
    deliveries = [Source()(code, arrays=part) for code, part in enumerate(parts[:new])]
    batch, versions, fresh, _ = batcher.now(Load(deliveries, parts[new:], 77))
    expected = {path: np.concatenate([part[path] for part in parts], 0 if path in FLAT else 1) for path in parts[0]}
    same(batch, expected)
    assert batch.obs["frame"].dtype == torch.uint8 and (batch.state0 != {}) == recurrent
    assert fresh == 77 and versions.tolist() == [5 * code for code in range(new) for _ in range(lanes)]
    if replayed:
        assert batch.replayed.tolist() == [False] * (new * lanes) + [True] * (replayed * lanes)
    else:
        assert batch.replayed is None, "everything is new"


def test_a_load_counts_the_live_steps_of_the_new_unrolls_only():
    ring, source = UnrollRing(8, 1.0, seed=0), Source()
    load_of([source(0), source(1)], ring)
    second = load_of([source(0), source(1), source(0)], ring)
    assert second.steps == steps_of(2, 3, 4) and len(second.replayed) == 2


def test_memory_is_used_again_once_it_was_given_back_and_not_before():
    batcher = Batcher()
    first = batcher.now(load(1))
    second = batcher.now(load(2))
    assert codes(first) == [1] and codes(second) == [2], "the first is still being trained on"
    assert not np.shares_memory(first.batch.reward.numpy(), second.batch.reward.numpy())
    batcher.give_back(first.keys)
    third = batcher.now(Load([Source()(0, version=9, arrays=unroll(3, 9))], (), 0))
    assert third.versions.tolist() == [9] * B and first.versions.tolist() == [0] * B, "versions are not of that memory"
    assert np.shares_memory(first.batch.reward.numpy(), third.batch.reward.numpy())
    assert codes(third) == [3] and codes(second) == [2]
    batcher.give_back(second.keys)
    batcher.give_back(third.keys)
    memory = {batcher.now(load(code)).batch.obs["frame"].data_ptr() for code in (4, 5)}
    assert memory == {each.batch.obs["frame"].data_ptr() for each in (second, third)}


def test_a_batch_does_not_look_at_the_unrolls_any_more_once_they_were_given_back():
    batcher, source = Batcher(), Source()
    whole = load(0, 1, 2, source=source)
    sample = batcher.now(whole)
    for delivery in whole.deliveries:
        delivery.release()
    assert all((delivery.arrays["reward"] == POISON).all() for delivery in whole.deliveries)
    assert codes(sample) == [0, 1, 2] and sample.versions.tolist() == [0] * (3 * B)


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_make_the_same_batches_in_the_order_in_which_they_were_started(threads):
    batcher, plain = Batcher(threads, buffers=3), Batcher()
    loads = [load(code, code + 1) for code in range(0, 40, 2)]
    coming = iter(loads)
    for expected in loads:
        while batcher.room and (begun := next(coming, None)) is not None:
            batcher.start(begun)
        sample, same_one = taken(batcher), plain.now(expected)
        same(sample.batch, {path: np.array(array) for path, array in same_one.keys.items()})
        assert codes(sample) == codes(same_one)
        batcher.give_back(sample.keys)
        plain.give_back(same_one.keys)
    assert not batcher.under_way and not batcher.ready
    batcher.close()


def test_a_batch_that_is_finished_early_waits_for_those_before_it(monkeypatch):
    by_hand(monkeypatch)
    batcher = Batcher(threads=2, buffers=2)
    batcher.start(load(1))
    batcher.start(load(2))
    assert not batcher.room and len(batcher.under_way) == 2
    hand: ByHand = batcher._loader
    hand.begin()
    hand.begin()
    hand.finish(1)
    assert not batcher.ready and batcher.take() is None
    hand.finish(0)
    assert batcher.ready
    assert [codes(batcher.take().sample) for _ in range(2)] == [[1], [2]]
    assert batcher.take() is None and not batcher.under_way and not batcher.ready


class Held(dict):
    """Arrays of an unroll that let nobody read them before they are told to."""

    def __init__(self, arrays: Arrays):
        super().__init__(arrays)
        self.reached, self.go_on = threading.Event(), threading.Event()

    def __getitem__(self, path: str) -> np.ndarray:
        if path == "logp":  # in the middle of the batch
            self.reached.set()
            assert self.go_on.wait(PATIENCE)
        return super().__getitem__(path)


def test_a_batch_under_way_is_not_torn_when_other_memory_is_given_back():
    batcher, source = Batcher(threads=1, buffers=2), Source()
    batcher.start(load(7))
    first = taken(batcher)
    held = Held(unroll(2))
    slow = Load([source(0), source(1), Delivery(2, 2, held, None, lambda: None)], (), 0)
    batcher.start(slow)
    assert held.reached.wait(PATIENCE)
    assert not batcher.room and batcher.take() is None
    batcher.give_back(first.keys)
    other = batcher.now(load(4))
    assert np.shares_memory(other.batch.reward.numpy(), first.batch.reward.numpy())
    held.go_on.set()
    assert codes(taken(batcher)) == [0, 1, 2] and codes(other) == [4]
    batcher.close()


def test_closing_ends_the_threads_also_in_the_middle_of_their_work():
    batcher = Batcher(threads=3, buffers=4)
    before = loaders()
    batcher.close()
    for code in range(3):
        batcher.start(load(code))
    started = loaders() - before
    assert len(started) == 3
    batcher.close()
    for thread in started:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    batcher.close()


def test_a_thread_whose_work_was_taken_by_another_one_still_ends(monkeypatch):
    """It is woken, finds nothing, and its time is over: the moment in which `queue.SimpleQueue` waits for ever."""
    monkeypatch.setattr(batch_module, "WAIT", 0.01)
    batcher = Batcher(threads=1, buffers=2)
    batcher.start(load(1))
    taken(batcher)
    (thread,) = batcher._loader._threads
    interval = sys.getswitchinterval()
    sys.setswitchinterval(10.0)  # it is woken, and runs only when we let it
    try:
        for _ in range(5):
            batcher._inbox.put((load(2), {}))
            batcher._inbox.get_nowait()
            until = time.monotonic() + 3 * batch_module.WAIT
            while time.monotonic() < until:
                pass
            time.sleep(0)  # now
    finally:
        sys.setswitchinterval(interval)
    batcher.close()
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_an_error_in_a_thread_reaches_the_caller():
    batcher = Batcher(threads=1, buffers=2)
    broken = unroll(1)
    del broken["logp"]
    batcher.start(Load([Source()(0), Delivery(1, 0, broken, None, lambda: None)], (), 0))
    for thread in loaders():
        thread.join(PATIENCE)
    with pytest.raises(KeyError, match="logp"):
        batcher.take()
    with pytest.raises(KeyError, match="logp"):
        batcher.close()


def test_no_more_batches_are_under_way_than_there_are_buffers():
    batcher = Batcher(threads=2, buffers=3)
    started = 0
    while batcher.room and started < 9:
        batcher.start(load(started))
        started += 1
    assert started == 3 == len(batcher.under_way)
    samples = [taken(batcher) for _ in range(3)]
    assert len({sample.batch.reward.data_ptr() for sample in samples}) == 3
    assert [codes(sample) for sample in samples] == [[0], [1], [2]]
    batcher.close()


def test_without_threads_there_is_never_room_ahead():
    assert not Batcher(threads=0, buffers=4).room
