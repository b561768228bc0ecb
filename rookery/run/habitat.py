"""The scaling simulation beside the one number that DD-PPO's abstract gives: 107 times the speed on 128 GPUs.

The time of an environment's rollout is log-normal. One number is FITTED: its coefficient of variation, so that 128
ranks with preemption have the paper's efficiency. The rest is PREDICTED: other numbers of ranks, no preemption, other
preemption thresholds. So the point at 128 ranks confirms nothing by itself.

Where the constants come from:
- 128 steps, 4 environments per GPU, 2 epochs × 2 minibatches, threshold 0.6, at least 0.25: habitat-baselines' config.
- ROUND_S: the abstract's 2.5e9 steps in 3 days on 64 GPUs, so it is an upper bound ("under 3 days").
- COLLECTING, FLOATS and CLUSTER: assumptions, without a source. `SHARES` shows how much the first one matters.
The points of the paper's own figure are not used: only the abstract's number is known here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from rookery.core.errors import UsageError
from rookery.run.scaling import Network, Preemption, Scaled, Workload, doublings, simulate

GPUS, SPEEDUP = 128, 107.0
ROWS, ENVS, UPDATES = 128, 4, 4
ROUND_S = 64 * ROWS * ENVS / (2.5e9 / (3 * 86400))  # 3.4 s
COLLECTING = 0.7  # share of ROUND_S in which an average environment is stepped; the rest is learning
SHARES = (0.5, 0.7, 0.9)  # of COLLECTING, for the sensitivity
FLOATS = 10_000_000
CLUSTER = Network("cluster: 100 Gbit/s, 25 µs", 25e-6, 8 / 100e9, ring_up_to=8)
THRESHOLDS = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
WIDEST = 1.5  # largest coefficient of variation that is tried
VARIATIONS = (0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
SAMPLES = 2048


@dataclass(frozen=True)
class Fit:
    variation: float  # fitted: standard deviation of an environment's rollout time over its mean
    alone: Scaled
    work: Workload


def workload(variation: float, collecting: float = COLLECTING) -> Workload:
    """Log-normal rollout times of single environments: quantiles, so that efficiency is smooth in `variation`."""
    sigma = math.sqrt(math.log(1 + variation**2))
    normal = np.array([NormalDist().inv_cdf((index + 0.5) / SAMPLES) for index in range(SAMPLES)])
    relative = np.exp(sigma * normal - sigma**2 / 2)
    return Workload(
        step_s=(relative * collecting * ROUND_S / ROWS)[:, None, None], row_s=np.zeros(1), rows=ROWS,
        learn_s=np.array([(1 - collecting) * ROUND_S]), steps_per_row=ENVS, minibatches=UPDATES, floats=FLOATS,
        stepped_together=ENVS,
    )  # fmt: skip


def run(work: Workload, ranks: int, preemption: Preemption | None, effort: int) -> Scaled:
    """As many rollouts for any number of ranks, so that all results are as exact."""
    return simulate(work, ranks, CLUSTER, preemption, max(16, effort * GPUS // ranks))


def at(variation: float, collecting: float, effort: int) -> tuple[Fit, float]:
    """The workload of this variation, and its efficiency on 128 ranks with preemption."""
    work = workload(variation, collecting)
    alone = run(work, 1, None, effort)
    return Fit(variation, alone, work), run(work, GPUS, Preemption(), effort).efficiency(alone)


def fitted(collecting: float, effort: int) -> Fit:
    """The smallest variation at which 128 ranks with preemption have the paper's efficiency, by bisection."""
    low, high = 0.0, 0.1
    while at(high, collecting, effort)[1] > SPEEDUP / GPUS:
        low, high = high, high + 0.1
        if high > WIDEST:
            raise UsageError(f"no variation up to {WIDEST} gives {SPEEDUP:g}× on {GPUS} ranks: the model does not fit")
    for _ in range(8):
        middle = (low + high) / 2
        low, high = (middle, high) if at(middle, collecting, effort)[1] > SPEEDUP / GPUS else (low, middle)
    return at((low + high) / 2, collecting, effort)[0]


def compare(most: int, effort: int) -> dict[str, Any]:
    """Fit once, predict the rest; as plain numbers. `effort`: rounds at 128 ranks."""
    fit = fitted(COLLECTING, effort)

    def efficiency(ranks: int, preemption: Preemption | None) -> float:
        return run(fit.work, ranks, preemption, effort).efficiency(fit.alone)

    return {
        "fitted": {"variation": fit.variation, "at_ranks": GPUS, "efficiency": SPEEDUP / GPUS},
        "rows": [
            {
                "ranks": ranks, "paper": SPEEDUP / GPUS if ranks == GPUS else None,
                "waiting": efficiency(ranks, None), "preempted": efficiency(ranks, Preemption()),
            }
            for ranks in doublings(max(most, 2 * GPUS))
        ],
        "by_threshold": [{"share": share, "efficiency": efficiency(GPUS, Preemption(share))} for share in THRESHOLDS],
        "by_variation": [_of_variation(variation, effort) for variation in VARIATIONS],
        "by_collecting": [_of_collecting(collecting, effort) for collecting in SHARES],
        "constants": {
            "rows": ROWS, "envs": ENVS, "all_reduces": UPDATES, "round_s": ROUND_S, "collecting": COLLECTING,
            "floats": FLOATS, "alpha": CLUSTER.alpha, "beta": CLUSTER.beta, "ring_up_to": CLUSTER.ring_up_to,
        },
    }  # fmt: skip


def _of_variation(variation: float, effort: int) -> dict[str, float]:
    """Both efficiencies on 128 ranks: how well the fit determines the variation, and what depends on it."""
    fit, preempted = at(variation, COLLECTING, effort)
    waiting = run(fit.work, GPUS, None, effort).efficiency(fit.alone)
    return {"variation": variation, "preempted": preempted, "waiting": waiting}


def _of_collecting(collecting: float, effort: int) -> dict[str, float | None]:
    """The fit again for another share of collecting, which nothing here measures."""
    try:
        fit = fitted(collecting, effort)
    except UsageError:
        return {"collecting": collecting, "variation": None, "waiting": None}
    waiting = run(fit.work, GPUS, None, effort).efficiency(fit.alone)
    return {"collecting": collecting, "variation": fit.variation, "waiting": waiting}
