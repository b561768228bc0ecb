"""Figures of finished or running runs: learning curves and scaling, from metrics.jsonl and config.json alone.

Runs that differ only by their seed are one line, the mean, with the band from the lowest to the highest seed; every
other difference is a line of its own, named by what differs. Nothing is smoothed: `return_mean` is a window already.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from rookery.core import tree
from rookery.core.errors import CheckpointError, StorageError, UsageError
from rookery.metrics.resumes import MOST, Mark, labels, mark_of
from rookery.metrics.sink import records
from rookery.storage import folder as folders

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which colour-blind readers can distinguish; without yellow, which is hard to see on white.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
DASHES = ("-", "--", ":", "-.")  # when the colours are used up
INK, GRID = "#333333", "#E3E3E3"
# Runs that differ in these only are the same experiment.
NOT_IDENTITY = {"seed", "out", "quiet", "log_every", "track", "track_project", "eval", "history"}
EVALUATED: dict[str, Any] = {"marker": "o", "markersize": 4, "markerfacecolor": "white", "linewidth": 0.8, "zorder": 3}
GRID_POINTS = 400
LARGEST = 1e100  # of the numbers that are drawn; matplotlib computes with their squares
LONGEST = 80  # characters of a name in a figure


@dataclass(frozen=True)
class Curve:
    """The training records of one run."""

    config: dict[str, Any]  # flat, "algo/clip"
    env_steps: np.ndarray
    wall_s: np.ndarray
    return_mean: np.ndarray
    evaluated: np.ndarray = field(default_factory=lambda: np.empty((3, 0)))  # steps, wall time and mean return
    resumes: tuple[Mark, ...] = ()


@contextmanager
def _text_is_text() -> Iterator[None]:
    """No LaTeX: settings in the current directory, which may be untrusted, would have matplotlib run it."""
    try:
        import matplotlib
    except ImportError:  # the caller says so
        yield
        return
    with matplotlib.rc_context({"text.usetex": False}):
        yield


@_text_is_text()
def plot_runs(run_folders: Sequence[Path], out: str | Path, within: Path | None = None) -> Path:
    """Return against environment steps and against wall time. `within`: `out` is the name of a file in a run folder."""
    curves = [read_curve(Path(folder)) for folder in run_folders]
    if not any(len(curve.env_steps) for curve in curves):
        raise UsageError("none of these runs has finished an episode yet: there is nothing to plot")
    groups = grouped([curve for curve in curves if len(curve.env_steps)])
    figure = _figure(10.5, 4.2)
    axes = figure.subplots(1, 2, sharey=True)
    longest = max(curve.wall_s[-1] for _, members in groups for curve in members)
    unit, seconds = ("hours", 3600) if longest > 2 * 3600 else ("minutes", 60) if longest > 120 else ("seconds", 1)
    for index, (label, members) in enumerate(groups):
        style = {"color": PALETTE[index % len(PALETTE)], "linestyle": DASHES[index // len(PALETTE) % len(DASHES)]}
        _draw(axes[0], [(curve.env_steps, curve.return_mean) for curve in members], label, style)
        _draw(axes[1], [(curve.wall_s / seconds, curve.return_mean) for curve in members], None, style)
        for curve in (each for each in members if each.evaluated.size):
            steps, wall, mean = curve.evaluated
            axes[0].plot(steps, mean, **style, **EVALUATED)
            axes[1].plot(wall / seconds, mean, **style, **EVALUATED)
    if any(curve.evaluated.size for curve in curves):
        axes[0].plot([], [], color=INK, label="evaluation", **EVALUATED)
    _draw_targets(axes, [curve for _, members in groups for curve in members])
    _draw_resumes(axes, groups, seconds)
    _dress(axes[0], "environment steps", "return, last 100 episodes")
    _dress(axes[1], f"wall time, {unit}", None)
    axes[0].xaxis.set_major_formatter(lambda value, _: _short(value))
    for place in axes:
        place.set_xlim(left=0)
    _finish(figure, _title(groups), several=any(len(members) > 1 for _, members in groups))
    return _save(figure, out, within)


@_text_is_text()
def plot_scaling(rows: Sequence[Mapping[str, Any]], out: Path) -> Path:
    """Throughput against the number of actors beside the ideal line, and the share of time spent waiting.

    A row has `actors`, `steps_per_s`, and if known `acting_steps_per_s` (without learning) and `wait_share`.
    """
    rows = sorted(rows, key=lambda row: row["actors"])
    if not rows:
        raise UsageError("no measurements to plot")
    actors = np.array([row["actors"] for row in rows])
    figure = _figure(10.5, 4.2)
    left, right = figure.subplots(1, 2)
    for key, label, colour in (
        ("acting_steps_per_s", "acting only", PALETTE[2]),
        ("steps_per_s", "acting and learning", PALETTE[0]),
    ):
        values = np.array([number(row.get(key)) for row in rows])
        if np.isfinite(values).any():
            first = int(np.flatnonzero(np.isfinite(values))[0])
            ideal = values[first] / actors[first] * actors[-1]
            left.plot([0, actors[-1]], [0, ideal], color=colour, linewidth=1, linestyle=(0, (4, 3)), alpha=0.7)
            left.plot(actors, values, color=colour, marker="o", label=label)
    left.plot([], [], color=INK, linewidth=1, linestyle=(0, (4, 3)), label="ideal: proportional to actors")
    left.set_ylim(bottom=0)
    left.yaxis.set_major_formatter(lambda value, _: _short(value))
    waits = np.array([number(row.get("wait_share")) for row in rows])
    right.bar([str(count) for count in actors], np.nan_to_num(waits) * 100, color=PALETTE[1], width=0.6)
    right.set_ylim(0, max(10.0, 1.15 * np.nanmax([*(waits * 100), 0])))
    for place, wait in enumerate(waits):
        text = f"{wait:.0%}" if math.isfinite(wait) else "n/a"
        right.annotate(
            text, (place, np.nan_to_num(wait) * 100), (0, 3), textcoords="offset points", ha="center", color=INK
        )
    _dress(left, "actors", "environment steps per second")
    left.set_xlim(left=0)
    left.set_xticks(actors)
    _dress(right, "actors", "time waiting, %")
    right.margins(x=0.05)
    right.grid(axis="x", visible=False)
    _finish(figure, "Scaling with actors", several=False)
    return _save(figure, out)


@_text_is_text()
def plot_ranks(panels: Sequence[Mapping[str, Any]], out: Path) -> Path:
    """Efficiency against the number of ranks, one panel beside the other.

    A panel has `title`, `lines` (label, ranks, efficiency) and `points` in the same form, which are drawn as marks.
    """
    figure = _figure(10.5, 4.2)
    for place, panel in zip(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels):
        for index, line in enumerate(panel["lines"]):
            style = DASHES[index // 2 % len(DASHES)]
            place.plot(
                line["ranks"], line["efficiency"], color=PALETTE[index % 2], linestyle=style, label=line["label"]
            )
        for index, points in enumerate(panel["points"]):
            marks = {"color": PALETTE[2 + index], "linestyle": "none", "marker": "o", "zorder": 3}
            place.plot(points["ranks"], points["efficiency"], label=points["label"], **marks)
        place.axhline(1.0, color=INK, linewidth=1, linestyle=(0, (4, 3)))
        place.set_xscale("log", base=2)
        place.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        _dress(place, "ranks", "efficiency" if panel is panels[0] else None)
        place.set_title(panel["title"], color=INK, fontsize=11, loc="left")
        place.set_ylim(0, 1.1)
        place.legend(frameon=False, fontsize=8, labelcolor=INK, loc="lower left")
    return _save(figure, out)


def read_curve(folder: Path) -> Curve:
    """The training records of a run; where a resumed run went over the same steps again, the later ones count."""
    if not folders.exists(folder, "metrics.jsonl"):
        raise UsageError(folders.not_a_run(folder, "metrics.jsonl"))
    kept: list[tuple[float, float, float]] = []
    evaluated: dict[float, float] = {}  # mean return by the steps of the weights
    resumes: list[Mark] = []
    shift = 0.0  # added to wall_s, should a resumed run have started its clock again
    for record in records(folder / "metrics.jsonl"):
        steps, wall, value = (number(record.get(key)) for key in ("env_steps", "wall_s", "return_mean"))
        if record.get("kind") == "resume" and (mark := mark_of(record, steps, wall + shift)) is not None:
            resumes = [*(each for each in resumes if each.env_steps <= steps), mark][-MOST:]
        if record.get("kind") not in ("train", "eval") or not math.isfinite(steps + wall + value):
            continue
        if record["kind"] == "eval":
            evaluated[steps] = value
            continue
        while kept and kept[-1][0] >= steps:
            kept.pop()
        shift += max(0.0, kept[-1][1] - wall - shift) if kept else 0.0
        kept.append((steps, wall + shift, value))
    columns = np.array(kept, dtype=float).reshape(-1, 3).T
    at = np.array(sorted(evaluated))
    when = time_at(at, columns[0], columns[1])  # of the weights; the record came later
    points = np.array([at, when, [evaluated[steps] for steps in at]]).reshape(3, -1)
    env_steps, wall_s, return_mean = columns
    return Curve(config_of(folder), env_steps, wall_s, return_mean, points, tuple(resumes))


def grouped(curves: Sequence[Curve]) -> list[tuple[str, list[Curve]]]:
    """Curves of one experiment together, in the order given, with a label that says how it differs from the others."""
    groups: dict[str, list[Curve]] = {}
    for curve in curves:
        identity = {key: value for key, value in curve.config.items() if key.split("/")[0] not in NOT_IDENTITY}
        groups.setdefault(repr(sorted(identity.items())), []).append(curve)
    members = list(groups.values())
    configs = [group[0].config for group in members]
    return [(_label(config, configs), group) for config, group in zip(configs, members)]


def _label(config: Mapping[str, Any], configs: Sequence[Mapping[str, Any]]) -> str:
    parts = [_words(config.get("recipe", "run"))]
    if len({repr(other.get("env")) for other in configs}) > 1:
        parts.append(_words(config.get("env", "?")))
    rivals = [other for other in configs if all(other.get(key) == config.get(key) for key in ("recipe", "env"))]
    differing = [
        key
        for key in dict.fromkeys(key for other in rivals for key in other)
        if key.split("/")[0] not in NOT_IDENTITY and len({repr(other.get(key)) for other in rivals}) > 1
    ]
    parts += [_words(f"{key.split('/')[-1]}={_brief(config, key)}") for key in differing[:3]]
    return ", ".join(parts + ["…"] * (len(differing) > 3))


def _brief(config: Mapping[str, Any], key: str) -> Any:
    """A value as a label has it: of another run's checkpoint, the names of the two."""
    value = config.get(key)
    if key != "init_from" or not isinstance(value, str):
        return value
    return origin(value)


