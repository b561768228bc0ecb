"""The number of steps of a rollout that makes most of the time, against brute force."""

from __future__ import annotations

import heapq

import numpy as np
import pytest

from rookery.crews.stopping import BIN, StepTimes, best_steps


def simulated(times: list[float], most: int) -> list[float]:
    """When the first, second, ... step of all environments is taken."""
    return list(heapq.merge(*([seconds * (k + 1) for k in range(most)] for seconds in times)))


@pytest.mark.parametrize("seed", range(8))
def test_no_number_of_steps_is_better_than_the_chosen_one(seed):
    rng = np.random.default_rng(seed)
    lanes, unroll, stretch = int(rng.integers(1, 6)), 16, int(rng.integers(1, 5))
    times = (0.02 * np.exp(rng.normal(0, 1.5, lanes))).tolist()
    learn, target = float(rng.uniform(0.01, 2.0)), unroll * lanes
    moments = simulated(times, unroll * stretch)
    chosen = best_steps(times, learn, target, unroll * stretch)
    rate = [steps / (moments[steps - 1] + learn) for steps in range(1, target + 1)]
    # Times are rounded up to a bin: the choice is as good as any, but for that.
    assert rate[chosen - 1] >= max(steps / (moments[steps - 1] + learn + BIN) for steps in range(1, target + 1))
    assert 1 <= chosen <= target


def test_a_straggler_is_not_waited_for_and_equals_are():
    """One environment of four is 10 times slower, each gives 16 steps at most, and learning takes a moment."""
    assert best_steps([0.02, 0.02, 0.02, 0.2], 0.05, 64, 16) == 49
    assert best_steps([0.02] * 4, 0.05, 64, 16) == 64
    assert best_steps([0.02, 0.02, 0.02, 0.2], 0.5, 64, 64) == 64, "the others make up for it"
    assert best_steps([0.02, 0.02, 0.02, 0.2], 0.05, 64, 16, least=60) >= 60
    assert best_steps([0.02, 0.02, 0.02, 0.2], 1e4, 64, 16) == 64, "time does not matter where learning takes long"


def test_times_are_of_the_last_steps_and_updates_and_not_of_what_lies_between_rollouts():
    times = StepTimes(lanes=2, window=3)
    both = np.array([0, 1])
    assert times.best(8, 8, 1) == 8, "nothing is known yet"
    now = 0.0
    for _ in range(2):
        times.begin()
        for _ in range(4):
            times.stepped(both, now)
            now += 0.02
        now += 100.0
    times.learnt(0.1)
    assert times.best(8, 4, 1) == 8
    times.begin()
    for k in range(4):
        times.stepped(np.array([1]), now + 2.0 * k)
    assert times.best(8, 4, 1) == 4, "the second is slow now"
