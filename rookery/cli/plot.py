"""`rookery plot`: learning curves of runs, from their metrics.jsonl."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

from rookery.cli.flags import parse
from rookery.core.errors import UsageError


@dataclass(frozen=True)
class Plot:
    runs: tyro.conf.Positional[tuple[Path, ...]]  # run folders
    out: Path | None = None  # picture file (png, svg, pdf); none: RUN/report/curve.png, or curves.png for several runs


def plot(words: list[str]) -> int:
    args = parse(Plot, words, "rookery plot", "Draw the learning curves of one or more runs.")
    if not args.runs:
        raise UsageError("which run? rookery plot runs/...")
    from rookery.play import interface

    print(interface.plot(*args.runs, out=args.out))
    return 0
