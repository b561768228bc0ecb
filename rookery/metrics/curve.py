"""A curve drawn in characters: 2 x 4 dots to a cell, in Unicode's braille block. Text in, text out; no terminal."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # [column][row from the top]


def braille(points: Sequence[tuple[float, float]], columns: int, rows: int) -> tuple[list[str], float, float]:
    """Lines with the curve through `points` (x ascending), and the lowest and highest y; no lines without points."""
    points = [(x, y) for x, y in points if x is not None and y is not None and math.isfinite(x) and math.isfinite(y)]
    if not points or columns < 1 or rows < 1:
        return [], math.nan, math.nan
    width, height = 2 * columns, 4 * rows
    low, high = min(y for _, y in points), max(y for _, y in points)
    first, last = points[0][0], points[-1][0]
    cells = [[0] * columns for _ in range(rows)]
    previous = None  # height of the curve in the column before
    for column, y in enumerate(_resampled(points, first, last, width)):
        if y is None:
            previous = None
            continue
        dot = round((y - low) / (high - low) * (height - 1)) if high > low else height // 2
        previous = dot if previous is None else previous
        for level in range(min(dot, previous), max(dot, previous) + 1):
            row = height - 1 - level
            cells[row // 4][column // 2] |= _DOTS[column % 2][row % 4]
        previous = dot
    return ["".join(chr(0x2800 + cell) if cell else " " for cell in row) for row in cells], low, high


def _resampled(points: list[tuple[float, float]], first: float, last: float, width: int) -> list[float | None]:
    """One y per dot column: the mean of the points that fall into it, or the line between its neighbours."""
    sums, counts = [0.0] * width, [0] * width
    for x, y in points:
        column = int((x - first) / (last - first) * (width - 1)) if last > first else 0
        column = min(max(column, 0), width - 1)
        sums[column] += y
        counts[column] += 1
    known = [column for column in range(width) if counts[column]]
    means = {column: sums[column] / counts[column] for column in known}
    values: list[float | None] = [means.get(column) for column in range(width)]
    for left, right in itertools.pairwise(known):
        for column in range(left + 1, right):
            share = (column - left) / (right - left)
            values[column] = means[left] * (1 - share) + means[right] * share
    return values
