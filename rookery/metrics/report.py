"""One HTML page about one or more runs, from their folders alone: curves, losses, time, ledger, messages, config.

The page stands by itself: no network, no server, no library (`page.py`). Charts are drawn by `chart.py` from what
`recorded.py` has read. Everything that comes from a run folder is escaped.
"""

from __future__ import annotations

import base64
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from rookery.core.errors import StorageError, UsageError
from rookery.core.printable import shown
from rookery.metrics.chart import Line, badge, bar, chart, escape, letter, seconds, short, strip
from rookery.metrics.page import page
from rookery.metrics.plot import number, origin, time_at
from rookery.metrics.recorded import Recorded, read_run
from rookery.metrics.resumes import Mark
from rookery.metrics.split import STAGES
from rookery.storage import folder as folders

IN_RUN = "report/index.html"
COUNTS = ("actors", "envs_per_actor")
DOTS = 40  # evaluations of one curve that are marked
CHARTS = 30  # of one group, such as the losses
SMALL_FILM = 2 << 20  # bytes; a larger film is linked
FILM_ROOM = 8 << 20  # bytes of all films within one page
TYPES = {".mp4": "video/mp4", ".webm": "video/webm", ".mov": "video/quicktime"}
NOT_LOSSES = ("losses/minibatches",)
ENDS = {
    "": "not yet",
    "env_steps": "all steps taken",
    "target_return": "target return reached",
    "interrupted": "interrupted",
    "requeue": "asked to stop",
    "callback": "stopped by a callback",
}


