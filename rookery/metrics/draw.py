"""How a run looks in the terminal: progress, return, losses, lag, and where the time goes.

Pure functions from a snapshot to text: `render` for a terminal, `plain_line` for a log. They compute nothing about the
run, and any key of the snapshot may be missing or None. When it is drawn, and where to, is `panel.py`.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rich.console import Console, ConsoleOptions
from rich.segment import Segment
from rich.text import Text

from rookery.metrics.curve import braille
from rookery.metrics.split import STAGES

Snapshot = Mapping[str, Any]

# Green is work that makes the policy better, red is time lost; the bar and its legend have the same order.
COLOURS = {
    "env": "cyan",
    "inference": "blue",
    "learn": "green",
    "transfer": "yellow",
    "wait": "red",
    "evaluate": "magenta",
    "other": "grey58",
}
FAINT, STRONG, GOOD, WARN, BAD = "grey58", "bold", "green", "yellow", "bold red"
LEFT = 42  # columns of the numbers beside the curve
WIDE = 132  # columns; from here on the curve is higher too
HIGHER = 3  # lines
LEAST_CURVE = 20  # columns; on a narrower terminal the curve is left out
TABLE = {
    "uses_per_batch": "uses/batch",
    "ring": "ring",
    "replayed_lag_mean": "replayed lag",
}  # of queues


def plain_line(snapshot: Snapshot) -> str:
    """The run in one line of ASCII, for logs."""
    get = snapshot.get
    parts = [
        _duration(get("wall_s")),
        f"{_count(get('env_steps'))}/{_count(get('env_steps_limit'))} steps",
        f"{_count(get('steps_per_s'))}/s",
        f"return {_number(get('return_mean'))} (std {_number(get('return_std'))}, {_count(get('episodes'))} episodes)",
        *(f"{name} {_number(value)}" for name, value in _items(get("info"))),
        _evaluated(get("evaluation")),
        *(f"{name} {_number(value)}" for name, value in _items(get("losses"))),
        " ".join(f"{name} {share:.0%}" for name, share in _shares(snapshot) if share >= 0.005),
        f"restarts {_count(get('restarts'))}" if get("restarts") else "",
        *(f"! {message}" for message in list(get("messages") or [])[-1:]),
    ]
    return " | ".join(part for part in parts if part).encode("ascii", "replace").decode()


def _evaluated(last: Mapping[str, Any] | None) -> str:
    return f"evaluated {_number(last['return_mean'])} at {_count(last['env_steps'])}" if last else ""


class Frame:
    """Lines of text in a box. Rich's own panel measures every line several times; this takes half the time."""

    def __init__(self, lines: list[Text], title: Text, corner: Text, width: int):
        for words in (title, corner):
            words.truncate(width - 1, overflow="ellipsis")
        rule = "─" * (width - 1 - title.cell_len)
        self.lines = [Text.assemble(("╭─ ", FAINT), title, (f" {rule}╮", FAINT))]
        for line in lines:
            line.truncate(width, overflow="ellipsis", pad=True)
            self.lines.append(Text.assemble(("│ ", FAINT), line, (" │", FAINT)))
        rule = "─" * (width - 1 - corner.cell_len)
        self.lines.append(Text.assemble((f"╰{rule} ", FAINT), corner, (" ─╯", FAINT)))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for line in self.lines:
            yield from line.render(console)
            yield Segment.line()


def render(snapshot: Snapshot, columns: int) -> Frame:
    get = snapshot.get
    width = max(16, columns - 4)  # inside border and padding
    blocks = [[_progress(snapshot, width)], _numbers(snapshot, width), _facts(snapshot, width)]
    blocks += [_time_split(snapshot, width), _remarks(snapshot, width)]
    lines = [line for block in blocks if block for line in (*block, Text())][:-1]
    title = [("rookery", STRONG), *((str(get(key)), "") for key in ("recipe", "env", "preset") if get(key))]
    corner = [(str(get(key)), FAINT) for key in ("topology", "device") if get(key)]
    corner += [(f"seed {get('seed')}", FAINT)] if get("seed") is not None else []
    return Frame(lines, _joined(title), _joined(corner), width)


