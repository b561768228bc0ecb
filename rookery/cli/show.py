"""How results look in a terminal: one console, small tables, numbers of sensible length."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping

from rich import markup
from rich.console import Console
from rich.table import Table

from rookery.core.printable import printable

__all__ = ["console", "count", "escape", "facts", "number", "only_answer", "warn"]


def console(piped: int = 400) -> Console:
    """Standard output, as it is now; `piped` columns where it is no terminal, so that paths are not broken."""
    terminal = sys.stdout.isatty()
    width = None if terminal or "COLUMNS" in os.environ else piped
    forced = None if terminal else False  # FORCE_COLOR, which notebooks set, would also let a spinner turn in a file
    # No emoji: zoo:snake is an id.
    return Console(file=sys.stdout, highlight=False, emoji=False, width=width, force_terminal=forced)


def escape(text: str) -> str:
    """Text from outside, as it is: neither markup of Rich nor anything that a terminal obeys."""
    return markup.escape(printable(text))


def facts(rows: Mapping[str, str]) -> Table:
    """Name and value, one per line. Values may have markup: `escape` what comes from outside."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 1))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def number(value: float) -> str:
    """About four digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def count(amount: int, what: str) -> str:
    return f"{amount:,} {what}" if amount == 1 else f"{amount:,} {what}s"


def warn(text: str) -> None:
    """A line on standard error about something that the user should know."""
    print(f"warning: {printable(text)}", file=sys.stderr)


@contextlib.contextmanager
def only_answer() -> Iterator[None]:
    """Nothing but the answer reaches standard output: what libraries print inside goes to standard error."""
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        if sys.__stdout__ is not None:
            with contextlib.suppress(OSError, ValueError):
                sys.__stdout__.flush()  # what is still in its buffer is not the answer either
        os.dup2(saved, 1)
        os.close(saved)
