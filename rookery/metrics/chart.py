"""Charts for the report page: SVG for lines and bars, HTML for the words beside them. Numbers in, markup out.

The SVG is stretched to the width of the page, and its strokes keep their thickness; the words do not stretch, so that
they can be read on a phone. A run has the same colour, dashes and letter in every chart. Everything that is not a
number of ours is escaped here. Not here: what is drawn (`report.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape as html_escape

import numpy as np

from rookery.core.printable import printable
from rookery.metrics.resumes import Mark, labels

COLOURS, DASHES = 7, 4  # of runs; a run beyond the colours has dashes
POINTS = 300  # of one line, at most twice as many
STAGES = 7  # colours of the parts of a bar
SIZE = 1000  # of the drawing, both ways
LABEL, NEAR = 0.1, 0.06  # height and width of a letter beside a line, as shares of the chart's
STEPS, SECONDS = "steps", "time"


@dataclass(frozen=True)
class Line:
    run: int
    steps: np.ndarray
    wall_s: np.ndarray
    values: np.ndarray
    dots: bool = False  # a mark for every point: few, and far from each other


def escape(text: object, limit: int = 2000) -> str:
    """Text from outside as the page shows it: no markup, no control characters, of bounded length."""
    words = str(text)
    words = words if len(words) <= limit else f"{words[:limit]}… ({len(words):,} characters)"
    return html_escape(printable(words), quote=True)


def letter(run: int) -> str:
    """A, B, …, Z, A1, …"""
    return chr(65 + run % 26) + (str(run // 26) if run >= 26 else "")


def badge(run: int) -> str:
    """The letter of a run, in its colour."""
    return f'<b class="badge r{run % COLOURS}">{letter(run)}</b>'


def chart(
    title: str, lines: Sequence[Line], several: bool, big: bool = False, target: float = math.nan,
    marks: Sequence[tuple[str, Mark]] = (),
) -> str:  # fmt: skip
    """One quantity over steps and over time; the page shows one of the two. "" where there is nothing to draw.

    `marks`: letters of runs, and where these were resumed; a big chart says what that changed.
    """
    lines = [line for line in map(_finite, lines) if len(line.values)]
    if not lines:
        return ""
    low, high = _range(np.concatenate([line.values for line in lines]), target)
    resumed = {
        axis: [(at(mark), f"{name}: {mark.text}" if several and mark.text else mark.text) for name, mark in marks]
        for axis, at in ((STEPS, lambda mark: mark.env_steps), (SECONDS, lambda mark: mark.wall_s))
    }
    plots = [_plot(axis, lines, low, high, several, target, title, resumed[axis], big) for axis in resumed]
    return (
        f'<figure class="{"big" if big else "small"}"><figcaption>{escape(title)}</figcaption>{"".join(plots)}</figure>'
    )


def bar(shares: Mapping[str, float], what: str) -> str:
    """Shares of a whole, one beside the other; the same as text below."""
    whole = sum(shares.values())
    if not whole > 0:
        return ""
    parts, words, at = [], [], 0.0
    for place, (name, share) in enumerate(shares.items()):
        width = share / whole * SIZE
        hatch = f'<rect class="s{place % STAGES}" x="{at:.1f}" width="{width:.1f}" height="10"/>'
        parts.append(hatch if width else "")
        if share > 0:
            words.append(f'<li><i class="key s{place % STAGES}"></i>{escape(name)} <b>{share / whole:.1%}</b></li>')
        at += width
    label = escape(what)
    return (
        f'<svg class="bar" viewBox="0 0 {SIZE} 10" preserveAspectRatio="none" role="img" aria-label="{label}">'
        f'{"".join(parts)}</svg><ul class="keys">{"".join(words)}</ul>'
    )


def strip(marks: Sequence[float], length: float) -> str:
    """When something happened: marks on a line of `length` seconds."""
    places = sorted({round(min(1.0, max(0.0, mark / length)) * SIZE) for mark in marks}) if length > 0 else [0]
    ticks = "".join(f'<path class="mark" d="M{place} 1V9"/>' for place in places)
    words = "".join(
        f'<span class="x" style="left:{share:.0%}">{seconds(share * length)}</span>' for share in (0.0, 0.5, 1.0)
    )
    return (
        f'<div class="strip"><svg viewBox="0 0 {SIZE} 10" preserveAspectRatio="none" role="img" '
        f'aria-label="{len(marks)} messages"><path class="grid" d="M0 5H{SIZE}"/>{ticks}</svg>{words}</div>'
    )


def short(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size <= abs(value) < 1e13:
            return f"{value / size:.4g}{unit}"
    return "0" if value == 0 else f"{value:.3g}"


def seconds(value: float) -> str:
    if not math.isfinite(value):
        return "?"
    if value < 120:
        return f"{value:.3g} s"
    return f"{value / 60:.3g} min" if value < 7200 else f"{value / 3600:.4g} h"


def thinned(line: np.ndarray) -> np.ndarray:
    """Indices of at most 2 * POINTS points, with the lowest and the highest of every part, so that peaks stay."""
    if len(line) <= 2 * POINTS:
        return np.arange(len(line))
    parts = np.array_split(np.arange(len(line)), POINTS)
    kept = [{part[0] + int(np.argmin(line[part])), part[0] + int(np.argmax(line[part]))} for part in parts]
    return np.array(sorted({0, len(line) - 1}.union(*kept)))


def ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Round numbers between two others."""
    step = 10.0 ** math.floor(math.log10((high - low) / about))
    step *= next(factor for factor in (1, 2, 5, 10) if step * factor * (about + 1) >= high - low)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, first + about + 3) if number * step <= high + 1e-9 * step]


