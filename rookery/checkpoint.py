"""Checkpoints on disk: complete or absent, verified before use, free of pickle.

A checkpoint is a folder `step-000000123456/` with `manifest.json` (schema, versions, size and blake2b digest of every
file, and a digest of itself), `meta.json` (numbers, strings and small state) and `tensors.safetensors`. It is written
under a temporary name, synced and renamed, so a crash at any point leaves the previous one in place.

Loading verifies everything before it hands out anything, never follows a link or a path out of the folder, and cannot
run code. The digests find damage, not forgery: whoever can write the folder can write a matching manifest.
What goes into a checkpoint is the caller's affair; this file only knows trees of numbers.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import secrets
import shutil
import stat
import sys
import warnings
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import numpy as np
import safetensors.torch
import torch

from rookery.codec import decode_tree, encode_tree, host_copy
from rookery.errors import CheckpointError, StorageError

SCHEMA = 1
MANIFEST, META, TENSORS = "manifest.json", "meta.json", "tensors.safetensors"
MAX_JSON = 64 << 20  # bytes; a larger manifest or meta.json is not ours
META_PREFIX = "meta:"  # tensors that belong to arrays inside `meta`

_STEP = re.compile(r"(\.old-)?step-(\d{12,18})")
_READ = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)


class FileLayer:
    """Every disk operation of `save`, one method each, so that a test can fail or stop at any of them."""

    def mkdir(self, path: Path) -> None:
        path.mkdir(mode=0o700)

    def write(self, path: Path, data: bytes) -> None:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(handle, "wb", buffering=0) as file:
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]

    def fsync(self, path: Path) -> None:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def fsync_dir(self, path: Path) -> None:
        if os.name != "nt":  # Windows cannot open a folder, and syncs its entries itself
            self.fsync(path)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def remove(self, path: Path) -> None:
        shutil.rmtree(path)


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    size: int
    blake2b: str


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
    tensors: dict[str, torch.Tensor | np.ndarray],
    meta: dict[str, Any],
    *,
    keep: int = 3,
    best: float | None = None,
    files: FileLayer | None = None,
) -> Path:
    """Write one checkpoint and prune the old ones; on StorageError the previous checkpoints are as they were.

    `meta` is any tree `encode_tree` takes. `best` is the score by which the best is kept besides the newest `keep`.
    """
    if keep < 1:
        raise ValueError(f"keep {keep} would remove the checkpoint just written; use 1 or more")
    files, folder = files or FileLayer(), Path(folder)
    contents = _contents(int(env_steps), tensors, meta, best)
    target = folder / f"step-{env_steps:012d}"
    try:
        _sweep(folder, files)
    except OSError as error:
        warnings.warn(f"what an interrupted save left in {folder} could not be removed: {error}", stacklevel=2)
    try:
        _publish(folder, target, contents, files)
    except OSError as error:
        raise StorageError(
            f"checkpoint {target} could not be written: {error.strerror or error}; earlier ones are untouched. "
            "Free space on that disk, or check its permissions"
        ) from error
    try:
        _prune(folder, target, keep, files)
    except OSError as error:
        warnings.warn(f"checkpoint saved, but an old one in {folder} could not be removed: {error}", stacklevel=2)
    return target


def load(path: Path) -> Checkpoint:
    """The checkpoint in `path`, whole and verified, or CheckpointError."""
    path = Path(path)
    manifest = _manifest(path)
    blobs = {name: _read(path, name, entry.size) for name, entry in manifest.files.items()}
    for name, entry in manifest.files.items():
        if _digest(blobs[name]) != entry.blake2b:
            _bad(path, f"{name} does not match its digest: the file is damaged")
    try:
        tensors = safetensors.torch.load(blobs.pop(TENSORS))
    except Exception as error:  # whatever these bytes make the parser raise, the file is at fault
        _bad(path, f"{TENSORS} is not a valid safetensors file ({error})", error)
    part = _json(path, META, blobs[META])
    try:
        meta = decode_tree(part, tensors)
    except CheckpointError as error:
        _bad(path, str(error), error)
    if not isinstance(meta, dict):
        _bad(path, f"{META} holds a {type(meta).__name__}, not a dictionary")
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(META_PREFIX)}
    return Checkpoint(path, manifest.env_steps, tensors, meta)


def newest(folder: Path) -> tuple[Checkpoint, list[str]]:
    """The newest checkpoint that loads, and one message for each newer one that does not."""
    skipped: list[str] = []
    for _, path in reversed(_entries(Path(folder))):
        try:
            return load(path), skipped
        except CheckpointError as error:
            skipped.append(str(error))
    if skipped:
        raise CheckpointError("no checkpoint can be loaded:\n" + "\n".join(skipped))
    raise CheckpointError(f"no checkpoint in {folder}: the run has not saved one yet, or the folder is another one")


def best(folder: Path) -> Path | None:
    """The checkpoint with the highest recorded score, the newest of equals; None if none has a score."""
    return _best(_complete(Path(folder)))


def all_steps(folder: Path) -> list[int]:
    """Environment steps of the checkpoints present, ascending; nothing is verified."""
    return sorted({steps for steps, _ in _entries(Path(folder))})


def _contents(env_steps: int, tensors: dict, meta: dict, score: float | None) -> dict[str, bytes]:
    """All files of a checkpoint, the manifest last."""
    if not isinstance(meta, dict):
        raise CheckpointError(f"meta is a {type(meta).__name__}, not a dictionary")
    if taken := [name for name in tensors if name.startswith(META_PREFIX)]:
        raise CheckpointError(f"tensor name {taken[0]!r}: names with {META_PREFIX!r} in front are reserved")
    part, inner = encode_tree(meta, META_PREFIX)
    stored = {name: host_copy(name, array) for name, array in tensors.items()} | inner
    try:
        blobs = {META: _pretty(part), TENSORS: safetensors.torch.save(stored)}
    except (KeyError, UnicodeEncodeError) as error:
        raise CheckpointError(f"checkpoint cannot hold this: {error}") from error  # complex128, half a surrogate pair
    body = Manifest(
        schema=SCHEMA,
        env_steps=env_steps,
        best=float(score) if score is not None and math.isfinite(score) else None,
        versions=_versions(),
        files={name: FileEntry(len(blob), _digest(blob)) for name, blob in blobs.items()},
    )
    blobs[MANIFEST] = _pretty({"digest": _digest(msgspec.json.encode(body)), "manifest": body})
    return blobs


def _publish(folder: Path, target: Path, contents: dict[str, bytes], files: FileLayer) -> None:
    for parent in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
        files.mkdir(parent)
        files.fsync_dir(parent.parent)
    temporary, old = _temporary(target), _aside(target)
    try:
        files.mkdir(temporary)
        for name, blob in contents.items():
            files.write(temporary / name, blob)
            files.fsync(temporary / name)
        files.fsync_dir(temporary)
        if target.exists():  # a folder cannot be renamed over a full one; if we stop here, readers find `old`
            files.rename(target, old)
        files.rename(temporary, target)
        files.fsync_dir(folder)
    except OSError:
        _undo(temporary, target, old, files)
        raise


def _undo(temporary: Path, target: Path, old: Path, files: FileLayer) -> None:
    """Put things back after a failure; what fails again here is mended by the next save."""
    try:
        if old.exists() and not target.exists():
            files.rename(old, target)
        if temporary.exists():
            files.remove(temporary)
    except OSError as error:
        warnings.warn(f"{temporary} could not be removed ({error}); the next checkpoint removes it", stacklevel=4)


def _sweep(folder: Path, files: FileLayer) -> None:
    """Remove what crashed writers left, and finish or revert a replacement they began."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.name.startswith(".tmp-"):
            files.remove(path)
        elif path.name.startswith(".old-") and _STEP.fullmatch(path.name):
            target = folder / path.name.removeprefix(".old-")
            if _sound(target):
                _discard(path, files)
                continue
            if target.exists():
                _discard(target, files)
            files.rename(path, target)


