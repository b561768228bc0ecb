"""Statistics of several runs: against their definition, against scipy, and against numbers of rliable.

rliable is no dependency of the tests: it brings nine packages, and fails to import with pandas 3 (arch 7.2.0). `GOLDEN`
was computed in an environment of its own, with rliable 1.2.0, pandas 2.3.3, numpy 2.4.6 and
`library.get_interval_estimates({"x": scores}, aggregate_iqm, reps=50000, random_state=RandomState(0))`.
"""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from rookery.metrics.statistic import bootstrap, iqm, steps_to

# Scores by task, interquartile mean, 95 % interval.
GOLDEN = [
    ([[100.0, 109.0, 91.8, 73.3, 86.4]], 92.733333, (77.667, 106.0)),
    ([[70.3, 101.8, 140.2, 85.2, 81.4, 114.7, 110.7, 103.2, 72.1, 99.1]], 96.9, (82.033, 110.983)),
    (
        [
            [120.9, 43.0, 92.9, 104.7, 83.8, 54.1, 75.7],
            [109.7, 111.3, 112.0, 144.4, 148.5, 135.7, 181.8],
            [186.3, 144.7, 208.1, 124.5, 203.4, 170.6, 175.8],
        ],
        129.727273,
        (117.709, 144.218),
    ),
    (
        [
            [99.0, 103.3, 140.8, 80.8, 102.2, 98.0],
            [176.5, 151.9, 103.6, 210.0, 167.3, 170.0],
            [182.5, 163.2, 225.8, 222.9, 194.3, 243.2],
            [246.6, 252.3, 253.6, 214.0, 270.5, 229.7],
        ],
        184.933333,
        (167.883, 198.742),
    ),
]
numbers = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40)


@given(numbers)
def test_the_interquartile_mean_is_its_definition_and_scipys_trimmed_mean(values):
    ordered, cut = sorted(values), len(values) // 4
    middle = ordered[cut : len(values) - cut]
    assert float(iqm(values)) == pytest.approx(sum(middle) / len(middle), rel=1e-9, abs=1e-6)
    assert float(iqm(values)) == pytest.approx(stats.trim_mean(values, 0.25), rel=1e-9, abs=1e-6)


@pytest.mark.parametrize("tasks, value, interval", GOLDEN)
def test_estimates_are_those_of_rliable(tasks, value, interval):
    found = bootstrap(tasks)
    width = interval[1] - interval[0]
    assert found.value == pytest.approx(value, abs=1e-6)
    assert (found.low, found.high) == pytest.approx(interval, abs=0.03 * width)  # both are drawn at random


def test_the_interval_of_few_runs_is_that_of_all_their_draws():
    scores = [3.0, 8.0, 5.0, 1.0]
    every = [float(iqm(draw)) for draw in itertools.product(scores, repeat=4)]
    low, high = np.percentile(every, [2.5, 97.5])
    found = bootstrap([scores], repetitions=40_000)
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.1)


def test_the_interval_is_scipys():
    scores = np.random.default_rng(3).normal(50, 9, 12)
    theirs = stats.bootstrap(
        (scores,), lambda x, axis: stats.trim_mean(x, 0.25, axis=axis), method="percentile", n_resamples=20_000,
        rng=np.random.default_rng(1), vectorized=True,
    ).confidence_interval  # fmt: skip
    found = bootstrap([scores])
    assert (found.low, found.high) == pytest.approx((theirs.low, theirs.high), abs=0.03 * (theirs.high - theirs.low))


def test_runs_are_drawn_within_their_task():
    """Two tasks far apart, without variance inside: drawn across tasks, the mean would vary."""
    found = bootstrap([[0.0] * 4, [100.0] * 4])
    assert (found.value, found.low, found.high) == (50.0, 50.0, 50.0)


def test_the_same_runs_give_the_same_interval_and_more_runs_a_narrower_one():
    scores = np.random.default_rng(5).normal(0, 1, 40)
    assert bootstrap([scores]) == bootstrap([scores])
    assert bootstrap([scores], seed=1) != bootstrap([scores])
    few, many = bootstrap([scores[:6]]), bootstrap([scores])
    assert many.high - many.low < few.high - few.low


def test_one_run_has_no_interval_and_no_run_is_refused():
    found = bootstrap([[7.0]])
    assert found.value == 7.0 and math.isnan(found.low) and math.isnan(found.high)
    assert math.isnan(bootstrap([[7.0], [1.0, 2.0]]).low)
    for empty in ([], [[]], [[1.0, 2.0], []]):
        with pytest.raises(ValueError, match="at least one"):
            bootstrap(empty)


def test_what_was_not_reached_is_infinite_and_counts_as_the_worst():
    one = bootstrap([[10.0, 20.0, 30.0, math.inf]])
    assert one.value == 25.0 and one.high == math.inf and one.low >= 10.0
    assert bootstrap([[10.0, 20.0, math.inf, math.inf]]).value == math.inf
    never = bootstrap([[math.inf] * 5])
    assert (never.value, never.low, never.high) == (math.inf,) * 3


def test_steps_to_a_return_are_those_at_its_first_time():
    steps, returns = np.array([10, 20, 30, 40]), np.array([1.0, 5.0, 2.0, 9.0])
    assert [steps_to(goal, steps, returns) for goal in (0, 5, 6, 10, math.nan)] == [10, 20, 40, math.inf, math.inf]
    assert steps_to(1.0, np.empty(0), np.empty(0)) == math.inf
