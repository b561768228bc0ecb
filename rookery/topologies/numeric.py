"""What is kept of a run that ended with gradients that are not finite: the batch that made the last one, on disk.

RUN/numeric/step-…/ has the form of a checkpoint and is read like one: `checkpoint.load` verifies the digests, and
nothing in it is a pickle. `tensors` are the columns of the batch (`batch/reward`, `batch/obs/obs`, …) and what the
losses saw of it (`minibatch/…`, where that is not the same memory). If a worker sent the gradient, it is `gradient`.
`meta` has the error, the updates that were refused with their losses, and the columns that were too large to be kept.
It is for people to look at: nothing in Rookery reads it.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch

from rookery.core.errors import NumericError
from rookery.storage import checkpoint

LIMIT = 256 << 20  # bytes of one dump; the largest columns are left out beyond that
KEPT = 3  # dumps of one run


def dump(folder: Path, env_steps: int, error: NumericError) -> Path:
    """Write what the error has brought along; the folder of it."""
    tensors, left_out = _chosen(_columns(error.evidence))
    meta = {"error": str(error), "skips": error.skips, "left_out": left_out}
    return checkpoint.save(folder / "numeric", env_steps, tensors, meta, keep=KEPT)


def _chosen(columns: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, list[int]]]:
    """As many as fit, small ones first: what is left out are most often images. The shapes of those."""
    tensors: dict[str, torch.Tensor] = {}
    left_out: dict[str, list[int]] = {}
    room, seen = LIMIT, set()
    for name, column in sorted(columns.items(), key=lambda item: item[1].nbytes):
        memory = (column.data_ptr(), column.shape, column.stride())
        if memory in seen:  # the minibatch of a replay memory is the batch itself
            continue
        if column.numel():
            seen.add(memory)
        if column.nbytes > room:
            left_out[name] = list(column.shape)
            continue
        tensors[name], room = column, room - column.nbytes
    return tensors, left_out


def _columns(value: Any, path: str = "") -> dict[str, torch.Tensor]:
    """The tensors of nested dataclasses and dictionaries, by path."""
    if isinstance(value, torch.Tensor):
        return {path: value.detach()}
    parts: dict[str, Any] = {}
    if is_dataclass(value):
        parts = {field.name: getattr(value, field.name) for field in fields(value)}
    elif isinstance(value, dict):
        parts = value
    found: dict[str, torch.Tensor] = {}
    for name, part in parts.items():
        found |= _columns(part, f"{path}/{name}" if path else name)
    return found