def origin(path: str) -> str:
    """A checkpoint by the names of its run and of itself, for .../a/checkpoints/step-1 and .../a/eval/best/step-1."""
    *run, last = Path(path).parts
    for between in (["checkpoints"], ["eval", "best"]):
        if run[-len(between) :] == between:
            run = run[: -len(between)]
    return "/".join((*run[-1:], last))


def _draw(axes: Axes, lines: list[tuple[np.ndarray, np.ndarray]], label: str | None, style: dict[str, Any]) -> None:
    # A mean only where every seed has data: beyond, with fewer runs in it, it would jump.
    first, last = max(x[0] for x, _ in lines), min(x[-1] for x, _ in lines)
    if len(lines) == 1 or first >= last:
        for index, (x, y) in enumerate(lines):
            axes.plot(x, y, label=None if index else label, marker="o" if len(x) == 1 else None, **style)
        return
    for x, y in lines:
        axes.plot(x, y, **style | {"linewidth": 0.6, "alpha": 0.35})
    grid = np.linspace(first, last, GRID_POINTS)
    values = np.array([np.interp(grid, x, y) for x, y in lines])
    axes.fill_between(grid, values.min(0), values.max(0), color=style["color"], alpha=0.15, linewidth=0)
    axes.plot(grid, values.mean(0), label=f"{label} ({len(lines)} seeds)" if label else None, **style)


