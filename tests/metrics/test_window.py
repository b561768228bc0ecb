"""The window over the last episodes: exact, and the same after a resume."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.metrics.window import ReturnWindow


@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.integers(1, 10_000)), max_size=30), st.integers(1, 8))
def test_it_is_the_mean_and_deviation_of_the_last_episodes(episodes, size):
    window = ReturnWindow(size)
    for total, length in episodes:
        window.add(total, length)
    last = episodes[-size:]
    assert len(window) == len(last) and window.episodes == len(episodes) and window.full == (len(episodes) >= size)
    if last:
        assert window.return_mean == pytest.approx(np.mean([total for total, _ in last]), abs=1e-6)
        assert window.return_std == pytest.approx(np.std([total for total, _ in last]), abs=1e-5)
        assert window.length_mean == pytest.approx(np.mean([length for _, length in last]))


def test_it_is_empty_before_the_first_episode():
    window = ReturnWindow()
    assert len(window) == window.episodes == 0
    assert window.return_mean is None and window.return_std is None and window.length_mean is None


def test_numpy_numbers_become_plain_ones_and_a_restored_window_goes_on_exactly():
    window = ReturnWindow(3)
    for total in (1.1, 2.2, 3.3, 4.4):
        window.add(np.float32(total), np.int64(7))
    copy = ReturnWindow.from_dict(json.loads(json.dumps(window.to_dict())))
    for each in (window, copy):
        each.add(0.1, 5)
    assert copy.to_dict() == window.to_dict() and copy.episodes == 5
    assert (copy.return_mean, copy.return_std) == (window.return_mean, window.return_std)
