"""Checkpoints on disk: complete or absent, verified before use, free of pickle.

A checkpoint is a folder `step-000000123456/` with `manifest.json` (schema, versions, size and blake2b digest of every
file, and a digest of itself), `meta.json` (numbers, strings and small state) and `tensors.safetensors`. How such a
folder comes to be complete or absent, and is read without trusting it, is in files.py.

Loading verifies everything before it hands out anything, and cannot run code.
The caller decides what goes into a checkpoint; this file handles trees of numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from rookery.core.errors import CheckpointError, StorageError
from rookery.storage import files as disk
from rookery.storage.codec import decode_tree, encode_tree  # noqa: F401  (callers split their own state with them)
from rookery.storage.files import MANIFEST, MAX_JSON, META, TENSORS, Damage, FileEntry, FileLayer

SCHEMA = 1
EVALUATED = "eval/best"  # where a run keeps the weights with the best evaluation

_digest, _pretty = disk.digest, disk.pretty


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    schema: int
    env_steps: int
    best: float | None  # the score that decides which checkpoint is "the best"; null: not scored
    versions: dict[str, str]
    files: dict[str, FileEntry]


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    env_steps: int
    tensors: dict[str, torch.Tensor]
    meta: dict[str, Any]


def save(
    folder: Path,
    env_steps: int,
    tensors: Mapping[str, torch.Tensor | np.ndarray],
    meta: dict[str, Any],
    *,
    keep: int = 3,
    best: float | None = None,
    files: FileLayer | None = None,
) -> Path:
    """Write one checkpoint and prune the old ones; on StorageError the previous checkpoints are as they were.

    CheckpointError, before anything is written, if it could not be read again. `meta` is any tree `encode_tree` takes.
    `best` is the score by which the best is kept besides the newest `keep`.
    """
    if keep < 1:
        raise ValueError(f"keep {keep} would remove the checkpoint just written; use 1 or more")
    files, folder = files or FileLayer(), Path(folder)
    contents = _contents(int(env_steps), tensors, meta, best)
    target = folder / disk.step_name(env_steps)

    def fill(temporary: Path) -> None:
        for name, blob in contents.items():
            files.write(temporary / name, blob)
            files.fsync(temporary / name)

    disk.sweep(folder, files, _sound)
    try:
        disk.publish(folder, target, fill, files)
    except OSError as error:
        raise StorageError(
            f"checkpoint {target} could not be written: {error.strerror or error}; earlier ones are untouched. "
            "Free space on that disk, or check its permissions"
        ) from error
    if _sound(target) is None:  # a disk that loses data without an error: keep the older ones
        raise StorageError(f"checkpoint {target} could not be read back after writing; earlier ones are untouched")
    disk.prune(folder, target, keep, files, _sound, spare=_best)
    return target


def load(path: Path) -> Checkpoint:
    """The checkpoint in `path`, whole and verified, or CheckpointError."""
    path = Path(path)
    try:
        manifest = _manifest(path)
        blobs = {name: disk.read_verified(path, name, entry, _limit(name)) for name, entry in manifest.files.items()}
        meta, tensors = disk.unpack(blobs)
        if not isinstance(meta, dict):
            raise Damage(f"{META} holds a {type(meta).__name__}, not a dictionary")
    except Damage as error:
        raise CheckpointError(
            f"checkpoint {path}: {error}. Restore it from a copy, or use an earlier checkpoint"
        ) from error
    return Checkpoint(path, manifest.env_steps, tensors, meta)


def digest(path: Path) -> str:
    """Of the tensors of a checkpoint, as its manifest says."""
    try:
        return _manifest(Path(path)).files[TENSORS].blake2b
    except Damage as error:
        raise CheckpointError(f"checkpoint {path}: {error}") from error


def newest(folder: Path) -> tuple[Checkpoint, list[str]]:
    """The newest checkpoint that loads, and one message for each newer one that does not."""
    skipped: list[str] = []
    for _, path in reversed(disk.entries(Path(folder))):
        try:
            return load(path), skipped
        except CheckpointError as error:
            skipped.append(str(error))
    if skipped:
        raise CheckpointError("no checkpoint can be loaded:\n" + "\n".join(skipped))
    raise CheckpointError(f"no checkpoint in {folder}: the run has not saved one yet, or the folder is another one")


def newest_told(folder: Path) -> tuple[Checkpoint, list[str]]:
    """The same, with a message for the user if it is not the newest one: why, and which one is used."""
    found, skipped = newest(folder)
    return found, [*skipped, f"{found.path} is used instead"] if skipped else []


def best(folder: Path) -> Path | None:
    """The checkpoint with the highest recorded score, the newest of equals; None if none has a score."""
    return _best(disk.complete(Path(folder), _sound))


def best_score(folder: Path) -> float | None:
    """The score of the best."""
    scores = [manifest.best for _, _, manifest in disk.complete(Path(folder), _sound) if manifest.best is not None]
    return max(scores, default=None)


def best_of_run(run: Path) -> Path | None:
    """The best by evaluation if the run has evaluated its policy, else by the return in training; None: no scores."""
    place = Path(run, EVALUATED)
    try:
        disk.check_real(place.parent)
    except disk.Refused as error:
        raise CheckpointError(f"cannot read {place}: {error.strerror}") from error
    return best(place) or best(Path(run, "checkpoints"))


def all_steps(folder: Path) -> list[int]:
    """Environment steps of the checkpoints present, ascending; nothing is verified."""
    return sorted({steps for steps, _ in disk.entries(Path(folder))})


def _contents(
    env_steps: int, tensors: Mapping[str, torch.Tensor | np.ndarray], meta: dict, score: float | None
) -> dict[str, bytes]:
    """All files of a checkpoint, the manifest last."""
    if not isinstance(meta, dict):
        raise CheckpointError(f"meta is a {type(meta).__name__}, not a dictionary")
    blobs = disk.pack(meta, tensors)
    body = Manifest(
        schema=SCHEMA,
        env_steps=env_steps,
        best=float(score) if score is not None and math.isfinite(score) else None,
        versions=disk.versions(),
        files={name: FileEntry(len(blob), disk.digest(blob)) for name, blob in blobs.items()},
    )
    blobs[MANIFEST] = disk.seal(body)
    return blobs


def _best(found: list[tuple[int, Path, Manifest]]) -> Path | None:
    scored = [(manifest.best, steps, path) for steps, path, manifest in found if manifest.best is not None]
    return max(scored)[2] if scored else None


def _sound(path: Path) -> Manifest | None:
    return disk.sound(path, _manifest, _limit)


def _manifest(path: Path) -> Manifest:
    if not path.is_dir():
        raise Damage("there is no such checkpoint folder")
    manifest = disk.unseal(path, Manifest, SCHEMA)
    if set(manifest.files) != {META, TENSORS} or manifest.schema != SCHEMA or manifest.env_steps < 0:
        raise Damage(f"{MANIFEST} names other files, another schema or negative steps: {sorted(manifest.files)[:4]}")
    return manifest


def _limit(name: str) -> int | None:
    return None if name == TENSORS else MAX_JSON
