"""The time that a step takes, made to vary on purpose: stragglers for tests and benchmarks of distribution.

The mean time of an environment and the time of each of its steps are drawn from a log-normal distribution. They depend
on the number of the environment in the run and on nothing else: the game does not change, and an environment that
is slow stays slow when a run is resumed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

import numpy as np


class Delay:
    """`mean` seconds per step, `spread` the deviation of its logarithm, `slow` a factor for environment 0."""

    def __init__(self, count: int, mean: float, spread: float, slow: float):
        if min(mean, spread) < 0 or slow <= 0:
            raise ValueError(f"delay={mean}, delay_spread={spread}, slow={slow}: the first two from 0 on, slow above 0")
        self.count, self.mean, self.spread, self.slow = count, mean, spread, slow
        self.sleep = time.sleep
        self.number_lanes(0)

    def number_lanes(self, first: int) -> None:
        """These are the environments first, first + 1, ... of the run."""
        self._generators = [np.random.default_rng(first + lane) for lane in range(self.count)]
        self.means = [self.mean * self._factor(generator) for generator in self._generators]
        if first == 0:
            self.means[0] *= self.slow

    def wait(self, stepping: Iterable[int]) -> None:
        """Sleep for the slowest of the lanes that take a step."""
        if self.mean:
            self.sleep(max((self.means[lane] * self._factor(self._generators[lane]) for lane in stepping), default=0.0))

    def _factor(self, generator: np.random.Generator) -> float:
        """Log-normal with mean 1, so that a larger spread does not make the mean step slower."""
        return math.exp(self.spread * generator.standard_normal() - self.spread**2 / 2)
