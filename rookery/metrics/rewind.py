"""A run that goes on from a checkpoint takes the steps behind it again: their old records leave metrics.jsonl.

They go to metrics-1.jsonl, metrics-2.jsonl, …: within one file, `wall_s` never goes back, nor does `env_steps` of the
training records. An evaluation is of weights that are older than the records around it: it stays if its weights are not
behind the checkpoint. TensorBoard's events stay: its own viewer leaves out what a later event has overtaken.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rookery.core.errors import StorageError
from rookery.metrics.evaluated import KIND, LARGEST
from rookery.storage import folder as folders


class Rewound(NamedTuple):
    moved: int  # records
    where: str  # name of the file that has them now
    wall_s: float  # of the last record that stayed
    evaluations: list[dict[str, Any]]  # those that stayed


def rewind(folder: Path, env_steps: int) -> Rewound:
    """Move the records from the first one on that is behind `env_steps`. StorageError if that is not possible."""
    if not folders.exists(folder, "metrics.jsonl"):
        return Rewound(0, "", 0.0, [])
    try:
        with open(folders.open_regular(folder, "metrics.jsonl", os.O_RDWR, sole=True), "rb+") as file:
            start, wall, evaluations = 0, 0.0, []
            for line in file:
                record = _record(line)
                if record["env_steps"] > env_steps:
                    break
                start, wall = start + len(line), max(wall, record["wall_s"])
                evaluations += [record] if record.get("kind") == KIND else []
            file.seek(start)
            gone, stays = [], []
            for line in file:
                record = _record(line)
                if record.get("kind") == KIND and record["env_steps"] <= env_steps:
                    stays.append(line)
                    evaluations.append(record)
                    wall = max(wall, record["wall_s"])
                else:
                    gone.append(line)
            if not gone:
                return Rewound(0, "", wall, evaluations)
            numbered = (f"metrics-{number}.jsonl" for number in itertools.count(1))
            where = next(name for name in numbered if not folders.exists(folder, name))
            folders.store(folder, where, b"".join(gone))
            file.seek(start)
            file.write(b"".join(stays))
            file.truncate()
            return Rewound(sum(line.endswith(b"\n") for line in gone), where, wall, evaluations)
    except OSError as error:
        raise StorageError(f"{folder / 'metrics.jsonl'} cannot be cut: {error.strerror or error}") from error


def _record(line: bytes) -> dict[str, Any]:
    """A record with its place; a line that is none gets that of the beginning: it stays where it is."""
    nowhere = {"env_steps": 0.0, "wall_s": 0.0}
    try:
        record = msgspec.json.decode(line)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return nowhere
    if not isinstance(record, dict) or not record.keys() >= nowhere.keys():
        return nowhere
    return record | {
        name: x if isinstance(x := record[name], int | float) and abs(x) < LARGEST else 0.0 for name in nowhere
    }
