"""The finite check finds every injected number, says where, and cries wolf never (reliability.md F8)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.envs.gate import find_nonfinite, watch

T, B = 6, 3
BAD = st.sampled_from([np.nan, np.inf, -np.inf])


def clean():
    rng = np.random.default_rng(0)
    vector, image = rng.normal(size=(T + 1, B, 4)).astype(np.float32), rng.integers(0, 255, (T + 1, B, 2, 2), np.uint8)
    return {"a": vector, "b": image}, rng.normal(size=(T, B)).astype(np.float32)


@given(st.integers(0, T), st.integers(0, B - 1), st.integers(0, 3), BAD)
def test_a_bad_observation_is_found_at_the_row_that_returned_it(row, lane, place, value):
    obs, reward = clean()
    obs["a"][row, lane, place] = value
    assert find_nonfinite(obs, reward) == (max(row - 1, 0), lane, f"an observation 'a' of {value}")


@given(st.integers(0, T - 1), st.integers(0, B - 1), BAD)
def test_a_bad_reward_is_found(row, lane, value):
    obs, reward = clean()
    reward[row, lane] = value
    assert find_nonfinite(obs, reward) == (row, lane, f"a reward of {value}")
    assert find_nonfinite({"obs": obs["a"][1:]}, reward) == (row, lane, f"a reward of {value}")


def test_the_first_of_several_counts():
    obs, reward = clean()
    reward[3, 0] = np.nan
    obs["a"][3, 2, 1] = np.inf  # returned by row 2
    assert find_nonfinite(obs, reward) == (2, 2, "an observation 'a' of inf")


def test_opposite_infinities_do_not_hide_each_other():
    obs, reward = clean()
    reward[1, 0], reward[4, 2] = np.inf, -np.inf
    assert find_nonfinite(obs, reward) == (1, 0, "a reward of inf")


@pytest.mark.parametrize("value", [0.0, 3e38, -3e38])
def test_large_numbers_are_finite_even_if_their_sum_is_not(value):
    obs = {"obs": np.full((T + 1, B, 4), value, np.float32)}
    assert find_nonfinite(obs, np.full((T, B), value, np.float32)) is None


def test_integers_are_passed_over():
    assert find_nonfinite({"obs": np.zeros((2, 1), np.int64)}, np.zeros((1, 1), np.float32)) is None


def test_rows_may_be_aligned():
    obs = {"obs": np.zeros((T, B, 1), np.float32)}
    obs["obs"][4, 1] = np.nan
    assert find_nonfinite(obs, np.zeros((T, B), np.float32)) == (4, 1, "an observation of nan")


# Row by row


@given(st.sampled_from("ar"), st.integers(0, T - 1), st.integers(0, B - 1), st.integers(0, 3), BAD)
def test_a_row_is_not_finite_if_one_number_of_it_is_not(column, row, lane, place, value):
    obs, reward = clean()
    finite = watch(obs, reward)  # it looks at the arrays, whatever is in them later
    assert all(map(finite, range(T)))
    if column == "a":
        obs["a"][row + 1, lane, place] = value
    else:
        reward[row, lane] = value
    assert [finite(each) for each in range(T)] == [each != row for each in range(T)]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_raises_no_warning(value):
    obs, reward = clean()
    obs["a"][3, 1, 2] = reward[4, 0] = value
    reward[4, 1] = -value
    finite = watch(obs, reward)
    assert [finite(row) for row in range(T)] == [True, True, False, True, False, True]


@pytest.mark.filterwarnings("error")
def test_a_sum_that_overflows_is_a_suspect_and_acquitted():
    obs, reward = clean()
    obs["a"][3] = 3e38
    finite = watch(obs, reward)
    assert [finite(row) for row in range(T)] == [True, True, False, True, True, True]
    assert find_nonfinite(obs, reward) is None


def test_rows_of_integers_need_no_look():
    obs, reward = {"obs": np.zeros((T + 1, B, 4), np.uint8)}, np.zeros((T, B), np.float32)
    assert all(map(watch(obs, reward), range(T)))


def test_a_column_that_would_have_to_be_copied_is_refused():
    obs = {"obs": np.zeros((T + 1, 4, B), np.float32).swapaxes(1, 2)}
    with pytest.raises(AssertionError, match="view"):
        watch(obs, np.zeros((T, B), np.float32))
