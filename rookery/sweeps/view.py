"""How a sweep looks while it runs: a table of the runs in a terminal, a line for every change elsewhere.

A viewer only: what it shows comes from the metrics.jsonl of the runs, it never blocks, and its own failure never stops
a sweep.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from rookery.core.printable import printable
from rookery.metrics.output import best_effort, text
from rookery.metrics.panel import Terminal
from rookery.metrics.plot import number
from rookery.play.comparison import number as short
from rookery.storage import folder as folders
from rookery.sweeps.result import SweepRun

EVERY = 0.5  # seconds between two drawings
TAIL = 1 << 16  # bytes of metrics.jsonl in which the last record is
STYLES = {"running": "cyan", "done": "green", "failed": "bold red", "stopped": "yellow", "waiting": "grey58"}
PATIENCE = 1.0  # seconds for the last lines


class View(Protocol):
    def update(self, runs: Sequence[SweepRun], total: int) -> None: ...
    def say(self, text: str) -> None: ...


class Quiet:
    """Only what a caller must know."""

    def update(self, runs: Sequence[SweepRun], total: int) -> None:
        pass

    def say(self, text: str) -> None:
        with contextlib.suppress(Warning):  # a filter may turn it into an exception
            warnings.warn(text, stacklevel=3)


class Lines:
    """For a log: a line when a run begins and when it ends."""

    def __init__(self, console: Console):
        self._console = console
        self._states: dict[str, str] = {}

    def update(self, runs: Sequence[SweepRun], total: int) -> None:
        ended = sum(run.state in ("done", "failed") for run in runs)
        for run in runs:
            if run.state != self._states.get(run.name, "waiting"):
                self._states[run.name] = run.state
                about = f", return {short(found)}" if math.isfinite(found := _returned(run)) else ""
                self.say(f"{run.name}: {run.state}{about} ({ended} of {total} runs have ended)")

    def say(self, text: str) -> None:
        with contextlib.suppress(Exception):
            self._console.print(escape(printable(text)), soft_wrap=True)


class Board:
    """For a terminal: the runs that train and those that ended last, as many as there is room for."""

    def __init__(self, console: Console, waiting: Any):
        """`waiting()`: bytes that the terminal has not taken yet."""
        self._console, self._waiting = console, waiting
        self._live: Live | None = None
        self._next = 0.0

    def update(self, runs: Sequence[SweepRun], total: int) -> None:
        now = time.monotonic()
        if now < self._next or self._waiting():
            return
        self._next = now + EVERY
        self._draw(runs, total)

    def say(self, text: str) -> None:
        with contextlib.suppress(Exception):
            self._console.print(f"[yellow]![/] {escape(printable(text))}")

    def close(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            with contextlib.suppress(Exception):
                live.update("", refresh=True)
                live.stop()

    def _draw(self, runs: Sequence[SweepRun], total: int) -> None:
        with contextlib.suppress(Exception):  # a closed pipe, a terminal without Unicode
            if self._live is None:
                self._live = Live(console=self._console, auto_refresh=False, transient=True)
                self._live.start()
            room = max(3, self._console.size.height - 5)
            self._live.update(board(runs, total, room), refresh=True)


def board(runs: Sequence[SweepRun], total: int, room: int) -> Table:
    """The table of a sweep in so many lines."""
    progress = {run.name: _progress(run.path) for run in runs if run.state == "running"}
    table = Table(box=None, padding=(0, 2, 0, 1), header_style="dim", title_justify="left", title_style="")
    table.title = _title(runs, total, progress)
    table.add_column("run", overflow="ellipsis")  # the only one that becomes narrower
    for name in ("state", "steps", "return", "left"):
        table.add_column(name, justify="left" if name == "state" else "right", no_wrap=True)
    order = {"running": 0, "failed": 1, "stopped": 2, "done": 3, "waiting": 4}
    ordered = sorted(runs, key=lambda run: order[run.state])
    for run in ordered[:room]:
        record = progress.get(run.name) or run.summary
        steps, value = number(record.get("env_steps")), number(record.get("return_mean"))
        left = _seconds(run, record) if run.state == "running" else math.nan
        table.add_row(
            escape(printable(run.name)), f"[{STYLES[run.state]}]{run.state}[/]",
            f"{steps / run.env_steps:.0%}" if math.isfinite(steps) else "",
            short(value) if math.isfinite(value) else "", duration(left),
        )  # fmt: skip
    if len(ordered) > room:
        table.add_row(f"[grey58]… and {len(ordered) - room} more[/]", "", "", "", "")
    return table


def _title(runs: Sequence[SweepRun], total: int, progress: dict[str, dict[str, Any]]) -> str:
    counts = {state: sum(run.state == state for run in runs) for state in STYLES}
    words = [f"[bold]{counts['done']}[/] of [bold]{total}[/] runs done", f"{counts['running']} running"]
    words += [f"[bold red]{counts['failed']} failed[/]"] * bool(counts["failed"])
    speed = sum(max(0.0, number(each.get("steps_per_s"))) for each in progress.values() if each)
    mean = sum(run.env_steps for run in runs) / len(runs) if runs else 0.0
    steps = mean * (total - len(runs)) + sum(run.env_steps for run in runs if run.state in ("waiting", "running"))
    steps -= sum(number(each.get("env_steps")) for each in progress.values() if each)
    if speed > 0 and math.isfinite(steps / speed):
        words.append(f"about {duration(steps / speed)} left")
    return ", ".join(words)


def _seconds(run: SweepRun, record: dict[str, Any]) -> float:
    """That a run has still to train, at its present speed."""
    speed, steps = number(record.get("steps_per_s")), number(record.get("env_steps"))
    return max(0.0, (run.env_steps - steps) / speed) if speed > 0 else math.nan


def duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return ""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def _returned(run: SweepRun) -> float:
    return number(run.summary.get("return_mean"))


def _progress(path: Path) -> dict[str, Any]:
    """The last training record of a run; empty if there is none yet."""
    try:
        with open(folders.open_regular(path, "metrics.jsonl"), "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            lines = file.read(TAIL).splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        with contextlib.suppress(msgspec.DecodeError, RecursionError):
            record = msgspec.json.decode(line)
            if isinstance(record, dict) and record.get("kind") == "train":
                return record
    return {}


@contextlib.contextmanager
def opened_view(quiet: bool) -> Iterator[View]:
    """The view for standard output as it is."""
    if quiet:
        yield Quiet()
        return
    writer = best_effort(sys.stdout)
    own = writer is not None and writer is not getattr(sys.stdout, "buffer", None)
    console = Terminal(emoji=False, highlight=False, file=None if writer is None else text(writer, sys.stdout))
    terminal = console.is_terminal and not console.is_dumb_terminal and sys.stdout.isatty()
    view: Board | Lines = (
        Board(console, lambda: 0 if writer is None else writer.waiting) if terminal else Lines(console)
    )
    try:
        yield view
    finally:
        if isinstance(view, Board):
            view.close()
        if writer is not None:
            writer.drain(PATIENCE)
            if own:
                writer.give_up()