def _finite(line: Line) -> Line:
    known = np.isfinite(line.values) & np.isfinite(line.steps) & np.isfinite(line.wall_s)
    steps, wall, values = line.steps[known], line.wall_s[known], line.values[known]
    kept = thinned(values)
    return Line(line.run, steps[kept], wall[kept], values[kept], line.dots)


def _range(values: np.ndarray, target: float) -> tuple[float, float]:
    low, high = float(values.min()), float(values.max())
    if math.isfinite(target):
        low, high = min(low, target), max(high, target)
    room = 0.04 * (high - low)
    if room <= 1e-9 * max(abs(low), abs(high)):  # a constant: its line is in the middle, or on the ground
        return (low, low + 1.0) if low == 0 else (low - 0.5 * abs(low), low + 0.5 * abs(low))
    return (0.0 if 0 <= low <= room * 6 else low - room), (0.0 if high == 0 else high + room)


def _plot(
    axis: str, lines: Sequence[Line], low: float, high: float, several: bool, target: float, title: str,
    marks: Sequence[tuple[float, str]], big: bool,
) -> str:  # fmt: skip
    places = [line.steps if axis == STEPS else line.wall_s for line in lines]
    last = max(float(x.max()) for x in places)
    last = last if last > 0 else 1.0
    tell: Callable[[float], str] = short if axis == STEPS else seconds

    def up(value: float) -> float:
        return (1 - (value - low) / (high - low)) * SIZE

    drawn, words = [], []
    for tick in ticks(low, high):
        drawn.append(f'<path class="grid" d="M0 {up(tick):.0f}H{SIZE}"/>')
        words.append(f'<span class="y" style="top:{up(tick) / SIZE:.1%}">{short(tick)}</span>')
    for tick in ticks(0.0, last, 3):
        words.append(f'<span class="x" style="left:{tick / last:.1%}">{tell(tick)}</span>')
    if math.isfinite(target):
        drawn.append(f'<path class="target" d="M0 {up(target):.0f}H{SIZE}"/>')
        words.append(f'<span class="goal" style="top:{up(target) / SIZE:.1%}">target {target:g}</span>')
    marks = [mark for mark in marks if 0 <= mark[0] <= last]
    drawn += [f'<path class="resumed" d="M{at / last * SIZE:.0f} 0V{SIZE}"/>' for at, _ in marks]
    for at, text in labels(marks, last) if big else ():
        words.append(f'<span class="changed" style="left:{at / last:.1%}">{escape(text)}</span>')
    for line, x in zip(lines, places):
        points = list(zip((x / last * SIZE).round().astype(int), [round(up(value)) for value in line.values]))
        colour = f"r{line.run % COLOURS} d{line.run // COLOURS % DASHES}"
        if line.dots or len(points) == 1:
            drawn += [f'<path class="dot {colour}" d="M{across} {height}h.1"/>' for across, height in points]
        path = " ".join(f"{across},{height}" for across, height in points)
        drawn.append(f'<polyline class="line {colour}" data-run="{letter(line.run)}" points="{path}"/>')
    if several:
        ends = _apart([(x[-1] / last, up(line.values[-1]) / SIZE) for line, x in zip(lines, places)])
        for line, x, end in zip(lines, places, ends):
            place = f"left:{x[-1] / last:.1%};top:{end:.1%}"
            words.append(f'<b class="end r{line.run % COLOURS}" style="{place}">{letter(line.run)}</b>')
    return (
        f'<div class="plot by-{axis}" data-axis="{axis}" data-last="{last:.6g}" data-low="{low:.6g}" '
        f'data-high="{high:.6g}"><svg viewBox="0 0 {SIZE} {SIZE}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(title)}">{"".join(drawn)}</svg>{"".join(words)}</div>'
    )


def _apart(ends: Sequence[tuple[float, float]]) -> list[float]:
    """Heights of labels at the ends of lines, moved so that none covers another, in the same order."""
    heights = [height for _, height in ends]
    placed: list[int] = []
    for index in sorted(range(len(ends)), key=lambda index: -heights[index]):  # from below: there is room above
        for other in placed:
            if abs(ends[other][0] - ends[index][0]) < NEAR and heights[index] > heights[other] - LABEL:
                heights[index] = heights[other] - LABEL
        placed.append(index)
    return heights
