"""What a step of an environment costs, from a short random play: for the choice between one process and several.

The median of the steps, on the wall clock: an environment may also wait, for a simulator in another process. A machine
that is busy with other work interrupts a few short steps, and the median is not one of them. Resets count by how often
they came. Not here: what follows from the cost (`run/auto.py`), and the speed that `check-env` reports (`check.py`).
"""

from __future__ import annotations

from statistics import median
from time import perf_counter

import numpy as np

from rookery.envs.check import random_actions
from rookery.envs.lanes import Lanes

SEED = 1
STEPS = 200  # at most
SECONDS = 0.2  # after which no further step is taken
LEAST, PATIENCE = 8, 5.0  # but so many, within that time: the first one may load or compile something


def step_seconds(lanes: Lanes) -> float | None:
    """Seconds per step of one environment, its share of the resets included; None if it cannot be played."""
    try:
        return _played(lanes)
    except (Exception, SystemExit):
        return None  # the run will meet the fault again, and say where it was


def _played(lanes: Lanes) -> float | None:
    rng, began = np.random.default_rng(SEED), perf_counter()
    steps: list[float] = []
    obs = lanes.reset([SEED + lane for lane in range(lanes.count)])
    resets, reset = [perf_counter() - began], False
    ends, began = 0, perf_counter()
    while len(steps) < STEPS and perf_counter() - began < (SECONDS if len(steps) >= LEAST else PATIENCE):
        action = random_actions(lanes.spec, lanes.count, rng, obs)
        start = perf_counter()
        obs, _, terminated, truncated = lanes.step(action)
        (resets if reset else steps).append(perf_counter() - start)
        reset = bool((terminated | truncated)[0])  # the next step resets
        ends += reset
    return median(steps) + median(resets) * ends / len(steps) if steps else None
