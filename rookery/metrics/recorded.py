"""What a run folder has recorded, for the report page: series, messages, evaluations, films, thinned and checked.

The folder may come from another person, and the run may be going on, or have been killed: damaged lines are left out
and counted, numbers are checked, text stays text (`report.py` escapes it). Of a large metrics.jsonl, about `RECORDS`
training records are decoded, spread evenly over the file, and every message up to `MESSAGES`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rookery.core.errors import CheckpointError, UsageError
from rookery.metrics.evaluated import KIND, sound
from rookery.metrics.plot import config_of, number
from rookery.metrics.resumes import MOST, Mark, mark_of
from rookery.metrics.sink import MAX_LINE
from rookery.storage import folder as folders

RECORDS = 1000
SMALL = 1 << 20  # bytes of a metrics.jsonl that is read whole
MESSAGES = 400
KEYS = 400  # different numbers of one run
EVALUATIONS, FILMS = 50, 12
FILM_SUFFIXES = (".mp4", ".webm", ".mov")


@dataclass(frozen=True)
class Message:
    env_steps: float
    wall_s: float
    text: str


@dataclass
class Recorded:
    folder: Path
    config: dict[str, Any]  # flat, "algo/clip"
    summary: dict[str, Any]  # empty: the run has not ended
    env_steps: np.ndarray  # of the training records
    wall_s: np.ndarray
    series: dict[str, np.ndarray]  # by path, "losses/kl"; NaN where it was not recorded
    last: dict[str, Any]  # the last training record
    messages: list[Message] = field(default_factory=list)
    evaluated: list[dict[str, Any]] = field(default_factory=list)  # while it trained, by the steps of the weights
    evaluations: list[dict[str, Any]] = field(default_factory=list)  # results of `rookery eval`
    films: list[Path] = field(default_factory=list)
    damaged: int = 0  # lines of metrics.jsonl that were left out
    resumes: list[Mark] = field(default_factory=list)
    unsaid: int = 0  # messages beyond those kept

    def part(self, prefix: str) -> dict[str, np.ndarray]:
        """The series below a path, without it: part("losses")["kl"]."""
        return {key.partition("/")[2]: values for key, values in self.series.items() if key.startswith(f"{prefix}/")}

    def facts(self, name: str) -> dict[str, Any]:
        """A group of the last record, such as its ledger; of the summary, if there is one."""
        found = self.summary.get({"shares": "time_split"}.get(name, name)) or self.last.get(name)
        return found if isinstance(found, dict) else {}


def read_run(folder: Path) -> Recorded:
    """UsageError if it is no run folder, CheckpointError if its config cannot be read or leads out of the folder."""
    if not folders.exists(folder, "metrics.jsonl"):
        raise UsageError(folders.not_a_run(folder, "metrics.jsonl"))
    kept: list[tuple[float, float, dict[str, Any]]] = []
    messages: list[Message] = []
    evaluated: dict[int, dict[str, Any]] = {}
    resumes: list[Mark] = []
    last: dict[str, Any] = {}
    damaged, shift = 0, 0.0  # shift is added to wall_s, should a resumed run have started its clock again
    for record in _sampled(folder):
        if record is None:
            damaged += 1
            continue
        kind, steps, wall = record.get("kind"), number(record.get("env_steps")), number(record.get("wall_s"))
        if kind == "message":
            messages.append(Message(steps, wall + shift, str(record.get("text", ""))))
        elif kind == KIND and sound(record):
            evaluated[record["env_steps"]] = {key: value for key, value in record.items() if key != "returns"}
        elif kind == "resume" and (mark := mark_of(record, steps, wall + shift)) is not None:
            resumes = [*(each for each in resumes if each.env_steps <= steps), mark][-MOST:]
        elif kind in ("train", "log") and math.isfinite(steps + wall):
            while kept and kept[-1][0] > steps:  # a resumed run went over these again
                kept.pop()
            shift += max(0.0, kept[-1][1] - wall - shift) if kept else 0.0
            kept.append((steps, wall + shift, record if kind == "train" else {"log": record}))
            last = record if kind == "train" else last
    rows = [dict(_numbers(record)) for _, _, record in kept]
    keys = list(dict.fromkeys(key for row in rows for key in row))[:KEYS]
    columns = {key: np.array([row.get(key, math.nan) for row in rows]) for key in keys}
    return Recorded(
        folder=folder, config=config_of(folder), summary=_json(folder, "summary.json"),
        env_steps=np.array([steps for steps, _, _ in kept]), wall_s=np.array([wall for _, wall, _ in kept]),
        series=columns, last=last,
        messages=[*messages[: MESSAGES // 2], *messages[MESSAGES // 2 :][-MESSAGES // 2 :]],
        evaluated=[evaluated[steps] for steps in sorted(evaluated)], evaluations=evaluations(folder)[-EVALUATIONS:],
        films=_films(folder), damaged=damaged, unsaid=max(0, len(messages) - MESSAGES), resumes=resumes,
    )  # fmt: skip


def _sampled(folder: Path) -> Iterator[dict[str, Any] | None]:
    """Records of metrics.jsonl; None for a damaged line. A torn last line is left out."""
    try:
        with open(folders.open_regular(folder, "metrics.jsonl"), "rb") as file:
            end = os.fstat(file.fileno()).st_size
            apart, due, place, before = end / RECORDS if end > SMALL else 0.0, 0.0, 0, b""
            while line := file.readline(MAX_LINE + 1):
                place += len(line)
                whole = line.endswith(b"\n")
                # Not decoded: training records between two samples. What Rookery writes begins with its kind.
                if apart and place < due and whole and line.startswith(b'{"kind":"train"'):
                    before = line
                    continue
                due, before = place + apart, b""
                record = _decoded(line)
                if record is not None:
                    yield record
                elif (whole and line.strip()) or len(line) > MAX_LINE:
                    yield None
            if before:  # the last record always counts
                yield _decoded(before)
    except folders.Refused as error:
        raise CheckpointError(f"{folder / 'metrics.jsonl'} cannot be read: {error.strerror}") from error


def _decoded(line: bytes) -> dict[str, Any] | None:
    try:
        record = msgspec.json.decode(line)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _numbers(record: Mapping[str, Any], prefix: str = "", depth: int = 3) -> Iterator[tuple[str, float]]:
    for key, value in record.items():
        if isinstance(value, Mapping) and depth:
            yield from _numbers(value, f"{prefix}{key}/", depth - 1)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{key}", number(value)


def _json(folder: Path, name: str) -> dict[str, Any]:
    """A JSON object of the folder; empty if there is none that can be read."""
    try:
        return _decoded(folders.read(folder, name)) or {}
    except CheckpointError:
        return {}


def evaluations(folder: Path) -> list[dict[str, Any]]:
    """The results of `rookery eval` that are stored with a run, by the steps of their checkpoints."""
    found = [_json(folder, f"eval/{name}") for name in _names(folder, "eval", (".json",))]
    known = [each for each in found if isinstance(each.get("return_mean"), int | float)]
    return sorted(known, key=lambda each: number(each.get("env_steps")))


def own_evaluation(folder: Path) -> list[dict[str, Any]]:
    """The last evaluation of a run by itself (`eval.every`), as its summary has it; none if there was none."""
    found = _json(folder, "summary.json").get("evaluation")
    last = found.get("last") if isinstance(found, dict) else None
    return [last] if isinstance(last, dict) and isinstance(last.get("return_mean"), int | float) else []


def _films(folder: Path) -> list[Path]:
    return [Path("report", name) for name in _names(folder, "report", FILM_SUFFIXES)][:FILMS]


def _names(folder: Path, inner: str, suffixes: tuple[str, ...]) -> list[str]:
    """Visible files of a folder in the run folder; none if it is absent, or a link."""
    try:
        with folders.opened(folder, inner) as handle:
            return sorted(name for name in os.listdir(handle) if name.endswith(suffixes) and not name.startswith("."))
    except OSError:
        return []
