"""What runs of `ddppo` on this machine have measured, as the input of the scaling simulation.

`read` is the only place that knows how a run reports its ranks: `summary["ranks"]` has `rollout_s`, `wait_s` and
`learn_s`, each a list per rank with the seconds of its last rounds. The three do not overlap. A round is their sum. A
run of one rank reports no rounds: its means come from how it spent its time.

The environments of a run are few, and `rookery/GridNav-v0` keeps a slow one slow for the whole run. So its delays are
not bootstrapped from the measurement: they are drawn by the task's own law for up to `ENVS` environments. Measured are
what a rank adds to them in every step, and the learning. Without delays, the measured rollouts are drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rookery.core.errors import UsageError
from rookery.envs.delay import Delay
from rookery.run.scaling import Workload

ENVS, ROLLOUTS = 1024, 4  # environments that are drawn, and rollouts of each
WARM_UP = 0.1  # share of the rounds that is left out, at the beginning


@dataclass(frozen=True)
class Measured:
    """One run. The lists are as `summary["ranks"]` has them, without the warm-up."""

    ranks: int
    preempt: float  # share of the ranks that must have finished; 1: never preempted
    rows: int  # steps of a rollout per environment
    envs: int  # environments per rank
    delay: float  # mean seconds of a step that the task was told to take
    spread: float  # deviation of its logarithm
    rollout_s: list[list[float]]
    wait_s: list[list[float]]
    learn_s: list[list[float]]
    steps_per_s: float  # of the whole run, as its summary says

    @property
    def round_s(self) -> float:
        """Mean seconds of a round. It is the same for all ranks, so that the mean over ranks is exact."""
        return float(sum(np.mean(part) for part in (self.rollout_s, self.wait_s, self.learn_s)))


def read(config: Any, summary: Mapping[str, Any], ranks: int, preempt: float) -> Measured:
    """From the config and the summary of a finished run."""
    found = summary.get("ranks") or (_alone(config, summary) if ranks == 1 else None)
    if not found or any(not found.get(name) for name in ("rollout_s", "wait_s", "learn_s")):
        raise UsageError("the run reports no times of its ranks: it was too short, or not of topology allreduce")
    times = {name: _per_rank(found[name]) for name in ("rollout_s", "wait_s", "learn_s")}
    if len(times["rollout_s"]) != ranks:
        raise UsageError(f"the run reports times of {len(times['rollout_s'])} ranks, not of {ranks}")
    return Measured(
        ranks=ranks, preempt=preempt, rows=config.algo.unroll, envs=config.lanes // ranks,
        delay=float(config.env_kwargs.get("delay", 0.0)), spread=float(config.env_kwargs.get("delay_spread", 0.0)),
        steps_per_s=summary["steps_per_s"], **times,
    )  # fmt: skip


def _alone(config: Any, summary: Mapping[str, Any]) -> dict[str, list[float]]:
    rounds = summary["env_steps"] / (config.lanes * config.algo.unroll)
    seconds, learn = summary["wall_s"] / rounds, summary["time_split"]["learn"]
    return {"rollout_s": [seconds * (1 - learn)] * 2, "wait_s": [0.0] * 2, "learn_s": [seconds * learn] * 2}


def _per_rank(times: Sequence[Any]) -> list[list[float]]:
    """A list per rank, without its first rounds."""
    lists = [list(map(float, each)) for each in (times if isinstance(times[0], Sequence) else [times])]
    return [each[min(len(each) - 1, max(1, round(WARM_UP * len(each)))) :] for each in lists]


def delays(run: Measured, rng: np.random.Generator) -> np.ndarray:
    """[ENVS, ROLLOUTS, T] seconds of each step of each environment, as the task draws them."""
    means = np.array(Delay(ENVS, run.delay, run.spread, 1.0).means)
    factor = np.exp(run.spread * rng.standard_normal((ENVS, ROLLOUTS, run.rows)) - run.spread**2 / 2)
    return means[:, None, None] * factor


def workload(run: Measured, minibatches: int, floats: int, seed: int = 0) -> Workload:
    """One rank of this run: made from a run of one rank, it knows nothing of other ranks."""
    learn_s = np.concatenate([np.array(each) for each in run.learn_s])
    if run.delay:
        step_s = delays(run, np.random.default_rng(seed))
        own = step_s[: run.envs].max(axis=0).sum(axis=1).mean()  # seconds of a rollout that rank 0 sleeps
        row_s = np.maximum(0.0, np.array(run.rollout_s[0]) - own) / run.rows
        return Workload(step_s, row_s, run.rows, learn_s, run.envs, minibatches, floats, run.envs)
    shortest = min(map(len, run.rollout_s))
    step_s = np.array([each[:shortest] for each in run.rollout_s])[:, :, None] / run.rows
    return Workload(step_s, np.zeros(1), run.rows, learn_s, run.envs, minibatches, floats)
