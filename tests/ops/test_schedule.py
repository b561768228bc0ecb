"""The linear schedule at the updates where off-by-one mistakes live: the first, the last, and beyond."""

import pytest

from rookery.ops.schedule import linear


@pytest.mark.parametrize("start, end", [(2.5e-4, 0.0), (2.5e-4, 1e-5), (0.3, 0.05), (1.0, 1.0)])
def test_both_ends_are_met_exactly(start, end):
    assert linear(start, end, 0.0) == start
    assert linear(start, end, 1.0) == end


def test_first_and_last_update_of_a_run():
    updates = 10  # progress is the share of the run that is done when an update begins
    values = [linear(2.5e-4, 0.0, done / updates) for done in range(updates + 1)]
    assert values[0] == 2.5e-4  # first update: nothing is done yet
    assert values[updates - 1] == pytest.approx(2.5e-5)  # last update: still learns
    assert values[updates] == 0  # the run is over
    assert values == sorted(values, reverse=True)


def test_progress_outside_the_run_is_clamped():
    assert linear(1.0, 0.5, 1.7) == 0.5
    assert linear(1.0, 0.5, -0.2) == 1.0


def test_halfway_is_the_middle():
    assert linear(1.0, 0.0, 0.25) == 0.75
    assert linear(0.0, 8.0, 0.5) == 4.0
