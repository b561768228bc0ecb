"""Runs compared: one row for each recipe, environment and setting, with what its seeds tell of the result.

Runs that differ only by their seed are one sample, as in `plot.py`. The statistics are those of `statistic.py`. Runs
are compared within one environment: returns of different environments have no common scale, unless `scores` gives
one; then a recipe also has a row over all of them, with runs drawn within each environment.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rookery.core.errors import UsageError
from rookery.metrics.plot import Curve, grouped, number, read_curve
from rookery.metrics.recorded import evaluations, own_evaluation
from rookery.metrics.statistic import Estimate, bootstrap, steps_to

FEW = 5  # runs; an interval of fewer is too narrow, since the bootstrap draws from what it has


@dataclass(frozen=True)
class Row:
    """What the runs of one setting tell."""

    label: str
    env: str
    runs: int
    final: Estimate  # mean return of the last 100 episodes at the end
    evaluation: Estimate | None  # of whole episodes, the newest of each run; None: not all runs have one
    target: float  # the return that `steps` is about; NaN: none was given
    steps: Estimate | None  # environment steps until it was first reached; infinite: not reached
    reached: int  # runs that have
    note: str = ""  # what must be known to read it


def compare(
    runs: Sequence[str | Path], target: float | None = None, scores: Mapping[str, tuple[float, float]] | None = None
) -> list[Row]:
    """One row for each setting; `target`: the return for "steps to", else the `target_return` of the runs.

    `scores`: by environment the returns that count as 0 and 1, for rows over several environments.
    """
    folders = list(dict.fromkeys(Path(run) for run in runs))
    if not folders:
        raise UsageError("which runs? give run folders")
    curves = {id(curve): (folder, curve) for folder in folders for curve in [read_curve(folder)]}
    ended = [curve for _, curve in curves.values() if len(curve.return_mean)]
    if not ended:
        raise UsageError("none of these runs has finished an episode yet: there is nothing to compare")
    rows, settings = [], {}
    for label, members in grouped(ended):
        row = _row(label, [(curves[id(curve)][0], curve) for curve in members], target)
        rows.append(row)
        settings[label] = members
    return rows + _over_environments(settings, scores or {})


def _row(label: str, members: Sequence[tuple[Path, Curve]], target: float | None) -> Row:
    curves = [curve for _, curve in members]
    goal = number(curves[0].config.get("target_return")) if target is None else target
    steps = [steps_to(goal, curve.env_steps, curve.return_mean) for curve in curves]
    played = [evaluated(folder) for folder, _ in members]
    known = [value for value in played if value is not None]
    return Row(
        label=label, env=str(curves[0].config.get("env", "?")), runs=len(curves),
        final=bootstrap([[float(curve.return_mean[-1]) for curve in curves]]),
        evaluation=bootstrap([known]) if len(known) == len(played) else None,
        target=goal, steps=bootstrap([steps]) if math.isfinite(goal) else None,
        reached=sum(math.isfinite(each) for each in steps), note=_note(curves),
    )  # fmt: skip


def _note(curves: Sequence[Curve]) -> str:
    notes = []
    if len(curves) == 1:
        notes.append("one run: no interval; train more seeds")
    elif len(curves) < FEW:
        notes.append(f"{len(curves)} runs are few: the interval is too narrow; take {FEW} or more")
    ends = [float(curve.env_steps[-1]) for curve in curves]
    if max(ends) > 1.1 * min(ends):
        notes.append(f"runs of different length, {min(ends):,.0f} to {max(ends):,.0f} steps")
    seeds = [repr(curve.config.get("seed")) for curve in curves]
    if len(set(seeds)) < len(seeds):
        notes.append("some runs have the same seed: they are not independent")
    return "; ".join(notes)


def evaluated(folder: Path) -> float | None:
    """The mean return of the newest evaluation, stored or during training; of several, that of the most episodes."""
    known = [*evaluations(folder), *own_evaluation(folder)]
    found = [each for each in known if math.isfinite(number(each["return_mean"]))]
    if not found:
        return None
    newest = max(found, key=lambda each: (_order(each.get("env_steps")), _order(each.get("episodes"))))
    return number(newest["return_mean"])


def _order(value: Any) -> float:
    return -1.0 if math.isnan(known := number(value)) else known


def _over_environments(settings: Mapping[str, Sequence[Curve]], scores: Mapping[str, tuple[float, float]]) -> list[Row]:
    """A row for each recipe that has runs in several environments with a scale."""
    for env, (low, high) in scores.items():
        if not low < high:
            raise UsageError(f"the scale of {env} is from {low:g} to {high:g}; the first must be lower")
    tasks: dict[str, dict[str, list[float]]] = {}
    for curve in (curve for members in settings.values() for curve in members):
        recipe, env = str(curve.config.get("recipe", "?")), str(curve.config.get("env", "?"))
        if env in scores:
            low, high = scores[env]
            score = (float(curve.return_mean[-1]) - low) / (high - low)
            tasks.setdefault(recipe, {}).setdefault(env, []).append(score)
    return [
        Row(
            label=f"{recipe}, {len(by_env)} environments", env="score from 0 to 1",
            runs=sum(map(len, by_env.values())), final=bootstrap(list(by_env.values())), evaluation=None,
            target=math.nan, steps=None, reached=0,
            note="" if min(map(len, by_env.values())) >= FEW else f"fewer than {FEW} runs in an environment are few",
        )
        for recipe, by_env in tasks.items()
        if len(by_env) > 1
    ]  # fmt: skip


def as_numbers(row: Row) -> dict[str, Any]:
    """A row for JSON, where there is neither NaN nor infinity: null is "unknown", or "not reached"."""

    def plain(value: float) -> float | None:
        return value if np.isfinite(value) else None

    def three(estimate: Estimate | None) -> dict[str, float | None] | None:
        if estimate is None:
            return None
        return {"iqm": plain(estimate.value), "low": plain(estimate.low), "high": plain(estimate.high)}

    return {
        "label": row.label, "env": row.env, "runs": row.runs, "final": three(row.final),
        "evaluation": three(row.evaluation), "target": plain(row.target), "steps_to_target": three(row.steps),
        "reached": row.reached, "note": row.note,
    }  # fmt: skip
