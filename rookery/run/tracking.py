"""Trackers as sinks of a run: each in a process of its own, which the sink's thread starts, asks and, at last, kills.

A thread would not do: importing a tracker holds the interpreter for a second, and its signal handlers, exit handlers
and threads would be the run's. The process may block for as long as it likes. The sink's thread waits for it, the
learner never does, and what the tracker has started ends with it (`processes/worker.py`).
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from rookery.core.config import RunConfig
from rookery.core.errors import RookeryError
from rookery.metrics.sink import Record, Sink, scalars
from rookery.metrics.tracker import CLASSES, ID
from rookery.pipes.channel import ChannelClosed, ChannelTimeout
from rookery.processes.worker import Worker
from rookery.storage import folder as folders

PATIENCE = 24 * 3600.0  # seconds for one record; the end of the run does not wait so long
CLOSING = 10.0  # seconds for the last records, where there are trackers
STOPPING = 2.0  # seconds for its process to end
SKIPPED = ("message", "resume")  # kinds of records that trackers do not get


class TrackerFailed(RookeryError):
    """The tracker did not take a record; the message is its own."""


def trackers(config: RunConfig, folder: Path) -> list[Sink]:
    return [TrackerSink(name, config, folder) for name in config.track]


def places(folder: Path, config: RunConfig) -> dict[str, str]:
    """By tracker: where the run can be seen, for those that it has reached."""
    found = {name: _read(folder, name) for name in config.track}
    return {name: str(there["about"]) for name, there in found.items() if there.get("about")}


def _read(folder: Path, name: str) -> dict[str, Any]:
    """What the run folder knows of a tracker's run; empty if it is not there, or not ours."""
    try:
        there = json.loads(folders.read(folder, f"trackers/{name}.json"))
        return there if ID.fullmatch(there["id"]) else {}
    except (RookeryError, ValueError, KeyError, TypeError, RecursionError):
        return {}


class TrackerSink:
    """`write` and `close` are for the sink's thread; `ended` and `abandon` for the learner's."""

    def __init__(self, name: str, config: RunConfig, folder: Path):
        self.name, self.news = name, deque[str]()
        self._folder, self._file = Path(folder), f"trackers/{name}.json"
        named = {"project": config.track_project, "name": self._folder.name, "id": self._stored()}
        self._arguments = named | {"config": dict(flat(config))}
        self._worker: Worker | None = None
        self._failed = ""  # why it does not go on
        self._outcome: tuple[dict[str, Any], int] = {}, 1
        self._abandoned = threading.Event()

    def write(self, record: Record) -> None:
        if record.get("kind") in SKIPPED:
            return
        kind = record.get("kind", "run")
        order = {
            "op": "log", "env_steps": int(record.get("env_steps") or 0), "wall_time": time.time(),
            "numbers": {f"{kind}/{name}": value for name, value in scalars(record)},
        }  # fmt: skip
        self._start()
        self._ask(order)

    def ended(self, summary: Record, exit_code: int) -> None:
        plain = {key: value for key, value in summary.items() if isinstance(value, int | float | str)}
        self._outcome = plain, exit_code

    def close(self) -> None:
        if self._worker is None:
            return
        summary, exit_code = self._outcome
        try:
            if not self._failed:
                self._ask({"op": "finish", "summary": summary, "exit_code": exit_code})
        finally:
            self._worker.stop(STOPPING)

    def abandon(self) -> None:
        self._abandoned.set()
        if (worker := self._worker) is not None:
            worker.kill()  # the sink's thread notices, and ends what it has started

    def _start(self) -> None:
        if self._worker is not None:
            return
        start = {"op": "start", "tracker": CLASSES[self.name], "arguments": self._arguments}
        self._worker = Worker.start("rookery.run.tracker_main", f"tracker-{self.name}", start, {})
        if self._abandoned.is_set():
            self._worker.kill()
        try:
            found = self._answer()
        except TrackerFailed as error:
            self._failed = str(error)
            raise
        self.news.append(str(found["about"]))
        folders.store(self._folder, self._file, json.dumps({name: found[name] for name in ("id", "about")}).encode())

    def _stored(self) -> str:
        """The id of this run at the tracker, if it was resumed; "" for a new one."""
        there = _read(self._folder, self.name)
        if not there and folders.exists(self._folder, self._file):
            self.news.append(f"{self._file} cannot be read: a new run is started there")
        return str(there.get("id", ""))

    def _ask(self, order: dict[str, Any]) -> None:
        if self._failed:
            raise TrackerFailed(self._failed)
        assert self._worker is not None
        try:
            self._worker.channel.send(order, PATIENCE)
        except (ChannelClosed, ChannelTimeout) as error:
            raise self._gone() from error
        self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._worker is not None
        try:
            answer = self._worker.channel.recv(PATIENCE)
        except (ChannelClosed, ChannelTimeout) as error:
            raise self._gone() from error
        if answer["op"] != "done":
            raise TrackerFailed(str(answer.get("why") or answer.get("error")))
        return answer

    def _gone(self) -> TrackerFailed:
        assert self._worker is not None
        self._worker.stop(STOPPING)
        self._failed = f"its process {self._worker.describe_exit()}"
        return TrackerFailed(self._failed)


def flat(config: Any, prefix: str = "") -> Iterator[tuple[str, str | float | bool]]:
    """The fields of a config by their dotted path: numbers as they are, anything else as text."""
    pairs = (
        config.items() if isinstance(config, Mapping) else ((f.name, getattr(config, f.name)) for f in fields(config))
    )
    for name, value in pairs:
        if name == "history" and not prefix:  # of the run folder, not of the run
            continue
        if is_dataclass(value) or (isinstance(value, Mapping) and value):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value if isinstance(value, int | float | str) else str(value)