def _prune(folder: Path, written: Path, keep: int, files: FileLayer) -> None:
    if _aside(written).exists():
        _discard(_aside(written), files)
    complete = _complete(folder)
    others = [path for _, path, _ in complete if path != written]
    kept = {written, _best(complete), *others[max(0, len(others) - keep + 1) :]}
    for path in others:
        if path not in kept:
            _discard(path, files)


def _discard(path: Path, files: FileLayer) -> None:
    """Removal takes many operations; under a temporary name a half-removed folder is never taken for a checkpoint."""
    doomed = _temporary(path)
    files.rename(path, doomed)
    files.remove(doomed)


def _temporary(path: Path) -> Path:
    return path.with_name(f".tmp-{path.name.removeprefix('.old-')}-{secrets.token_hex(16)}")


def _aside(path: Path) -> Path:
    return path.with_name(f".old-{path.name}")


def _entries(folder: Path) -> list[tuple[int, Path]]:
    """Folders named like checkpoints, oldest first; one set aside by an unfinished replacement precedes its step."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _STEP.fullmatch(path.name)
        if match and path.is_dir() and not path.is_symlink():
            found.append((int(match[2]), match[1] is None, path))
    return [(steps, path) for steps, _, path in sorted(found)]


def _complete(folder: Path) -> list[tuple[int, Path, Manifest]]:
    """Entries that look sound; others are left alone: they may be of a newer version, or evidence."""
    entries = ((steps, path, _sound(path)) for steps, path in _entries(folder))
    return [(steps, path, manifest) for steps, path, manifest in entries if manifest]


def _best(complete: list[tuple[int, Path, Manifest]]) -> Path | None:
    scored = [(manifest.best, steps, path) for steps, path, manifest in complete if manifest.best is not None]
    return max(scored)[2] if scored else None


def _sound(path: Path) -> Manifest | None:
    """The manifest, if it is valid and every file has the size it says: the check that reads no tensors."""
    try:
        manifest = _manifest(path)
        for name, entry in manifest.files.items():
            os.close(_open(path, name, entry.size))
    except CheckpointError:
        return None
    return manifest


def _manifest(path: Path) -> Manifest:
    if path.is_symlink():
        _bad(path, "the folder is a symbolic link; name the real one")
    if not path.is_dir():
        _bad(path, "there is no such checkpoint folder")
    outer = _json(path, MANIFEST, _read(path, MANIFEST))
    if not isinstance(outer, dict) or set(outer) != {"digest", "manifest"} or not isinstance(outer["manifest"], dict):
        _bad(path, f"{MANIFEST} is not a checkpoint's manifest")
    body = outer["manifest"]
    if _digest(msgspec.json.encode(body)) != outer["digest"]:
        _bad(path, f"{MANIFEST} does not match its digest: the file is damaged")
    if isinstance(body.get("schema"), int) and body["schema"] > SCHEMA:
        _bad(path, f"written by a newer Rookery (schema {body['schema']}, this one reads {SCHEMA}): upgrade rookery")
    try:
        manifest = msgspec.convert(body, Manifest)
    except msgspec.ValidationError as error:
        _bad(path, f"{MANIFEST}: {error}", error)
    if set(manifest.files) != {META, TENSORS} or manifest.schema != SCHEMA or manifest.env_steps < 0:
        _bad(path, f"{MANIFEST} names other files, another schema or negative steps: {sorted(manifest.files)[:4]}")
    return manifest


def _json(path: Path, name: str, blob: bytes) -> Any:
    """Parsed JSON, in the one spelling `_pretty` writes: repeated keys and stray bytes do not pass."""
    try:
        value = msgspec.json.decode(blob)
        if _pretty(value) == blob:
            return value
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        _bad(path, f"{name} is not valid JSON ({error})", error)
    _bad(path, f"{name} was edited or has repeated keys")


def _open(path: Path, name: str, size: int | None = None) -> int:
    """A descriptor of a regular file of that size; links, pipes and devices are refused without touching them."""
    try:
        handle = os.open(path / name, _READ)
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        _bad(path, f"{name} is missing" if missing else f"{name} cannot be read ({error.strerror})", error)
    info = os.fstat(handle)
    limit = size if name == TENSORS else MAX_JSON
    problem = None
    if not stat.S_ISREG(info.st_mode):
        problem = "is not a regular file"
    elif size is not None and info.st_size != size:
        problem = f"has {info.st_size} bytes instead of {size}"
    elif limit is not None and info.st_size > limit:
        problem = f"has {info.st_size} bytes, more than {limit}"
    if problem:
        os.close(handle)
        _bad(path, f"{name} {problem}")
    return handle


def _read(path: Path, name: str, size: int | None = None) -> bytes:
    try:
        with open(_open(path, name, size), "rb") as file:
            return file.read()
    except OSError as error:
        _bad(path, f"{name} cannot be read ({error.strerror})", error)


def _pretty(value: Any) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=2)


def _digest(blob: bytes) -> str:
    return hashlib.blake2b(blob, digest_size=32).hexdigest()


def _versions() -> dict[str, str]:
    versions = {"python": sys.version.split()[0], "torch": str(torch.__version__), "numpy": np.__version__}
    for name in ("rookery", "gymnasium"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "unknown"
    return versions


def _bad(path: Path, what: str, cause: BaseException | None = None) -> NoReturn:
    raise CheckpointError(f"checkpoint {path}: {what}. Restore it from a copy, or use an earlier checkpoint") from cause