def _progress(snapshot: Snapshot, width: int) -> Text:
    steps, limit = _finite(snapshot.get("env_steps")), _finite(snapshot.get("env_steps_limit"))
    share = min(1.0, max(0.0, (steps or 0) / limit)) if limit else 0.0
    eta = f", {_duration(snapshot.get('eta_s'))} left" if _finite(snapshot.get("eta_s")) and share < 1 else ""
    wall = _duration(snapshot.get("wall_s"))
    exact = f" {math.floor(share * 100):3d}%   {_count(steps)} of {_count(limit)} steps   {wall}{eta}"
    short = f" {math.floor(share * 100):3d}% {_short(steps)}/{_short(limit)} {wall}{eta}"
    tail = exact if width - len(exact) >= 16 else short
    room = max(4, width - len(tail))
    done = round(share * room)
    return Text.assemble(("━" * done, GOOD), ("━" * (room - done), FAINT), tail)


def _numbers(snapshot: Snapshot, width: int) -> list[Text]:
    """The return and the speed, with the curve of the return beside them where there is room."""
    get = snapshot.get
    of_evaluation = get("target_of") == "evaluation"
    style, goal = _goal(snapshot, get("return_mean"), not of_evaluation)
    told = "   ".join(f"{name} {_number(value)}" for name, value in _items(get("info")))
    rows = [
        ("return", _number(get("return_mean")), style, f" ± {_number(get('return_std'))}{goal}"),
        ("episodes", _count(get("episodes")), "", f"   mean length {_number(get('length_mean'))}"),
        ("steps/s", _count(get("steps_per_s")), STRONG, ""),
        ("updates", _count(get("updates")), "", ""),
    ]
    rows[2:2] = [("", told, "", "")] if told else []
    if evaluation := get("evaluation"):
        style, goal = _goal(snapshot, evaluation["return_mean"], of_evaluation)
        more = goal or f", best {_number(evaluation['best']['return_mean'])}"
        at = f" at {_short(evaluation['env_steps'])}{more}"
        rows.append(("evaluated", _number(evaluation["return_mean"]), style, at))
    lines = [
        Text.assemble((f"{label:<10}", FAINT), (value, style), (more, FAINT)) for label, value, style, more in rows
    ]
    room = width - LEFT - 9
    if room >= LEAST_CURVE:
        lines += [Text() for _ in range(HIGHER)] if width >= WIDE else []
        curve, low, high = braille(_thinned(list(get("history") or []), max(256, 2 * room)), room, len(lines))
        scale = {0: _number(high), len(lines) - 1: _number(low)} if curve and low < high else {}
        for index, line in enumerate(lines):
            line.truncate(LEFT - 1, overflow="ellipsis", pad=True)
            line.append(f"{scale.get(index, ''):>9} ", FAINT)
            line.append(curve[index] if curve else "", GOOD)
    return lines


def _goal(snapshot: Snapshot, mean: Any, counts: bool) -> tuple[str, str]:
    """The style of a return, and words about the target if it `counts` for this one."""
    target, value = _finite(snapshot.get("target_return")), _finite(mean)
    if target is None or not counts:
        return STRONG, ""
    return f"{STRONG} {GOOD}" if value is not None and value >= target else STRONG, f"   target {_number(target)}"


def _facts(snapshot: Snapshot, width: int) -> list[Text]:
    """Losses, lag, queue and restarts in columns that do not move; then the ledger."""
    get = snapshot.get
    cells = [
        (name.replace("_", " "), _number(value), BAD if _bad(value) else "") for name, value in _items(get("losses"))
    ]
    if get("lag_mean") is not None or get("lag_max") is not None:
        cells.append(("lag", f"{_number(get('lag_mean'))} (max {_number(get('lag_max'))})", ""))
    table = get("replay") or {}
    if "size" in table:
        cells.append(("memory", _count(table["size"]), ""))
        cells.append(("draws/item", _number(table.get("sample_insert_ratio")), ""))
    elif get("queue_depth") is not None:
        cells.append(("queue", _count(get("queue_depth")), ""))
    cells += [(label, _number(table[name]), "") for name, label in TABLE.items() if name in table]
    if "actors_idle" in table:
        cells += [(f"{who} idle", f"{table[f'{who}_idle']:.0%}", "") for who in ("learner", "actors")]
    if "slowest" in (ranks := get("ranks") or {}):
        cells.append(("slowest rank", f"{ranks['slowest']} of {ranks['size']}", ""))
        cells.append(("lost to it", f"{ranks['lost']:.0%}", WARN if ranks["lost"] > 0.2 else ""))
        if ranks["cut"]:
            cells.append(("rollouts cut", f"{ranks['cut']:.0%}", ""))
    if get("restarts") is not None:
        cells.append(("restarts", _count(get("restarts")), WARN if get("restarts") else ""))
    lines = _grid(cells, width)
    entries = list(_ledger(_items(get("ledger"))))
    if entries:
        lines += _flow([Text.assemble(("ledger  ", FAINT), entries[0]), *entries[1:]], width)
    return lines


