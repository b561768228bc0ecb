"""A run that goes on from a checkpoint takes the steps behind it again: their old records leave metrics.jsonl.

They go to metrics-1.jsonl, metrics-2.jsonl, …: within one file, `env_steps` and `wall_s` never go back. TensorBoard's
events stay: its own viewer leaves out what a later event has overtaken.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import NamedTuple

import msgspec

from rookery.core.errors import StorageError
from rookery.storage import folder as folders


class Rewound(NamedTuple):
    moved: int  # records
    where: str  # name of the file that has them now
    wall_s: float  # of the last record that stayed


def rewind(folder: Path, env_steps: int) -> Rewound:
    """Move the records from the first one on that is behind `env_steps`. StorageError if that is not possible."""
    if not folders.exists(folder, "metrics.jsonl"):
        return Rewound(0, "", 0.0)
    try:
        with open(folders.open_regular(folder, "metrics.jsonl", os.O_RDWR, sole=True), "rb+") as file:
            start, wall = 0, 0.0
            for line in file:
                steps, seconds = _place(line)
                if steps > env_steps:
                    break
                start, wall = start + len(line), max(wall, seconds)
            file.seek(start)
            rest = file.read()
            if not rest:
                return Rewound(0, "", wall)
            numbered = (f"metrics-{number}.jsonl" for number in itertools.count(1))
            where = next(name for name in numbered if not folders.exists(folder, name))
            folders.store(folder, where, rest)
            file.truncate(start)
            return Rewound(rest.count(b"\n"), where, wall)
    except OSError as error:
        raise StorageError(f"{folder / 'metrics.jsonl'} cannot be cut: {error.strerror or error}") from error


def _place(line: bytes) -> tuple[float, float]:
    """`env_steps` and `wall_s` of a record; of a line that is none, those of the beginning: it stays where it is."""
    try:
        record = msgspec.json.decode(line)
        steps, wall = record["env_steps"], record["wall_s"]
    except (msgspec.DecodeError, ValueError, RecursionError, KeyError, TypeError):
        return 0.0, 0.0
    numbers = [float(each) if isinstance(each, int | float) else 0.0 for each in (steps, wall)]
    return numbers[0], numbers[1]
