"""The limiter: exact at the start, within its band ever after, and never a deadlock."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.tables.limiter import Limiter


def filled(limiter: Limiter, inserted: int, sampled: int = 0) -> Limiter:
    limiter.inserted(inserted)
    limiter.sampled(sampled)
    return limiter


def test_warm_up_is_counted_in_items():
    """P63: not at 49,999, but at 50,000."""
    limiter = Limiter(min_size=50_000, batch=512, samples_per_insert=8)
    limiter.inserted(49_999)
    assert not limiter.can_sample(49_999)
    limiter.inserted(1)
    assert limiter.can_sample(50_000)


@pytest.mark.parametrize("batch, ratio", [(32, 8.0), (32, 1.0), (512, 4.0), (32, 0.25), (3, 7.0)])
def test_one_update_at_min_size_then_one_per_batch_over_ratio_items(batch, ratio):
    limiter, updates = Limiter(100, batch, ratio), []
    for size in range(1, 1000):
        assert limiter.can_insert(size - 1)
        limiter.inserted(1)
        while limiter.can_sample(size):
            limiter.sampled(batch)
            updates.append(size)
    expected = [100 + math.ceil(k * batch / ratio) for k in range(len(updates))]
    assert updates == expected
    assert len(updates) == (999 - 100) * ratio // batch + 1


def test_actors_wait_for_the_learner_one_batch_early():
    """Inserting is refused from the item on that makes a second batch due."""
    limiter = Limiter(100, 32, 8)
    for size in range(100, 105):
        limiter = filled(Limiter(100, 32, 8), size)
        assert limiter.can_insert(size) == (size < 104)
    limiter = filled(Limiter(100, 32, 8), 104, 32)
    assert limiter.can_insert(104)


def test_slack_lets_either_side_run_ahead():
    limiter = filled(Limiter(100, 32, 8, slack=64), 100)
    batches = 0
    while limiter.can_sample(100):
        limiter.sampled(32)
        batches += 1
    assert batches == 3  # the one that is due, and two ahead
    limiter = filled(Limiter(100, 32, 8, slack=64), 100)
    while limiter.can_insert(100):
        limiter.inserted(1)
    assert limiter.debt == 32 + 64


def test_ratio_0_lets_both_run_free_once_there_is_enough():
    limiter = Limiter(100, 32, 0)
    assert limiter.can_insert(0) and not limiter.can_sample(99) and limiter.can_sample(100)
    filled(limiter, 10**9)
    assert limiter.can_insert(10**9) and limiter.can_sample(10**9)
    filled(limiter, 0, 10**12)
    assert limiter.can_insert(10**9) and limiter.can_sample(10**9)


limiters = st.builds(
    Limiter,
    min_size=st.integers(1, 1000),
    batch=st.integers(1, 512),
    samples_per_insert=st.just(0.0) | st.floats(1e-3, 100),
    slack=st.just(0.0) | st.floats(0, 1000),
)


@given(limiters, st.integers(0, 10**6), st.integers(0, 10**7), st.integers(0, 2000))
def test_never_are_both_refused(limiter, inserted, sampled, size):
    """In any state whatsoever, also one that no run would reach, or a memory that has shrunk below its start."""
    filled(limiter, inserted, sampled)
    assert limiter.can_insert(size) or limiter.can_sample(size)


@given(limiters.filter(lambda x: x.samples_per_insert), st.integers(1, 64), st.floats(0, 1), st.integers(0, 2**32))
def test_the_ratio_stays_in_its_band_at_any_rates(limiter, parcel, share, seed):
    """P74: `share` is how often the actors are asked first. The error never exceeds one step of either side."""
    rng, size, moves = np.random.default_rng(seed), 0, 0
    for actors_first in rng.random(400) < share:
        order = ("insert", "sample") if actors_first else ("sample", "insert")
        for move in order:
            if move == "insert" and limiter.can_insert(size):
                limiter.inserted(parcel)
                size += parcel
                moves += 1
                break
            if move == "sample" and limiter.can_sample(size):
                limiter.sampled(limiter.batch)
                moves += 1
                break
        if size < limiter.min_size:
            continue
        low = -limiter.slack - limiter.batch
        high = limiter.batch + limiter.slack + parcel * limiter.samples_per_insert
        assert low - 1e-6 <= limiter.debt <= high + 1e-6
    assert moves == 400, "one of the two could always go on"


@pytest.mark.parametrize("ratio", [0.0, 4.0])
def test_state_goes_on_where_it_was(ratio):
    old, new = (Limiter(10, 8, ratio) for _ in range(2))
    filled(old, 14, 16)
    new.load(old.state())
    assert new.state() == old.state() == {"inserted": 14, "sampled": 16, "samples_per_insert": ratio}
    assert (new.debt, new.can_insert(14), new.can_sample(14)) == (old.debt, old.can_insert(14), old.can_sample(14))


@pytest.mark.parametrize("before, after", [(0.5, 64.0), (64.0, 0.5), (0.0, 4.0)])
def test_another_ratio_holds_from_now_on(before, after):
    old, new = Limiter(10, 8, before), Limiter(10, 8, after)
    filled(old, 1_010, int(1_000 * before))
    new.load(old.state())
    assert new.debt == 0 and new.can_sample(500) and new.can_insert(500)
    new.sampled(8)
    assert not new.can_sample(500), "nothing is left to be made up for"
    new.inserted(math.ceil(8 / after))
    assert new.can_sample(500)


def test_another_ratio_before_the_warm_up_is_over_changes_nothing():
    old, new = Limiter(10, 8, 4.0), Limiter(10, 8, 2.0)
    filled(old, 7, 0)
    new.load(old.state())
    assert new.debt == -6 and not new.can_sample(7)


@pytest.mark.parametrize(
    "given",
    [
        (0, 1, 1.0, 0.0),
        (1, 0, 1.0, 0.0),
        (1, 1, -1.0, 0.0),
        (1, 1, 1.0, -1.0),
        (1, 1, math.nan, 0.0),
        (1, 1, math.inf, 0.0),
        (1, 1, 1.0, math.inf),
    ],
)
def test_bad_numbers_are_refused(given):
    with pytest.raises(ValueError, match="must be"):
        Limiter(*given)