def write_report(runs: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Write the page and return where it is: `report/index.html` of a single run, else `report.html`, or `out`."""
    paths = list(dict.fromkeys(Path(run) for run in runs))
    if not paths:
        raise UsageError("which run? give at least one run folder")
    within = paths[0] if out is None and len(paths) == 1 else None
    target = Path(within, IN_RUN) if within is not None else Path(out or "report.html")
    text = render([read_run(path) for path in paths], target.parent).encode("utf-8", "replace")
    if within is not None:
        return folders.store(within, IN_RUN, text)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(text)
    except OSError as error:
        raise StorageError(f"{target} cannot be written: {error.strerror or error}") from error
    return target


def write_beside(folder: Path, tell: Callable[[str], None]) -> None:
    """The page of a run that has just ended. A failure is a message: a page must not fail a run."""
    try:
        write_report([folder])
    except Exception as error:  # whatever it is: the run has ended well
        tell(f"no report page was written: {error}")


def render(runs: Sequence[Recorded], beside: Path) -> str:
    """The page as text. `beside`: the folder that links to films start from."""
    titles = list(dict.fromkeys(_title(run) for run in runs))
    title = titles[0] if len(titles) == 1 else f"{len(runs)} runs: {' and '.join(titles[:2])}{' …' * (len(titles) > 2)}"
    head = (
        f"<header><h1>{escape(title, 160)}</h1>"
        '<div class="switch" role="group"><label class="for-steps" for="steps">over steps</label>'
        '<label class="for-time" for="time">over time</label></div></header>'
    )
    sections = [
        head,
        f'<section class="runs">{"".join(_card(index, run) for index, run in enumerate(runs))}</section>',
        _returns(runs),
        _resumes(runs),
        _evaluations(runs),
        _charts("Numbers from the environment", runs, _keys(runs, "info")),
        _charts("Numbers of your own", runs, _keys(runs, "log")),
        _charts("Losses", runs, [key for key in _keys(runs, "losses") if key not in NOT_LOSSES]),
        _charts("Policy lag", runs, [key for key in ("lag_mean", "lag_max") if _moves(runs, key)])
        or _section("Policy lag", "<p>0 in every batch: each was collected with the weights that it trained.</p>"),
        _charts("Replay memory" if _keys(runs, "replay") else "Queue", runs, _keys(runs, "replay") or ["queue_depth"]),
        _charts("Speed", runs, ["steps_per_s", *_keys(runs, "ranks")]),
        _each("Where the time goes", runs, _time),
        _each("The ledger", runs, _ledger),
        _each("Faults and messages", runs, _messages),
        _films(runs, beside),
        _config(runs),
    ]
    return page(title, sections, len(runs) > 1)


def _title(run: Recorded) -> str:
    return f"{run.config.get('recipe', run.folder.name)} on {run.config.get('env', '?')}"


def _card(index: int, run: Recorded) -> str:
    of = {**run.last, **run.summary}
    mean, std = number(of.get("return_mean")), number(of.get("return_std"))
    rows = {
        "return": f"<b>{short(mean)}</b> ± {short(std)}" if math.isfinite(mean) else "no episode has ended",
        "steps": _count(of.get("env_steps")),
        "updates": _count(of.get("updates")),
        "time": seconds(number(of.get("wall_s"))),
        "steps per second": _count(of.get("steps_per_s")),
        "topology": escape(run.config.get("topology", "?"), 40),
        "actors × environments": escape(" × ".join(str(run.config.get(key, "?")) for key in COUNTS), 40),
        "seed": escape(run.config.get("seed", "?"), 40),
        "ended": escape(ENDS.get(reason := run.summary.get("exit_reason", ""), reason), 60),
    }
    if begun := run.config.get("init_from"):
        rows["began with the networks of"] = escape(origin(str(begun)), 80)
    if number(of.get("restarts")) > 0:
        rows["restarts"] = f'<b class="bad">{_count(of.get("restarts"))}</b>'
    reached = number(run.summary.get("env_steps_to_target"))
    if math.isfinite(reached):
        rows["target reached after"] = f"{_count(reached)} steps"
    note = f'<p class="bad">{run.damaged:,} damaged lines of metrics.jsonl are left out</p>' if run.damaged else ""
    return (
        f'<div class="run">{badge(index)} <b>{escape(_title(run), 120)}</b>'
        f'<p class="soft">{escape(run.folder, 200)}</p>{_facts(rows)}{note}</div>'
    )


def _facts(rows: Mapping[str, str]) -> str:
    """Names and values, both markup already."""
    pairs = (f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in rows.items())
    return f'<dl class="facts">{"".join(pairs)}</dl>'


def _returns(runs: Sequence[Recorded]) -> str:
    targets = {number(run.config.get("target_return")) for run in runs if run.config.get("eval/stop") is not True}
    target = targets.pop() if len(targets) == 1 else math.nan
    marks, several = _marks(runs), len(runs) > 1
    drawn = chart("mean return of the last 100 episodes", _lines(runs, "return_mean"), several, True, target, marks)
    more = [
        chart(name.replace("_", " "), _lines(runs, name), several, marks=marks)
        for name in ("length_mean", "return_std")
    ]
    drawn = drawn or '<figure class="big">no episode has ended</figure>'
    return _section("Return", f'<div class="charts">{drawn}{"".join(more)}</div>')


def _marks(runs: Sequence[Recorded]) -> list[tuple[str, Mark]]:
    return [(letter(index), mark) for index, run in enumerate(runs) for mark in run.resumes]


def _resumes(runs: Sequence[Recorded]) -> str:
    items = "".join(
        f"<li>{badge(index) + ' ' if len(runs) > 1 else ''}after {_count(mark.env_steps)} steps, "
        f"{seconds(mark.wall_s)}: {escape(mark.text, 400) or 'no field was changed'}</li>"
        for index, run in enumerate(runs)
        for mark in run.resumes
    )
    return _section("Resumed", f'<ul class="said">{items}</ul>') if items else ""


def _lines(runs: Sequence[Recorded], key: str) -> list[Line]:
    return [
        Line(index, run.env_steps, run.wall_s, run.series[key])
        for index, run in enumerate(runs)
        if key in run.series
    ]  # fmt: skip


def _keys(runs: Sequence[Recorded], prefix: str) -> list[str]:
    found = dict.fromkeys(key for run in runs for key in run.series if key.startswith(f"{prefix}/"))
    return [key for key in found if any(np.isfinite(run.series[key]).any() for run in runs if key in run.series)]


def _moves(runs: Sequence[Recorded], key: str) -> bool:
    return any(np.nan_to_num(run.series[key]).any() for run in runs if key in run.series)


def _charts(title: str, runs: Sequence[Recorded], keys: Sequence[str], first: str = "") -> str:
    """Small charts, one for each number, behind the first."""
    moving = [key for key in keys if _varies(runs, key)]
    drawn = [chart(_words(key), _lines(runs, key), len(runs) > 1, marks=_marks(runs)) for key in moving[:CHARTS]]
    still = [f"{escape(_words(key))} {short(value)}" for key in keys if (value := _constant(runs, key)) is not None]
    more = f'<p class="soft">always the same: {", ".join(still[:CHARTS])}</p>' if still else ""
    more += f'<p class="soft">{len(moving) - CHARTS} more are in metrics.jsonl</p>' if len(moving) > CHARTS else ""
    return (
        _section(title, f'<div class="charts">{body}</div>{more}') if (body := first + "".join(drawn)) or more else ""
    )


def _constant(runs: Sequence[Recorded], key: str) -> float | None:
    """The value of a number that is the same in all records of all runs."""
    values = np.concatenate([run.series[key] for run in runs if key in run.series] or [np.empty(0)])
    values = values[np.isfinite(values)]
    return float(values[0]) if len(values) and (values == values[0]).all() else None


def _varies(runs: Sequence[Recorded], key: str) -> bool:
    return _constant(runs, key) is None


def _words(key: str) -> str:
    return (key.partition("/")[2] or key).replace("_", " ").replace("/", ", ")[:80]


def _evaluation_chart(runs: Sequence[Recorded]) -> str:
    """Of evaluations during training; of a run without any, the results of `rookery eval`."""
    lines = []
    for index, run in enumerate(runs):
        points = run.evaluated or run.evaluations
        steps = np.array([number(each.get("env_steps")) for each in points])
        means = np.array([number(each.get("return_mean")) for each in points])
        known = np.isfinite(steps)
        if known.sum() > 1 and len(run.env_steps):  # a single one is no curve: it is in the list
            wall = time_at(steps, run.env_steps, run.wall_s)
            lines.append(Line(index, steps[known], wall[known], means[known], dots=len(steps) <= DOTS))
    targets = {number(run.config.get("target_return")) for run in runs if run.config.get("eval/stop") is True}
    target = targets.pop() if len(targets) == 1 else math.nan
    return chart("mean return of whole episodes", lines, len(runs) > 1, True, target)


def _evaluations(runs: Sequence[Recorded]) -> str:
    items = []
    for index, run in enumerate(runs):
        if run.evaluated:
            best = max(run.evaluated, key=lambda each: (each["return_mean"], each["env_steps"]))
            items += [_evaluation(index, best, "best in training")] if best is not run.evaluated[-1] else []
            items.append(_evaluation(index, run.evaluated[-1], "last in training"))
        items += [_evaluation(index, each, "rookery eval") for each in run.evaluations]
    drawn = f'<div class="charts">{_evaluation_chart(runs)}</div>'
    return _section("Evaluation", f'{drawn}<ul class="said">{"".join(items)}</ul>') if items else ""


def _evaluation(index: int, each: Mapping[str, Any], what: str) -> str:
    low, high = number(each.get("return_min")), number(each.get("return_max"))
    span = f", from {short(low)} to {short(high)}" if math.isfinite(low + high) else ""
    how = ", greedy" if each.get("greedy") is True else ", sampled" if each.get("greedy") is False else ""
    mean, std = short(number(each["return_mean"])), short(number(each.get("return_std")))
    return (
        f"<li>{badge(index)} {_count(each.get('env_steps'))} steps: <b>{mean}</b> ± {std}{span}; "
        f"{_count(each.get('episodes'))} episodes{how}; {what}</li>"
    )


def _each(title: str, runs: Sequence[Recorded], about: Callable[[Recorded], str]) -> str:
    found = [(index, about(run)) for index, run in enumerate(runs)]
    several = len(runs) > 1
    body = "".join(f"<figure>{badge(index) if several else ''}{text}</figure>" for index, text in found if text)
    return _section(title, f'<div class="charts wide">{body}</div>') if body else ""


def _time(run: Recorded) -> str:
    shares = {name: max(0.0, _zero(run.facts("shares").get(name))) for name in STAGES}
    told = run.last.get("advice")
    return bar(shares, "shares of the time") + (f"<p>{escape(told, 300)}</p>" if told and isinstance(told, str) else "")


def _ledger(run: Recorded) -> str:
    books = run.facts("ledger")
    dropped = books.get("dropped")
    dropped = dropped if isinstance(dropped, Mapping) else {}
    parts = {name.replace("_", " "): _zero(books.get(name)) for name in ("trained", "in_flight", "evicted")}
    lost = {f"dropped: {str(reason)[:60]}": _zero(steps) for reason, steps in list(dropped.items())[:20]}
    collected = _zero(books.get("collected"))
    gap = collected - sum(parts.values()) - sum(lost.values())
    if not collected > 0:
        return ""
    rows = {"collected": collected} | {escape(name): steps for name, steps in (parts | lost).items() if steps}
    verdict = "it balances" if gap == 0 else f'<b class="bad">{_count(gap)} steps are missing</b>'
    drawn = bar({name: max(0.0, steps) for name, steps in (parts | lost).items()}, "use of the steps")
    return drawn + _facts({name: _count(steps) for name, steps in rows.items()}) + f'<p class="soft">{verdict}</p>'


def _messages(run: Recorded) -> str:
    restarts = _zero({**run.last, **run.summary}.get("restarts"))
    told = f'<p class="bad">workers or environments restarted: {_count(restarts)}</p>' if restarts else ""
    if not run.messages:
        return told or '<p class="soft">none</p>'
    ends = [message.wall_s for message in run.messages if math.isfinite(message.wall_s)]
    last = max([*ends, *run.wall_s[-1:], _zero(run.summary.get("wall_s"))], default=0.0)
    items = "".join(
        f'<li><span class="soft">{seconds(message.wall_s)}, {_count(message.env_steps)} steps</span>\n'
        f"{escape(message.text, 1000)}</li>"
        for message in run.messages
    )
    unsaid = f'<p class="soft">{run.unsaid:,} more are in metrics.jsonl</p>' if run.unsaid else ""
    return f'{told}{strip(ends, last)}<ul class="said">{items}</ul>{unsaid}'


def _films(runs: Sequence[Recorded], beside: Path) -> str:
    room, shows = FILM_ROOM, []
    for index, run in enumerate(runs):
        for name in run.films:
            data = _small(run.folder, name) if room > 0 else b""
            if data is None:
                continue
            if data and len(data) <= room:
                room -= len(data)
                source = f"data:{TYPES[name.suffix]};base64,{base64.b64encode(data).decode()}"
            else:
                there = os.path.relpath(Path(run.folder, name).absolute(), beside.absolute())
                source = "./" + quote(there.encode("utf-8", "surrogateescape"))
            link = "" if source.startswith("data:") else f' <a href="{escape(source)}">open</a>'
            shows.append(
                f'<figure><video controls muted playsinline preload="metadata" src="{_attribute(source)}"></video>'
                f"<figcaption>{badge(index)} {escape(name.name, 120)}{link}</figcaption></figure>"
            )
    return _section("Films", f'<div class="charts">{"".join(shows)}</div>') if shows else ""


def _attribute(source: str) -> str:
    """A data URI is base64 and needs no escape; a path does."""
    return source if source.startswith("data:") else escape(source)


def _small(folder: Path, name: Path) -> bytes | None:
    """The film if it is small, b"" if it is large, None if it is no plain file."""
    try:
        with open(folders.open_regular(folder, str(name)), "rb") as file:
            data = file.read(SMALL_FILM + 1)
    except OSError:
        return None
    return data if len(data) <= SMALL_FILM else b""


def _config(runs: Sequence[Recorded]) -> str:
    keys = list(dict.fromkeys(key for run in runs for key in run.config))
    absent = object()
    same: dict[str, str] = {}
    differ = []
    for key in keys:
        values = [run.config.get(key, absent) for run in runs]
        words = ["–" if value is absent else escape(shown(value), 400) for value in values]
        name = escape(key.replace("/", "."), 120)
        if len(set(words)) == 1:
            same[name] = words[0]
        else:
            told = "".join(f"<span>{badge(index)} <b>{word}</b></span>" for index, word in enumerate(words))
            differ.append(f"<dt>{name}</dt><dd>{told}</dd>")
    what = f"{len(same)} fields" + (" are the same" if len(runs) > 1 else "")
    differing = f"<p>≠ {len(differ)} fields differ</p>" + f'<dl class="fields">{"".join(differ)}</dl>' if differ else ""
    return _section("Config", f"{differing}<details><summary>{what}</summary>{_facts(same)}</details>")


def _section(title: str, body: str) -> str:
    return f"<section><h2>{title}</h2>{body}</section>"


def _count(value: Any) -> str:
    known = number(value)
    return f"{known:,.0f}" if abs(known) < 1e15 else "–"


def _zero(value: Any) -> float:
    known = number(value)
    return known if math.isfinite(known) else 0.0
