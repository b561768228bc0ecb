"""A replay memory on disk: streamed from a snapshot, verified whole before it is loaded.

A saved memory is a folder `step-000000123456/` beside the checkpoints (see files.py for how it comes to be complete or
absent): `manifest.json`, the small state in `meta.json` and `tensors.safetensors`, and the bulk arrays as
`rows-00000.safetensors`, …: consecutive rows of one array each, at most 256 MiB, plain bytes. Rows that the memory
keeps packed differ in size: such a file has their sizes beside their bytes. Nothing is compressed here, nothing can run
code. The replay table defines what the rows mean.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from shlex import quote
from typing import Any

import msgspec
import numpy as np

from rookery.core import tree
from rookery.core.errors import CheckpointError, StorageError
from rookery.core.machine import amount
from rookery.core.wording import setting
from rookery.storage import files as disk
from rookery.storage.codec import encode_tree
from rookery.storage.files import MANIFEST, MAX_JSON, META, META_PREFIX, TENSORS, Damage, FileEntry, FileLayer
from rookery.tables.ring import Packed
from rookery.tables.snapshot import CHUNK, PACKED_SEGMENT, Snapshot, Table

SCHEMA = 2
READABLE = (1, SCHEMA)  # 1 has no packed arrays
SEGMENT = 256 << 20  # bytes of rows per file: what has to be synced at once
HEADROOM = 1 << 20  # bytes of disk for headers and manifest

_SEGMENT_NAME = re.compile(r"rows-\d{5,}\.safetensors")


class ArrayEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    rows: int
    used: int  # the first so many are stored
    width: int  # bytes of a row, unpacked
    packed: bool = False


class SegmentEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    array: str
    first: int  # row
    rows: int
    packed: int | None = None  # bytes of all rows together, where they differ in size


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    schema: int
    env_steps: int
    versions: dict[str, str]
    arrays: dict[str, ArrayEntry]
    segments: dict[str, SegmentEntry]
    files: dict[str, FileEntry]


# Writing


def save(folder: Path, env_steps: int, snapshot: Snapshot, files: FileLayer | None = None, keep: int = 1) -> Path:
    """Write a snapshot and close it; keep the newest `keep` in all. On StorageError the older ones are as they were."""
    if keep < 1:
        raise ValueError(f"keep {keep} would remove the memory just written; use 1 or more")
    files, folder = files or FileLayer(), Path(folder)
    target = folder / disk.step_name(env_steps)
    with snapshot:
        try:
            part, state = _state(snapshot)  # first: no other part of the memory changes as often
            disk.sweep(folder, files, _sound)
            _check_room(folder, snapshot.bytes + sum(array.nbytes for array in state.values()), files)
            disk.publish(folder, target, lambda to: _fill(to, int(env_steps), snapshot, part, state, files), files)
        except OSError as error:
            raise StorageError(
                f"replay memory {target} could not be written: {error.strerror or error}; the one before is untouched. "
                "Free space on that disk, or check its permissions"
            ) from error
    disk.prune(folder, target, keep, files, _sound)
    return target


def _state(snapshot: Snapshot) -> tuple[Any, dict[str, np.ndarray]]:
    """What is not in the arrays, as `encode_tree` would split it. Vectors are copies already."""
    part, tensors = encode_tree(snapshot.numbers, META_PREFIX)
    vectors = {f"{META_PREFIX}/{path}": vector for path, vector in snapshot.vectors().items()}
    part = tree.merged(part, {name.removeprefix(f"{META_PREFIX}/"): {"$array": name} for name in vectors})
    return part, {name: tensor.numpy() for name, tensor in tensors.items()} | vectors


def _check_room(folder: Path, need: int, files: FileLayer) -> None:
    place = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    have = files.free(place)
    if have < need + HEADROOM:
        raise StorageError(
            f"replay memory: need {amount(need + HEADROOM)} on the disk of {folder}, have {amount(have)}; "
            f"free some, or use a smaller {setting('algo.replay.capacity')}, or leave the memory out "
            f"({setting('algo.replay.save', False)})"
        )


def _fill(
    folder: Path, env_steps: int, snapshot: Snapshot, part: Any, state: dict[str, np.ndarray], files: FileLayer
) -> None:
    """All files of a saved memory, the manifest last."""
    entries: dict[str, FileEntry] = {}
    segments: dict[str, SegmentEntry] = {}
    for segment, blocks in _segments(snapshot):
        name = f"rows-{len(segments):05d}.safetensors"
        segments[name] = segment
        header = _segment_header(segment, snapshot.shapes[segment.array][2])
        entries[name] = _stream(folder / name, header, blocks, files)
    order = sorted(state, key=lambda name: -state[name].itemsize)  # descending: every tensor is aligned
    header = _header({name: (_code(state[name]), state[name].shape, state[name].nbytes) for name in order})
    entries[TENSORS] = _stream(folder / TENSORS, header, _blocks(state[name] for name in order), files)
    entries[META] = _stream(folder / META, disk.pretty(part), (), files)
    arrays = {name: ArrayEntry(*shape, name in snapshot.packed) for name, shape in snapshot.shapes.items()}
    manifest = Manifest(SCHEMA, env_steps, disk.versions(), arrays, segments, entries)
    _stream(folder / MANIFEST, disk.seal(manifest), (), files)


def _segments(snapshot: Snapshot) -> Iterator[tuple[SegmentEntry, Iterable[np.ndarray]]]:
    """All rows in use, in pieces that become a file each, with what stands in it behind the header."""
    for array in snapshot.shapes:
        packed = array in snapshot.packed
        for first, rows in snapshot.segments(array, min(PACKED_SEGMENT, SEGMENT) if packed else SEGMENT):
            chunks = snapshot.chunks(array, first, rows)
            if not packed:
                yield SegmentEntry(array, first, rows), chunks
                continue
            objects = list(chain.from_iterable(chunks))  # references: nothing is copied yet
            sizes = np.fromiter(map(len, objects), np.int64, len(objects))
            yield SegmentEntry(array, first, rows, int(sizes.sum())), chain([sizes], _joined(objects, sizes))


def _joined(objects: list[bytes], sizes: np.ndarray) -> Iterator[np.ndarray]:
    """Their bytes in pieces of up to a chunk. No loop over all objects: it would keep other threads waiting."""
    ends, begin, done = np.cumsum(sizes), 0, 0
    while begin < len(objects):
        end = max(begin + 1, int(ends.searchsorted(done + CHUNK, "right")))
        yield np.frombuffer(b"".join(objects[begin:end]), np.uint8)
        begin, done = end, int(ends[end - 1])


def _stream(path: Path, head: bytes, blocks: Iterable[np.ndarray], files: FileLayer) -> FileEntry:
    """Write one file piece by piece, and sync it. Hashing and writing let other threads run."""
    summed, size = hashlib.blake2b(head, digest_size=32), len(head)
    files.write(path, head)
    for block in blocks:
        view = block.data.cast("B") if block.nbytes else memoryview(b"")
        summed.update(view)
        files.append(path, view)
        size += len(view)
    files.fsync(path)
    return FileEntry(size, summed.hexdigest())


def _blocks(arrays: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    for array in arrays:
        flat = array.reshape(-1).view(np.uint8)
        yield from (flat[at : at + CHUNK] for at in range(0, len(flat), CHUNK))


def _header(tensors: Mapping[str, tuple[str, tuple[int, ...], int]], about: dict[str, str] | None = None) -> bytes:
    """The beginning of a safetensors file: name -> (type, shape, bytes), in the order they follow."""
    entries: dict[str, dict[str, Any]] = {"__metadata__": about or {}}
    end = 0
    for name, (dtype, shape, size) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": (end, end + size)}
        end += size
    text = msgspec.json.encode(entries)
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _segment_header(segment: SegmentEntry, width: int) -> bytes:
    rows, about = segment.rows, {"first": str(segment.first)}
    if segment.packed is None:
        return _header({segment.array: ("U8", (rows, width), rows * width)}, about)
    sizes, objects = ("I64", (rows,), 8 * rows), ("U8", (segment.packed,), segment.packed)
    return _header({"sizes": sizes, segment.array: objects}, about)


def _body(segment: SegmentEntry, width: int) -> int:
    """Bytes of a segment's file behind its header."""
    return segment.rows * width if segment.packed is None else 8 * segment.rows + segment.packed


