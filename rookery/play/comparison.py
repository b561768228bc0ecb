"""What `rookery.compare` returns: rows, and their table as text and in a notebook. The statistics are in `metrics`."""

from __future__ import annotations

import math
from html import escape

from rookery.metrics.compare import Row
from rookery.metrics.statistic import Estimate

HEAD = ["setting", "environment", "runs", "return", "evaluation", "steps to return"]


class Comparison(list[Row]):
    """One row for each setting."""

    def __repr__(self) -> str:
        """The table, as a terminal shows it, with what must be known to read it."""
        rows = [HEAD, *cells(self)]
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
        return "\n".join([*lines, *notes(self)])

    def _repr_html_(self) -> str:
        lines = [f"<tr>{''.join(f'<th>{name}</th>' for name in HEAD)}</tr>"]
        lines += [f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in cells(self)]
        return f"<table>{''.join(lines)}</table>" + "".join(f"<p>{escape(note)}</p>" for note in notes(self))


def cells(rows: list[Row]) -> list[list[str]]:
    """Each row as text, in the columns of HEAD."""
    return [
        [each.label, each.env, str(each.runs), interval(each.final), interval(each.evaluation), _steps(each)]
        for each in rows
    ]


def notes(rows: list[Row]) -> list[str]:
    return [f"{each.label}: {each.note}" for each in rows if each.note]


def interval(estimate: Estimate | None) -> str:
    """A value with its interval."""
    if estimate is None:
        return "–"
    value = number(estimate.value) if math.isfinite(estimate.value) else "not reached"
    high = number(estimate.high) if math.isfinite(estimate.high) else "∞"
    return value + (f" ({number(estimate.low)} to {high})" if math.isfinite(estimate.low) else "")


def _steps(row: Row) -> str:
    if row.steps is None:
        return "–"
    return f"{interval(row.steps)}; {row.reached} of {row.runs} reached {number(row.target)}"


def number(value: float) -> str:
    """About four digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