def _draw_targets(axes: Sequence[Axes], curves: Sequence[Curve]) -> None:
    targets = {number(curve.config.get("target_return")) for curve in curves}
    for target in sorted(target for target in targets if math.isfinite(target)):
        for place in axes:
            place.axhline(target, color=INK, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
        axes[0].annotate(
            f"target {target:g}", (0, target), (4, 3), xycoords=("axes fraction", "data"), textcoords="offset points",
            color=INK, fontsize=9,
        )  # fmt: skip


def _draw_resumes(axes: Sequence[Axes], groups: Sequence[tuple[str, list[Curve]]], seconds: float) -> None:
    """A vertical line where a run was resumed, with the fields that changed; in its colour if there are others."""
    for place, of in zip(axes, (lambda mark: mark.env_steps, lambda mark: mark.wall_s / seconds), strict=True):
        told = []
        for index, (_, members) in enumerate(groups):
            colour = PALETTE[index % len(PALETTE)] if len(groups) > 1 else INK
            for mark in (mark for curve in members for mark in curve.resumes):
                place.axvline(of(mark), color=colour, linewidth=0.9, linestyle=":", alpha=0.8, zorder=1)
                told.append((of(mark), mark.text))
        for x, text in labels(told, place.get_xlim()[1]):
            place.annotate(
                _words(text), (x, 1), (-2, -3), xycoords=("data", "axes fraction"), textcoords="offset points",
                rotation=90, ha="right", va="top", color=INK, fontsize=7,
            )  # fmt: skip


def _title(groups: Sequence[tuple[str, list[Curve]]]) -> str:
    envs = {str(curve.config.get("env", "")) for _, members in groups for curve in members}
    return _words(envs.pop()) if len(envs) == 1 else ""


def _figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure  # not pyplot: no window, no global state, no display needed
    except ImportError as error:
        raise UsageError("matplotlib is not installed: pip install 'rookery[plots]'") from error
    return Figure(figsize=(width, height), dpi=150, layout="constrained", facecolor="white")


def _dress(axes: Axes, x: str, y: str | None) -> None:
    axes.set_xlabel(x, color=INK, fontsize=11)
    axes.set_ylabel(y or "", color=INK, fontsize=11)
    axes.tick_params(colors=INK, labelsize=10, length=0)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color("#AAAAAA")
    axes.margins(x=0.01)


def _finish(figure: Figure, title: str, several: bool) -> None:
    if title:
        figure.suptitle(title, color=INK, fontsize=13, x=0.01, ha="left")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    note = "line: mean over seeds, band: lowest to highest seed" if several else None
    columns = max(1, min(4, 110 // max(map(len, labels))))
    legend = figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        fontsize=10,
        labelcolor=INK,
        title=note,
    )
    legend.get_title().set(color="#777777", fontsize=9)


def _save(figure: Figure, out: str | Path, within: Path | None = None) -> Path:
    path = Path(out) if within is None else Path(within, out)
    try:
        if within is not None:
            picture = io.BytesIO()
            figure.savefig(picture, format=path.suffix.removeprefix("."))
            return folders.write(within, str(out), picture.getvalue())
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    except ValueError as error:  # the suffix
        raise UsageError(f"{path}: {error}") from error
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror or error}") from error
    return path


def config_of(folder: Path) -> dict[str, Any]:
    """config.json, flat; without one, the folder's own name. Its history is left out: the records have it."""
    if not folders.exists(folder, "config.json"):
        return {"recipe": folder.name}
    try:
        config = msgspec.json.decode(folders.read(folder, "config.json"), type=dict[str, Any])
        config.pop("history", None)
        if isinstance(begun := config.pop("init_from", None), dict):
            config["init_from"] = f"{begun.get('run')}/{begun.get('checkpoint')}"
        return {key: _plain(value) for key, value in tree.flatten(config).items()}
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{folder / 'config.json'} cannot be read: {error}") from error


def _plain(value: Any) -> Any:
    """64.0 is 64: the same setting in both spellings."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def time_at(steps: np.ndarray, env_steps: np.ndarray, wall_s: np.ndarray) -> np.ndarray:
    """The wall time at these steps, by the records of a run, which begins at 0."""
    if not len(env_steps):
        return steps
    return np.interp(steps, np.concatenate(([0.0], env_steps)), np.concatenate(([0.0], wall_s)))


def number(value: Any) -> float:
    """As a float; what is no number, or none that an axis could show, is NaN."""
    return float(value) if isinstance(value, int | float) and abs(value) < LARGEST else math.nan


def _words(text: Any) -> str:
    """Text from a file as a figure shows it: one line of bounded length, and no formula."""
    line = "".join(char if char.isprintable() else "?" for char in str(text)[:LONGEST])
    return line.replace("$", r"\$")


def _short(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"