def _most_packed(unpacked: int) -> int:
    """Bytes that a row can have when it is packed: zlib adds a little to what it cannot shrink."""
    return 2 * unpacked + 64


def _code(array: np.ndarray) -> str:
    """The safetensors name of a type."""
    kind = {"f": "F", "i": "I", "u": "U"}.get(array.dtype.kind)
    if array.dtype != bool and kind is None:
        raise CheckpointError(f"the state of a replay memory holds {array.dtype}; use numbers")
    return f"{kind}{8 * array.itemsize}" if kind else "BOOL"


# Reading


def find(folder: Path, env_steps: int) -> Path | None:
    """The memory saved at that step, else the nearest one, older or newer (both are experience), else None."""
    found = dict(disk.entries(Path(folder)))  # of two at one step the last: the one that was not set aside
    return found[min(found, key=lambda steps: (abs(steps - env_steps), steps))] if found else None


def load(path: Path, table: Table) -> int:
    """Fill a table that has the sizes of the one saved; returns the environment steps the memory was saved at.

    What cannot be used is a CheckpointError. Everything but the values in the rows is verified before the table is
    touched; after an error over those, the table is of no use.
    """
    path = Path(path)
    try:
        arrays = table.arrays()
        manifest = _manifest(path)
        _check_fit(manifest, arrays)
        for name in manifest.segments:
            _verify(path, name, manifest, manifest.files[name])
        blobs = {name: disk.read_verified(path, name, manifest.files[name], _limit(name)) for name in (META, TENSORS)}
        state, _ = disk.unpack(blobs)
        _check_state(state, table.state(), "state")
        try:
            table.check_state(state, {name: entry.used for name, entry in manifest.arrays.items()})
            for name in manifest.segments:
                _read_rows(path, name, manifest, arrays)
            table.load(state)
            table.check_records()
        except (CheckpointError, KeyError, ValueError, TypeError, IndexError, AttributeError, OverflowError) as error:
            raise Damage(f"{META} does not fit this memory ({type(error).__name__}: {error})") from error
    except Damage as error:
        raise CheckpointError(
            f"replay memory {path}: {error}. Restore it from a copy, or remove the folder to continue with an empty "
            f"memory: rm -r {quote(str(path))}"
        ) from error
    return manifest.env_steps


