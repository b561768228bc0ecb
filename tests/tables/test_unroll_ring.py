"""Replayed unrolls: as many as the proportion says, drawn uniformly from earlier batches, from copies of their own."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support_unrolls import B, Source, codes, steps_of, unroll

from rookery.core.types import Arrays
from rookery.tables.batch import Batcher, Load
from rookery.tables.queue import LagQueue, RoundQueue
from rookery.tables.unroll_ring import UnrollRing


def of(drawn: list[Arrays]) -> list[int]:
    return [int(arrays["lane"][0]) // 1000 for arrays in drawn]


def kept(ring: UnrollRing) -> list[list[int]]:
    """Codes of what is kept, by shard, the oldest first."""
    return [of(list(shard)) for shard in ring._shards]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([0.0, 0.1, 0.25, 1.0, 1.5, 2.6]), st.integers(1, 4), st.integers(1, 30), st.integers(1, 3),
    st.integers(0, 99),
)  # fmt: skip
def test_what_a_ring_gives_and_keeps(proportion, batch, slots, shards, seed):
    """P50, against a plain list: the mean proportion, all from the ring, never the new ones, the oldest out first."""
    slots = max(slots, shards)
    ring, source, model = UnrollRing(slots, proportion, seed, shards), Source(), [[] for _ in range(shards)]
    owed = 0.0
    for _ in range(40):
        deliveries = [source(actor) for actor in range(batch)]
        here = [code for shard in model for code in shard]
        drawn = of(ring.mixed_with(deliveries))
        owed += proportion * batch
        assert len(drawn) == min(int(owed + 1e-9), len(here)) or len(drawn) == min(int(owed - 1e-9), len(here))
        owed %= 1.0
        assert len(set(drawn)) == len(drawn) and set(drawn) <= set(here), "no unroll twice, none that is not kept"
        assert not set(drawn) & {delivery.sequence for delivery in deliveries}
        for delivery in deliveries:
            shard = model[delivery.actor % shards]
            shard.append(delivery.sequence)
            del shard[: -(slots // shards)]
        assert kept(ring) == model and len(ring) == sum(map(len, model)) <= slots


def test_one_and_a_half_replayed_unrolls_for_each_new_one():
    ring, source = UnrollRing(16, 1.5, seed=1), Source()
    for _ in range(10):
        ring.mixed_with([source()])
    counts = [len(ring.mixed_with([source()])) for _ in range(400)]
    assert sum(counts) == 600 and set(counts) == {1, 2}, "as even as whole unrolls allow"


def test_what_an_empty_ring_could_not_give_is_not_made_up_for():
    ring, source = UnrollRing(16, 4.0, seed=1), Source()
    assert [len(ring.mixed_with([source()])) for _ in range(7)] == [0, 1, 2, 3, 4, 4, 4]


def test_draws_are_uniform_over_all_that_is_kept_whatever_the_shard():
    """χ² with 11 degrees of freedom: 31.3 has a probability of 1 in 1000. Actor 0 fills its shard, actor 1 hardly."""
    ring, source = UnrollRing(20, 3.0, seed=5, shards=2), Source()
    for actor in (0,) * 15 + (1,) * 2:
        ring.mixed_with([source(actor)])
    here = [code for shard in kept(ring) for code in shard]
    assert len(here) == 12
    counts = Counter(code for _ in range(4000) for code in of(ring._draw(3)))
    assert counts.keys() == set(here)
    expected = 4000 * 3 / 12
    assert sum((count - expected) ** 2 / expected for count in counts.values()) < 31.3


def test_each_shard_has_its_own_actors_and_loses_its_own_oldest():
    ring, source = UnrollRing(6, 0.0, seed=0, shards=3), Source()
    for actor in (0, 1, 2, 3, 4, 0, 3, 0):
        ring.mixed_with([source(actor)])
    assert kept(ring) == [[6, 7], [1, 4], [2]], "actor 3 shares the ring of actor 0, and 4 that of 1"


@pytest.mark.parametrize("table", [RoundQueue, LagQueue])
def test_a_replayed_unroll_is_a_copy_that_outlives_the_memory_it_came_from(table):
    """Memory is poisoned when it is given back, and a ring lets go of what a batch under way still reads."""
    source, seen = Source(), Counter()
    ring = UnrollRing(3, 1.0, seed=2)
    queue = RoundQueue(1, ring) if table is RoundQueue else LagQueue(1, batch=1, max_lag=1, ring=ring)
    for version in range(30):
        queue.ordered(0, version)
        queue.insert(source(0, version))
        sample = queue.next(version, 0.0)
        new, *replayed = codes(sample)
        assert new == version and sample.versions.tolist() == [version] * B and not source.out
        assert sample.fresh == steps_of(new), "what was trained on before does not count again"
        assert all(version - 3 <= code < version for code in replayed)
        assert (
            sample.batch.replayed is None
            if version == 0
            else sample.batch.replayed.tolist() == [False, False, True, True]
        )
        seen.update(replayed)
        queue.update(sample, None, version + 1)
    assert sum(seen.values()) == 29


def test_what_a_batch_under_way_reads_stays_though_the_ring_goes_on():
    ring, source = UnrollRing(1, 1.0, seed=0), Source()
    ring.mixed_with([source()])
    replayed = ring.mixed_with([source()])
    for _ in range(5):
        ring.mixed_with([source()])
    assert kept(ring) == [[6]]
    assert codes(Batcher().now(Load([source()], replayed, 0))) == [7, 0]


def test_start_states_and_frames_are_kept_as_they_are():
    ring = UnrollRing(1, 1.0, seed=0)
    arrays = unroll(3, version=4, recurrent=True)
    ring.mixed_with([Source()(arrays=arrays)])
    (drawn,) = ring.mixed_with([Source()()])
    expected = unroll(3, version=4, recurrent=True)
    assert drawn.keys() == expected.keys() and drawn["obs/frame"].dtype == np.uint8
    for path, array in expected.items():
        assert not np.shares_memory(drawn[path], arrays[path])
        np.testing.assert_array_equal(drawn[path], array)


def test_the_age_of_what_is_replayed_is_told_as_it_is_when_it_is_trained_on():
    ring, source = UnrollRing(4, 2.0, seed=0), Source()
    empty = {"ring": 0.0, "replayed": 0.0, "replayed_lag_mean": 0.0, "replayed_lag_max": 0.0}
    assert ring.stats() == empty
    queue = LagQueue(1, batch=1, max_lag=1, ring=ring)
    for version in (3, 7, 8):
        queue.ordered(0, version)
        queue.insert(source(0, version))
        queue.update(queue.next(version, 0.0), None, version + 1)
    assert queue.stats() == {
        "late_share": 0.0, "ring": 3.0, "replayed": 2.0, "replayed_lag_mean": (8 - 3 + 8 - 7) / 2,
        "replayed_lag_max": 5.0,
    }  # fmt: skip


def test_the_seed_decides_what_is_drawn():
    def drawn(seed: int) -> list[list[int]]:
        ring, source = UnrollRing(10, 1.5, seed), Source()
        return [of(ring.mixed_with([source(), source()])) for _ in range(20)]

    assert drawn(1) == drawn(1) != drawn(2)
    assert math.isclose(sum(map(len, drawn(1)[5:])), 15 * 3)
