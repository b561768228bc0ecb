"""`rookery report`: one HTML page about runs, from their folders."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

from rookery.cli.flags import parse
from rookery.core.errors import UsageError


@dataclass(frozen=True)
class Report:
    runs: tyro.conf.Positional[tuple[Path, ...]]  # run folders
    out: Path | None = None  # the page; none: RUN/report/index.html, or report.html for several runs


def report(words: list[str]) -> int:
    args = parse(Report, words, "rookery report", "Write one HTML page about one or more runs.")
    if not args.runs:
        raise UsageError("which run? rookery report runs/...")
    from rookery.play import interface

    print(interface.report(*args.runs, out=args.out))
    return 0