def _sound(path: Path) -> Manifest | None:
    return disk.sound(path, _manifest, _limit)


def _manifest(path: Path) -> Manifest:
    """A manifest whose segments are all of the rows in use, each once."""
    manifest = disk.unseal(path, Manifest, SCHEMA)
    if manifest.schema not in READABLE or manifest.env_steps < 0:
        raise Damage(f"{MANIFEST} has another schema or negative steps")
    names = set(manifest.segments)
    if set(manifest.files) != {META, TENSORS} | names or not all(map(_SEGMENT_NAME.fullmatch, names)):
        raise Damage(f"{MANIFEST} names other files: {sorted(manifest.files)[:4]}")
    if strange := {segment.array for segment in manifest.segments.values()} - set(manifest.arrays):
        raise Damage(f"{MANIFEST} has segments of an array {min(strange)!r} that is not there")
    ends = dict.fromkeys(manifest.arrays, 0)
    for segment in sorted(manifest.segments.values(), key=lambda segment: segment.first):
        if segment.first != ends[segment.array] or segment.rows < 1:
            raise Damage(f"{MANIFEST}: rows of {segment.array} are missing or there twice, at {segment.first}")
        ends[segment.array] += segment.rows
    for array, entry in manifest.arrays.items():
        if ends[array] != entry.used or not 0 <= entry.used <= entry.rows or entry.width < 0:
            raise Damage(f"{MANIFEST}: {array} has {ends[array]} rows instead of {entry.used} of {entry.rows}")
    for name, segment in manifest.segments.items():
        entry = manifest.arrays[segment.array]
        if (segment.packed is not None) != entry.packed:
            raise Damage(f"{MANIFEST}: {name} and its array are not packed alike")
        if segment.packed is not None and not 0 <= segment.packed <= segment.rows * _most_packed(entry.width):
            raise Damage(f"{MANIFEST}: {name} cannot hold {segment.packed} bytes in {segment.rows} rows")
        if manifest.files[name].size != len(_segment_header(segment, entry.width)) + _body(segment, entry.width):
            raise Damage(f"{MANIFEST}: {name} cannot hold {segment.rows} rows of {entry.width} bytes")
    return manifest


