"""`rookery export`: the policy of a run as one file for other programs, and what that file takes and gives."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

from rookery.cli.flags import parse
from rookery.cli.runs import open_run, trusted
from rookery.cli.show import console, count, escape, facts, warn

if TYPE_CHECKING:
    from rookery.play.graph import Port

ABOUT = "Write the policy as one file that needs no Rookery: greedy actions of ready-made observations."


@dataclass(frozen=True)
class Export:
    run: tyro.conf.Positional[Path]  # run folder, or one of its checkpoints
    format: Literal["onnx", "torch"] = "onnx"  # onnx: any runtime of ONNX; torch: a program of torch.export
    out: Path | None = None  # the file, .onnx or .pt2; none: RUN/export/<checkpoint>.onnx
    best: bool = False  # the best checkpoint instead of the newest
    trust: tuple[str, ...] = ()  # modules that the run may import and call, besides those on the list of Rookery
    debug: bool = False  # show tracebacks


def export(words: list[str]) -> int:
    args = parse(Export, words, "rookery export", ABOUT)
    args = dataclasses.replace(args, trust=trusted(words))  # of several --trust, all count
    open_run(args.run, args.trust, ["rookery", "export", *words])
    from rookery.play import interface

    with console().status("tracing the networks …"):
        done = interface.export(
            args.run, args.out, format=args.format, which="best" if args.best else "newest", trust=args.trust, tell=warn
        )
    console().print(facts({
        "file": f"[bold]{escape(str(done.path))}[/], {done.path.stat().st_size / 1024:,.0f} KiB",
        "policy": f"{escape(str(args.run))}, {escape(done.checkpoint)} ({done.env_steps:,} steps)",
        **_rows("input", done.inputs), **_rows("output", done.outputs),
        "checked": f"{count(done.rows, 'random observation')}: the same actions as the policy's, largest difference "
        f"{done.difference:.1g}",
    }))  # fmt: skip
    return 0


def _rows(what: str, ports: list[Port]) -> dict[str, str]:
    """One row for each: name, type and shape, and what it is."""
    return {
        f"{what} {escape(port.name)}": f"{port.dtype} {escape(str(['batch', *port.shape]).replace(chr(39), ''))}  "
        f"[dim]{escape(port.about)}[/]"
        for port in ports
    }
