"""What a sweep has found: its runs by setting, with the statistics of `metrics/compare.py`, best first.

Written as summary.json and sweep.md into the folder of the sweep. The best is the setting with the highest
interquartile mean: of the evaluations if every setting has them, else of the final returns.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import msgspec

from rookery.core.config import RunConfig
from rookery.core.errors import CheckpointError, UsageError
from rookery.metrics.compare import Row, as_numbers, compare, evaluated
from rookery.metrics.plot import read_curve
from rookery.play.comparison import interval
from rookery.recipes.recipe import with_fields
from rookery.storage import folder as folders
from rookery.sweeps.plan import Plan, Setting, shown

SUMMARY, PAGE = "summary.json", "sweep.md"
NOT_SAID = ("recipe", "algorithm", "env", "preset", "quiet", "out", "seed", "threads")  # in the command for the best


@dataclass
class SweepRun:
    """One run of a sweep."""

    name: str
    path: Path
    setting: str
    values: dict[str, Any]
    seed: int
    env_steps: int  # its length
    state: str = "waiting"  # waiting, running, done, stopped, failed
    error: str = ""  # of one that failed
    exit_code: int = 0
    summary: dict[str, Any] = field(default_factory=dict)  # its summary.json, once it has ended

    def __fspath__(self) -> str:
        return str(self.path)


@dataclass(frozen=True)
class Outcome:
    """The runs of one setting."""

    setting: str
    values: dict[str, Any]
    runs: int  # asked for
    done: int
    row: Row | None  # of the runs that are done; None: no episode has ended in any
    config: RunConfig  # with the first seed, for training it again in another folder


@dataclass(frozen=True, repr=False)
class Sweep:
    """A sweep that has ended, or was interrupted."""

    path: Path
    plan: Plan
    runs: list[SweepRun]
    table: list[Outcome]  # best first
    exit_code: int = 0
    command: str = ""  # that trains the best setting alone

    @property
    def best(self) -> Outcome | None:
        return next((each for each in self.table if each.row is not None), None)

    @property
    def failed(self) -> list[SweepRun]:
        return [run for run in self.runs if run.state == "failed"]

    def __repr__(self) -> str:
        """The table, as a terminal shows it."""
        rows = cells(self)
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
        done = sum(run.state == "done" for run in self.runs)
        return "\n".join([f"<Sweep {str(self.path)!r}: {done} of {self.plan.total} runs done>", *lines])

    def _repr_html_(self) -> str:
        head, *rows = cells(self)
        lines = [f"<tr>{''.join(f'<th>{escape(cell)}</th>' for cell in head)}</tr>"]
        lines += [f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows]
        return f"<table>{''.join(lines)}</table>"


def outcomes(plan: Plan, settings: Sequence[Setting], runs: Sequence[SweepRun]) -> list[Outcome]:
    """Best first; settings without a result last."""
    table = []
    for setting in settings:
        own = [run for run in runs if run.setting == setting.name]
        done = [run for run in own if run.state == "done"]
        config = with_fields(plan.base, setting.values | {"seed": plan.seeds[0], "quiet": False})
        table.append(
            Outcome(setting.name, setting.values, len(own), len(done), _row([run.path for run in done]), config)
        )
    evaluates = all(each.row.evaluation is not None for each in table if each.row is not None)
    return sorted(table, key=lambda each: -_score(each.row, evaluates))


def _row(paths: Sequence[Path]) -> Row | None:
    try:
        rows = compare(paths)
    except UsageError:  # no episode has ended in any of them
        return None
    return rows[0] if len(rows) == 1 else None


def _score(row: Row | None, evaluates: bool) -> float:
    if row is None:
        return -math.inf
    return row.evaluation.value if evaluates and row.evaluation is not None else row.final.value


def final_value(path: Path) -> float | None:
    """What a trial is judged by: the evaluation of a run, or the mean of its last 100 episodes."""
    if (value := evaluated(path)) is not None:
        return value
    returns = read_curve(path).return_mean
    return float(returns[-1]) if len(returns) else None


def read_summary(path: Path) -> dict[str, Any]:
    """The summary.json of a run; empty if there is none."""
    try:
        found = msgspec.json.decode(folders.read(path, SUMMARY))
    except (CheckpointError, msgspec.DecodeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


# How it is shown


def cells(sweep: Sweep) -> list[list[str]]:
    """The table as text, its head first."""
    titles = sweep.plan.titles()
    evaluates = any(each.row is not None and each.row.evaluation is not None for each in sweep.table)
    steps = any(each.row is not None and each.row.steps is not None for each in sweep.table)
    head = [*(titles.values() or ["setting"]), "runs", "return"]
    head += ["evaluation"] * evaluates + ["steps to target"] * steps
    rows = []
    for each in sweep.table:
        row = [shown(each.values[path]) for path in titles] or ["base"]
        row += [str(each.runs) if each.done == each.runs else f"{each.done} of {each.runs}"]
        row += [interval(each.row.final if each.row else None)]
        row += [interval(each.row.evaluation if each.row else None)] * evaluates
        row += [_steps(each.row)] * steps
        rows.append(row)
    return [head, *rows]


def _steps(row: Row | None) -> str:
    if row is None or row.steps is None:
        return "–"
    return interval(row.steps) + ("" if row.reached == row.runs else f"; {row.reached} of {row.runs} reached")


def notes(sweep: Sweep) -> list[str]:
    """What must be known to read the table: of all settings, each note once."""
    return list(dict.fromkeys(each.row.note for each in sweep.table if each.row is not None and each.row.note))


def train_command(recipe: str, outcome: Outcome, plain: RunConfig, preset: str = "") -> str:
    """The command that trains a setting alone. `plain`: the config that follows from the recipe, the environment and
    the preset, if that has to be named."""
    config = outcome.config
    words = ["rookery", "train", recipe, "--env", config.env, *(["--preset", preset] if preset else [])]
    fields = {path: value for path, value in _changes(plain, config) if path not in outcome.values}
    for path, value in {**outcome.values, **fields}.items():
        words += _flag(path, value)
    return shlex.join(words)


def _changes(old: Any, new: Any, prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name in old.__dataclass_fields__:
        before, after = getattr(old, name), getattr(new, name)
        if hasattr(before, "__dataclass_fields__"):
            found += _changes(before, after, f"{prefix}{name}.")
        elif before != after and prefix + name not in NOT_SAID:
            found.append((prefix + name, after))
    return found


def _flag(path: str, value: Any) -> list[str]:
    name = path.replace("_", "-")
    if isinstance(value, bool):
        head, dot, tail = name.rpartition(".")
        return [f"--{head}{dot}{'' if value else 'no-'}{tail}"]
    if isinstance(value, list | tuple):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}", json.dumps(value) if isinstance(value, dict) else "none" if value is None else str(value)]


def write(sweep: Sweep) -> None:
    """summary.json and sweep.md."""
    best, folder, command = sweep.best, sweep.path, sweep.command
    record = {
        "recipe": sweep.plan.base.recipe, "env": sweep.plan.base.env, "exit_code": sweep.exit_code,
        "settings": [_record(each) for each in sweep.table],
        "runs": [
            {"name": run.name, "seed": run.seed, "state": run.state, "error": run.error, "exit_code": run.exit_code}
            for run in sweep.runs
        ],
        "best": None if best is None else {"values": best.values, "train": command},
    }  # fmt: skip
    folders.store(folder, SUMMARY, json.dumps(record, indent=2).encode() + b"\n")
    folders.store(folder, PAGE, _page(sweep, command).encode())


def _record(each: Outcome) -> dict[str, Any]:
    return {
        "setting": each.setting, "values": each.values, "runs": each.runs, "done": each.done,
        "result": None if each.row is None else as_numbers(each.row),
    }  # fmt: skip


def _page(sweep: Sweep, command: str) -> str:
    base, (head, *rows) = sweep.plan.base, cells(sweep)
    lines = [f"# {base.recipe} on {base.env}", "", _line(head), _line(["---"] * len(head)), *map(_line, rows), ""]
    lines += ["Interquartile mean over the runs of a setting, and its 95 % bootstrap interval. Best first."]
    lines += [f"{note[0].upper()}{note[1:]}." for note in notes(sweep)]
    lines += ["", "| failed | error |", "|---|---|"] if sweep.failed else []
    lines += [_line([run.name, run.error]) for run in sweep.failed]
    if command:
        lines += ["", "The best setting alone:", "", "```bash", command, "```"]
    return "\n".join(lines) + "\n"


def _line(row: Sequence[str]) -> str:
    return "| " + " | ".join(" ".join(cell.replace("|", r"\|").split()) for cell in row) + " |"