def _check_fit(manifest: Manifest, arrays: dict[str, np.ndarray | Packed]) -> None:
    saved = {name: (entry.rows, entry.width) for name, entry in manifest.arrays.items()}
    here = {name: array.shape for name, array in arrays.items()}
    packed = {name for name, array in arrays.items() if isinstance(array, Packed)}
    if manifest.schema == 1 and packed and not packed & saved.keys():
        raise Damage(
            "it was written by an older Rookery, which stored compressed frames in another way (schema 1, this one "
            f"reads {SCHEMA}). Continue with the version that wrote it ({manifest.versions.get('rookery', 'unknown')})"
        )
    if packed != {name for name, entry in manifest.arrays.items() if entry.packed}:
        raise Damage("it is of another memory: frames are compressed there or here; compress must be the same")
    for name in sorted(saved.keys() | here.keys()):
        if saved.get(name) != here.get(name):
            raise Damage(
                f"it is of another memory: {name} is {saved.get(name, 'absent')} there and {here.get(name, 'absent')} "
                "here (rows, bytes); the capacity, the observations and the kind of items must be the same"
            )


def _check_state(saved: Any, here: Any, where: str) -> None:
    """That a table's state has the parts of this one's: a table of another kind must not be half loaded."""
    if isinstance(here, dict):
        if not isinstance(saved, dict) or saved.keys() != here.keys():
            raise Damage(f"it is of another memory: {where} has other parts; sampler and remover must be the same")
        for key in here:
            _check_state(saved[key], here[key], f"{where}/{key}")
    elif isinstance(here, np.ndarray):
        kind = (saved.dtype, saved.ndim) if isinstance(saved, np.ndarray) else type(saved).__name__
        if kind != (here.dtype, here.ndim):
            raise Damage(f"it is of another memory: {where} is {kind} there and {(here.dtype, here.ndim)} here")


def _pieces(path: Path, name: str, size: int) -> Iterator[memoryview]:
    """A file of that size, piece by piece; each is valid until the next."""
    buffer = memoryview(bytearray(min(CHUNK, size)))
    try:
        with open(disk.open_file(path, name, size), "rb", buffering=0) as file:
            while size:
                got = file.readinto(buffer[: min(len(buffer), size)])
                if not got:
                    raise Damage(f"{name} ended {size} bytes early")
                size -= got
                yield buffer[:got]
    except OSError as error:
        raise Damage(f"{name} cannot be read ({error.strerror})") from error


def _verify(path: Path, name: str, manifest: Manifest, entry: FileEntry) -> None:
    segment = manifest.segments[name]
    width = manifest.arrays[segment.array].width
    head, seen = _segment_header(segment, width), bytearray()
    begin = len(head) + (0 if segment.packed is None else 8 * segment.rows)  # of the rows
    summed = hashlib.blake2b(digest_size=32)
    for piece in _pieces(path, name, entry.size):
        summed.update(piece)
        seen += piece[: begin - len(seen)]
    if summed.hexdigest() != entry.blake2b:
        raise Damage(f"{name} does not match its digest: the file is damaged")
    if seen[: len(head)] != head:
        raise Damage(f"{name} holds something else than rows {segment.first}.. of {segment.array}")
    if segment.packed is not None:
        sizes = np.frombuffer(seen, "<i8", offset=len(head))
        if sizes.min() < 0 or sizes.max() > _most_packed(width) or sizes.sum() != segment.packed:
            raise Damage(f"{name} has rows of sizes that do not fit")


def _read_rows(path: Path, name: str, manifest: Manifest, arrays: dict[str, np.ndarray | Packed]) -> None:
    """Put a segment's rows, verified before, where they belong."""
    segment = manifest.segments[name]
    array, there = arrays[segment.array], slice(segment.first, segment.first + segment.rows)
    head = len(_segment_header(segment, array.shape[1]))
    if isinstance(array, Packed):
        array[there] = _objects(path, name, manifest.files[name].size, head, segment.rows)
        return
    flat, at = array[there].reshape(-1), -head
    for piece in _pieces(path, name, manifest.files[name].size):
        body = piece[max(0, -at) :]
        flat[max(0, at) : at + len(piece)] = body
        at += len(piece)


def _objects(path: Path, name: str, size: int, head: int, rows: int) -> list[bytes]:
    """The rows of a segment that differ in size."""
    try:
        with open(disk.open_file(path, name, size), "rb") as file:
            file.seek(head)
            sizes = np.frombuffer(file.read(8 * rows), "<i8").tolist()
            return [file.read(size) for size in sizes]
    except OSError as error:
        raise Damage(f"{name} cannot be read ({error.strerror})") from error


def _limit(name: str) -> int | None:
    return MAX_JSON if name == META else None
