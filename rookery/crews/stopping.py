"""When to end a rollout, with several ranks: the number of steps that makes most of the time.

A rollout of S steps takes Time(S), and learning from it LT. Environments are not equally fast, and each may give only
so many steps: the last steps of a rollout come slower than the first. VER (Wijmans et al. 2022) chooses the S with the
most steps per second, S / (Time(S) + LT), from the times of the last rollouts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

BIN = 0.005  # seconds: times are compared in steps of this size
BINS = 20_000  # at most so many of them, or larger ones


def best_steps(step_times: Sequence[float], learn_time: float, target: int, most: int, least: int = 1) -> int:
    """The number of steps S, `least` to `target`, with the largest S / (Time(S) + learn_time).

    `step_times`: seconds per step of each environment, all of which step at the same time; `most`: steps that one gives
    at most. Among equally good numbers it is the largest.
    """
    times = np.maximum(np.asarray(step_times, np.float64), 1e-9)
    end = _time_of(times, target, most)
    if end <= BIN:
        return target
    grid = np.arange(1, np.ceil(end / max(BIN, end / BINS)) + 1) * max(BIN, end / BINS)
    steps = np.minimum(collected(times, grid, most), target)
    rate = np.where(steps >= least, steps / (grid + learn_time), 0.0)
    best = len(rate) - 1 - int(np.argmax(rate[::-1]))
    return int(min(max(steps[best], least), target))


def collected(times: np.ndarray, grid: np.ndarray, most: int) -> np.ndarray:
    """Steps of all environments together by each of these times."""
    total = np.zeros(len(grid), np.int64)
    for seconds in times:
        total += np.minimum(np.floor(grid / seconds + 1e-9).astype(np.int64), most)
    return total


def _time_of(times: np.ndarray, target: int, most: int) -> float:
    """When `target` steps are taken, by bisection; all environments together can give as many."""
    low, high = 0.0, float(times.max()) * most
    for _ in range(60):
        middle = (low + high) / 2
        if collected(times, np.array([middle]), most)[0] >= target:
            high = middle
        else:
            low = middle
    return high


class StepTimes:
    """Times of the last `window` steps of each environment, and of the last `learn` updates."""

    def __init__(self, lanes: int, window: int, learn: int = 5):
        self._steps: list[deque[float]] = [deque(maxlen=window) for _ in range(lanes)]
        self._learn: deque[float] = deque(maxlen=learn)
        self._last = np.full(lanes, np.nan)

    def begin(self) -> None:
        """A rollout begins: what an environment did between two of them is not known."""
        self._last[:] = np.nan

    def stepped(self, lanes: np.ndarray, now: float) -> None:
        for lane, seconds in zip(lanes.tolist(), (now - self._last[lanes]).tolist()):
            if seconds == seconds:  # not NaN: not the first of this rollout
                self._steps[lane].append(seconds)
        self._last[lanes] = now

    def learnt(self, seconds: float) -> None:
        self._learn.append(seconds)

    def best(self, target: int, most: int, least: int) -> int:
        """`target` until there are times of every environment and of learning."""
        if not self._learn or not all(self._steps):
            return target
        means = [sum(times) / len(times) for times in self._steps]
        return best_steps(means, sum(self._learn) / len(self._learn), target, most, least)