def _ledger(items: Iterable[tuple[str, Any]], inside: str = "") -> Iterator[Text]:
    """Every entry that is not zero; steps that were lost stand out, and an imbalance more so."""
    for name, value in items:
        if isinstance(value, Mapping):
            yield from _ledger(value.items(), f"{name} ")
        elif name in ("balance", "imbalance"):
            yield Text("balanced", GOOD) if not value else Text(f"{_count(value)} unaccounted", BAD)
        elif value:
            lost = "drop" in inside + name
            words = f" {inside}({name})" if inside else f" {name}"
            yield Text.assemble((_count(value), WARN if lost else ""), (words.replace("_", " "), FAINT))


def _time_split(snapshot: Snapshot, width: int) -> list[Text]:
    shares = list(_shares(snapshot))
    if not shares:
        return []
    bar, covered, filled = Text(), 0.0, 0
    total = sum(share for _, share in shares)
    for name, share in shares:
        covered += share / total
        cells = round(covered * width) - filled  # rounding the running sum: the bar is always full
        bar.append("█" * cells, COLOURS[name])
        filled += cells
    legend = [Text.assemble(("■ ", COLOURS[name]), name, (f" {share:3.0%}", FAINT)) for name, share in shares]
    return [bar, *_flow(legend, width, gap="  ")]


def _remarks(snapshot: Snapshot, width: int) -> list[Text]:
    """What limits the run, and the newest messages, two lines each at most."""
    said = [(f"→ {snapshot['advice']}", STRONG)] if snapshot.get("advice") else []
    said += [(f"! {message}", WARN) for message in list(snapshot.get("messages") or [])[-3:]]
    return [
        Text(line, style)
        for words, style in said
        for line in textwrap.wrap(words, width, subsequent_indent="  ", max_lines=2, placeholder="…")
    ]


def _grid(cells: list[tuple[str, str, str]], width: int) -> list[Text]:
    columns = max(1, width // 25)  # of the longest name, explained variance, little is cut
    lines = []
    for start in range(0, len(cells), columns):
        line = Text()
        for label, value, style in cells[start : start + columns]:
            room = width // columns - 2
            name = Text(label, FAINT)
            name.truncate(max(3, room - len(value) - 1), overflow="ellipsis")  # the number matters more
            cell = Text.assemble(name, " ", (value, style))
            cell.truncate(room, overflow="ellipsis", pad=True)
            line.append_text(cell).append("  ")
        lines.append(line)
    return lines


def _flow(parts: list[Text], width: int, gap: str = " · ") -> list[Text]:
    """Parts one after another, on as many lines as they need."""
    lines = [Text()]
    for part in parts:
        if lines[-1].cell_len and lines[-1].cell_len + len(gap) + part.cell_len > width:
            lines.append(Text())
        if lines[-1].cell_len:
            lines[-1].append(gap, FAINT)
        lines[-1].append_text(part)
    return lines


def _joined(parts: list[tuple[str, str]]) -> Text:
    text = Text()
    for index, (part, style) in enumerate(parts):
        text.append(" · " if index else "", FAINT)
        text.append(part, style)
    return text


def _shares(snapshot: Snapshot) -> Iterator[tuple[str, float]]:
    shares = dict(_items(snapshot.get("shares")))
    for name in STAGES:
        share = _finite(shares.get(name))
        if share is not None and share > 0:
            yield name, share


def _items(mapping: Mapping[str, Any] | None) -> Iterable[tuple[str, Any]]:
    return mapping.items() if mapping else ()


def _thinned(points: list, most: int) -> list:
    step = max(1, -(-len(points) // most))
    return points[-1::-step][::-1]  # the newest always stays


def _finite(value: Any) -> float | None:
    try:
        return float(value) if value is not None and math.isfinite(value) else None
    except (TypeError, ValueError):
        return None


def _bad(value: Any) -> bool:
    return value is not None and _finite(value) is None


def _number(value: Any) -> str:
    """Four digits that matter, whatever the size."""
    number = _finite(value)
    if number is None:
        return "-" if value is None else "nan"
    return f"{number:,.0f}" if 1e4 <= abs(number) < 1e6 else f"{number:.4g}"


def _count(value: Any) -> str:
    number = _finite(value)
    return "-" if number is None else f"{number:,.0f}"


def _short(value: Any) -> str:
    number = _finite(value)
    if number is None:
        return "-"
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"


def _duration(value: Any) -> str:
    seconds = _finite(value)
    if seconds is None:
        return "-"
    minutes, seconds = divmod(int(max(0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
