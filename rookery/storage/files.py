"""Folders on disk that are complete or absent: what checkpoints and saved replay memories have in common.

Such a folder is `step-000000123456/` with a `manifest.json` that has the size and blake2b digest of every file, and a
digest of itself. It is filled under a temporary name, synced and renamed, so a crash at any point leaves the previous
one in place. Neither reading nor writing follows a link: not the folder that holds the steps, not a step, not a file.
The digests find damage, not forgery: anyone who can write the folder can write a matching manifest. What the files mean
is decided by the caller.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import stat
import sys
import warnings
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import safetensors.torch
import torch

from rookery.core.errors import CheckpointError
from rookery.core.machine import Machine, amount
from rookery.storage import limits
from rookery.storage.codec import decode_tree, encode_tree, host_copy
from rookery.storage.folder import Refused
from rookery.storage.limits import MAX_JSON  # noqa: F401  (of every meta.json)

MANIFEST, META, TENSORS = "manifest.json", "meta.json", "tensors.safetensors"
META_PREFIX = "meta:"  # tensors that belong to arrays inside `meta.json`

_STEP = re.compile(r"(\.old-)?step-(\d{12,18})")
_READ = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
_WRITE = os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)


class Damage(Exception):
    """What is wrong with a file or folder; the caller adds which one it is and what to do."""


class FileLayer:
    """Every disk operation of a save, one method each, so that a test can fail or stop at any of them."""

    def mkdir(self, path: Path) -> None:
        path.mkdir(mode=0o700)

    def write(self, path: Path, data: bytes) -> None:
        """A new file."""
        self._write(path, os.O_CREAT | os.O_EXCL, data)

    def append(self, path: Path, data: bytes | memoryview) -> None:
        """More of a file that `write` began."""
        self._write(path, os.O_APPEND, data)

    def _write(self, path: Path, flags: int, data: bytes | memoryview) -> None:
        with open(os.open(path, _WRITE | flags, 0o600), "wb", buffering=0) as file:
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
        """A folder and what is in it, or a file; of a link, the link."""
        if path.is_symlink() or not path.is_dir():
            path.unlink()
        else:
            shutil.rmtree(path)  # which follows no link either

    def free(self, path: Path) -> int:
        """Bytes that may still be written to the disk of an existing folder."""
        return shutil.disk_usage(path).free


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    size: int
    blake2b: str


M = TypeVar("M", bound=msgspec.Struct)
Sound = Callable[[Path], M | None]  # the manifest, if it is valid and every file has the size it says
Complete = list[tuple[int, Path, M]]  # steps, folder, manifest
Spare = Callable[[Complete], Path | None]


# Writing


def step_name(env_steps: int) -> str:
    return f"step-{env_steps:012d}"


def publish(folder: Path, target: Path, fill: Callable[[Path], None], files: FileLayer) -> None:
    """Make `target` a folder that `fill` has written; on an exception of any kind what was there is there again."""
    check_real(folder)
    for parent in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
        files.mkdir(parent)
        files.fsync_dir(parent.parent)
    temporary, old = _temporary(target), _aside(target)
    try:
        files.mkdir(temporary)
        fill(temporary)
        files.fsync_dir(temporary)
        if os.path.lexists(target):  # a folder cannot be renamed over a full one; if we stop here, readers find `old`
            files.rename(target, old)
        files.rename(temporary, target)
        files.fsync_dir(folder)
    except Exception:
        _undo(temporary, target, old, files)
        raise


def _undo(temporary: Path, target: Path, old: Path, files: FileLayer) -> None:
    """Restore the previous folder after a failure; if that fails too, the next save repairs it."""
    try:
        if os.path.lexists(old) and not os.path.lexists(target):
            files.rename(old, target)
        if temporary.exists():
            files.remove(temporary)
    except OSError as error:
        warnings.warn(f"{temporary} could not be removed ({error}); the next save removes it", stacklevel=5)


def sweep(folder: Path, files: FileLayer, sound: Sound) -> None:
    """Remove what crashed writers left, and finish or revert a replacement they began."""
    try:
        check_real(folder)
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if path.name.startswith(".tmp-"):
                files.remove(path)
            elif path.name.startswith(".old-") and _STEP.fullmatch(path.name):
                if path.is_symlink():
                    files.remove(path)  # no writer left that
                    continue
                target = folder / path.name.removeprefix(".old-")
                if sound(target):
                    _discard(path, files)
                    continue
                if target.exists():
                    _discard(target, files)
                files.rename(path, target)
    except OSError as error:
        warnings.warn(f"what an interrupted save left in {folder} could not be removed: {error}", stacklevel=3)


def prune(
    folder: Path, written: Path, keep: int, files: FileLayer, sound: Sound, spare: Spare = lambda found: None
) -> None:
    """Remove all but `written`, the newest others (`keep` in all) and the one to spare, of those that are sound."""
    try:
        if os.path.lexists(_aside(written)):
            _discard(_aside(written), files)
        found = complete(folder, sound)
        others = [path for _, path, _ in found if path != written]
        kept = {written, spare(found), *others[max(0, len(others) - keep + 1) :]}
        for path in others:
            if path not in kept:
                _discard(path, files)
    except OSError as error:
        warnings.warn(f"{written} is saved, but an old one could not be removed: {error}", stacklevel=3)


def _discard(path: Path, files: FileLayer) -> None:
    """Removal takes many operations; under a temporary name a half-removed folder is never taken for a whole one."""
    doomed = _temporary(path)
    files.rename(path, doomed)
    files.remove(doomed)


def check_real(folder: Path) -> None:
    """`Refused` if the folder that holds the steps is a link: what is removed or written through it is not ours."""
    if folder.is_symlink() or (os.path.lexists(folder) and not folder.is_dir()):
        what = "a symbolic link" if folder.is_symlink() else "not a folder"
        raise Refused(folder, f"it is {what}, and a run folder has a real folder there; put one in its place")


def _temporary(path: Path) -> Path:
    return path.with_name(f".tmp-{path.name.removeprefix('.old-')}-{secrets.token_hex(16)}")


def _aside(path: Path) -> Path:
    return path.with_name(f".old-{path.name}")


# Reading: everything that is wrong is `Damage`


def entries(folder: Path) -> list[tuple[int, Path]]:
    """(steps, path) of folders by name, oldest first; one set aside by an unfinished replacement precedes its step."""
    found = []
    try:
        check_real(folder)
    except Refused as error:
        raise CheckpointError(f"cannot read {folder}: {error.strerror}") from error
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _STEP.fullmatch(path.name)
        if match and path.is_dir() and not path.is_symlink():
            found.append((int(match[2]), match[1] is None, path))
    return [(steps, path) for steps, _, path in sorted(found)]


def sound(path: Path, manifest_of: Callable[[Path], Any], limit: Callable[[str], int | None]) -> Any:
    """The manifest, if it is valid and every file has the size it says: the check that reads no contents."""
    try:
        manifest = manifest_of(path)
        for name, entry in manifest.files.items():
            os.close(open_file(path, name, entry.size, limit(name)))
    except Damage:
        return None
    return manifest


def complete(folder: Path, sound: Sound) -> Complete:
    """Entries that look sound; others are left alone: they may be of a newer version, or evidence."""
    found = ((steps, path, sound(path)) for steps, path in entries(folder))
    return [(steps, path, manifest) for steps, path, manifest in found if manifest]


def open_file(path: Path, name: str, size: int | None = None, limit: int | None = None) -> int:
    """A descriptor of a regular file of that size; links, pipes and devices are refused without touching them."""
    try:
        handle = os.open(path / name, _READ)
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        raise Damage(f"{name} is missing" if missing else f"{name} cannot be read ({error.strerror})") from error
    info = os.fstat(handle)
    problem = None
    if not stat.S_ISREG(info.st_mode):
        problem = "is not a regular file"
    elif size is not None and info.st_size != size:
        problem = f"has {info.st_size} bytes instead of {size}"
    elif limit is not None and info.st_size > limit:
        problem = f"has {info.st_size} bytes, more than {limit}"
    if problem:
        os.close(handle)
        raise Damage(f"{name} {problem}")
    return handle


def read(path: Path, name: str, size: int | None = None, limit: int | None = None) -> bytes:
    try:
        with open(open_file(path, name, size, limit), "rb") as file:
            return file.read()
    except OSError as error:
        raise Damage(f"{name} cannot be read ({error.strerror})") from error


def read_verified(path: Path, name: str, entry: FileEntry, limit: int | None = None) -> bytes:
    """A whole file. To read and unpack it takes twice its size; a file with holes may be larger than any disk."""
    have, source = Machine().memory()
    if 2 * entry.size > have:
        raise Damage(f"{name} has {amount(entry.size)}, and there are {amount(have)} to read it into ({source})")
    blob = read(path, name, entry.size, limit)
    if digest(blob) != entry.blake2b:
        raise Damage(f"{name} does not match its digest: the file is damaged")
    return blob


def parse(name: str, blob: bytes) -> Any:
    """Parsed JSON, in the one spelling `pretty` writes: repeated keys and stray bytes do not pass."""
    if excess := limits.json_excess(blob):
        raise Damage(f"{name} {excess}")
    try:
        value = msgspec.json.decode(blob)
        if pretty(value) == blob:
            return value
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Damage(f"{name} is not valid JSON ({error})") from error
    raise Damage(f"{name} was edited or has repeated keys")


def pack(meta: Any, tensors: Mapping[str, torch.Tensor | np.ndarray] | None = None) -> dict[str, bytes]:
    """A tree and named tensors as two files; CheckpointError if they hold what cannot be stored."""
    if taken := [name for name in tensors or {} if name.startswith(META_PREFIX)]:
        raise CheckpointError(f"tensor name {taken[0]!r}: names with {META_PREFIX!r} in front are reserved")
    part, inner = encode_tree(meta, META_PREFIX)
    stored = {name: host_copy(name, array) for name, array in (tensors or {}).items()} | inner
    try:
        blobs = {META: pretty(part), TENSORS: safetensors.torch.save(stored)}
        # What is about to be written is read, all but the digests and tensors, which cannot be otherwise than they are.
        if excess := limits.header_excess(blobs[TENSORS]):
            raise Damage(f"{TENSORS} {excess}")
        _decoded(blobs[META], inner)
        return blobs
    except (KeyError, UnicodeEncodeError, Damage) as error:
        raise CheckpointError(f"checkpoint cannot hold this: {error}") from error  # complex128, half a surrogate pair


def unpack(blobs: dict[str, bytes]) -> tuple[Any, dict[str, torch.Tensor]]:
    """The tree and the tensors that `pack` made files of."""
    if excess := limits.header_excess(blobs[TENSORS]):
        raise Damage(f"{TENSORS} {excess}")
    try:
        tensors = safetensors.torch.load(blobs[TENSORS])
    except Exception as error:  # any exception of the parser means a damaged file
        raise Damage(f"{TENSORS} is not a valid safetensors file ({error})") from error
    for name, tensor in tensors.items():
        if tensor.dtype == torch.bool and tensor.numel() and tensor.view(torch.uint8).max() > 1:
            raise Damage(f"{TENSORS}: {name} has bytes that are neither true nor false")
    meta = _decoded(blobs[META], tensors)
    return meta, {name: tensor for name, tensor in tensors.items() if not name.startswith(META_PREFIX)}


def _decoded(blob: bytes, tensors: dict[str, torch.Tensor]) -> Any:
    try:
        with limits.collector_paused():
            return decode_tree(parse(META, blob), tensors)
    except CheckpointError as error:
        raise Damage(str(error)) from error


def seal(manifest: msgspec.Struct) -> bytes:
    return pretty({"digest": digest(msgspec.json.encode(manifest)), "manifest": manifest})


def unseal(path: Path, kind: type[M], schema: int) -> M:
    """The manifest in `path`, of type `kind`; its own digest and schema fit."""
    if path.is_symlink():
        raise Damage("the folder is a symbolic link; name the real one")
    outer = parse(MANIFEST, read(path, MANIFEST, limit=limits.MAX_MANIFEST))
    if not isinstance(outer, dict) or set(outer) != {"digest", "manifest"} or not isinstance(outer["manifest"], dict):
        raise Damage(f"{MANIFEST} is not a manifest")
    body = outer["manifest"]
    if digest(msgspec.json.encode(body)) != outer["digest"]:
        raise Damage(f"{MANIFEST} does not match its digest: the file is damaged")
    found = body.get("schema")
    if isinstance(found, int) and found > schema:
        raise Damage(f"written by a newer Rookery (schema {found}, this one reads {schema}): upgrade rookery")
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise Damage(f"{MANIFEST}: {error}") from error


def pretty(value: Any) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=2)


def digest(blob: bytes) -> str:
    return hashlib.blake2b(blob, digest_size=32).hexdigest()


def versions() -> dict[str, str]:
    """What wrote a folder."""
    found = {"python": sys.version.split()[0], "torch": str(torch.__version__), "numpy": np.__version__}
    for name in ("rookery", "gymnasium"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "unknown"
    return found
