"""`rookery compare`: what several runs of each setting tell, as a table."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from rookery.cli.flags import parse
from rookery.cli.show import console, escape
from rookery.core.errors import UsageError

if TYPE_CHECKING:
    from rookery.metrics.compare import Row


@dataclass(frozen=True)
class Compare:
    runs: tyro.conf.Positional[tuple[Path, ...]]  # run folders
    target_return: float | None = None  # the return for "steps to"; none: the one that the runs were given
    score: tuple[str, ...] = ()  # ENV=LOW:HIGH, the returns that count as 0 and 1, for a row over environments
    json: bool = False  # print the result as JSON, and nothing else


def compare(words: list[str]) -> int:
    about = "Compare runs: interquartile mean and 95 % bootstrap interval over the seeds of each setting."
    args = parse(Compare, words, "rookery compare", about)
    if not args.runs:
        raise UsageError("which runs? rookery compare runs/...")
    scores = dict(map(_scale, args.score))
    from rookery.metrics.compare import as_numbers
    from rookery.play import interface

    rows = interface.compare(*args.runs, target=args.target_return, scores=scores)
    if args.json:
        print(json.dumps([as_numbers(row) for row in rows], indent=2))
        return 0
    _show(rows)
    return 0


def _scale(word: str) -> tuple[str, tuple[float, float]]:
    env, _, bounds = word.rpartition("=")
    low, _, high = bounds.partition(":")
    try:
        return env, (float(low), float(high))
    except ValueError:
        raise UsageError(f"--score {word}: write ENV=LOW:HIGH, such as CartPole-v1=0:500") from None


def _show(rows: list[Row]) -> None:
    from rich.table import Table

    from rookery.play.comparison import HEAD, cells

    table = Table(box=None, padding=(0, 2, 0, 1), header_style="dim")
    for name in HEAD:
        table.add_column(name, justify="right" if name == "runs" else "left", overflow="fold")
    for line in cells(rows):
        table.add_row(*map(escape, line))
    console().print(table)
    for row in rows:
        if row.note:
            console().print(f" [yellow]{escape(row.label)}[/]: {escape(row.note)}")
    console().print(" [dim]interquartile mean over runs, and its 95 % bootstrap interval[/]")
