"""Statistics of several runs: the interquartile mean, its stratified bootstrap interval, steps to a return.

As in Agarwal et al. 2021, "Deep Reinforcement Learning at the Edge of the Statistical Precipice", section 4, and their
library rliable. Scores are given by task: runs of one task are a sample of their own, from which the bootstrap draws.
Numbers in, numbers out: which runs belong together is decided in `compare.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

REPETITIONS = 10_000
LEVEL = 0.95
SEED = 0  # of the bootstrap: the same runs give the same interval
BLOCK = 1 << 22  # numbers drawn at a time


@dataclass(frozen=True)
class Estimate:
    """A statistic of a sample, and where it lies with a probability of 95 %. NaN: too few runs for an interval."""

    value: float
    low: float
    high: float


def iqm(scores: np.ndarray) -> np.ndarray:
    """Mean of the middle half along the last axis: a quarter, rounded down, is left out at each end.

    Infinite scores ("not reached") are the highest; the mean is infinite if one is in the middle half.
    """
    ordered = np.sort(np.asarray(scores, dtype=float), axis=-1)
    count = ordered.shape[-1]
    cut = int(0.25 * count)
    return ordered[..., cut : count - cut].mean(-1)


def bootstrap(
    tasks: Sequence[Sequence[float]],
    statistic: Callable[[np.ndarray], np.ndarray] = iqm,
    repetitions: int = REPETITIONS,
    level: float = LEVEL,
    seed: int = SEED,
) -> Estimate:
    """The statistic of all scores together, with its percentile interval: runs are resampled within each task."""
    samples = [np.asarray(task, dtype=float) for task in tasks]
    if not samples or any(len(sample) == 0 for sample in samples):
        raise ValueError("every task needs at least one score")
    value = float(statistic(np.concatenate(samples)))
    if any(len(sample) < 2 for sample in samples):
        return Estimate(value, math.nan, math.nan)
    rng = np.random.default_rng(seed)
    rows = max(1, BLOCK // sum(map(len, samples)))
    found = []
    for start in range(0, repetitions, rows):
        shape = min(rows, repetitions - start)
        drawn = [sample[rng.integers(0, len(sample), (shape, len(sample)))] for sample in samples]
        found.append(statistic(np.concatenate(drawn, axis=-1)))
    outside = 50 * (1 - level)
    # Not interpolated where a score may be infinite: between two infinities there is no number.
    finite = all(np.isfinite(sample).all() for sample in samples)
    low, high = np.percentile(
        np.concatenate(found), [outside, 100 - outside], method="linear" if finite else "closest_observation"
    )
    return Estimate(value, float(low), float(high))


def steps_to(target: float, env_steps: np.ndarray, returns: np.ndarray) -> float:
    """Environment steps until the return was first at the target; infinite if it never was."""
    there = np.flatnonzero(np.asarray(returns) >= target)
    return float(env_steps[there[0]]) if len(there) else math.inf
