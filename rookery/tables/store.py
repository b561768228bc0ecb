"""The bulk memory of a replay table: who lies where, and how it gets in and out. It decides nothing about drawing.

Two kinds of arrays. **Records**: the columns of one item side by side in one row of bytes, so that drawing 512 items is
one gather of rows, followed by views. **Frames**: one ring per image leaf (see `ring.py`), to which records refer.
"""

from __future__ import annotations

from math import ceil, prod
from typing import Any

import numpy as np

from rookery.core.types import EnvSpec, Leaf, Replay, Shapes
from rookery.tables.frames import fill, frame_shape, image_leaves
from rookery.tables.ring import NEVER, BeforeWrite, FrameRing, Packed, PackedRing, Rows, runs

SOFT_ROOM = 1.25  # physical room of a soft capacity
PACKED = 4  # what compression makes of frames, for `bytes_needed` only: most shrink more than that
_NOT_STORED = ("count", "steps", "priority")  # the table keeps what it needs of these


def physical_slots(plan: Replay) -> int:
    capacity = plan.memory.capacity
    return ceil(capacity * SOFT_ROOM) if plan.memory.remover == "soft" else capacity


def frame_rows(plan: Replay, shapes: Shapes, key: str, leaf: Leaf, actors: int) -> int:
    """Rows of a frame ring: as many as full slots of items need, and a margin.

    A transition brings one frame; a sequence brings as many as it has rows that no earlier one of its episode has.
    On top of that come, per episode, the final observation and the frames of a first stack that are no repetition (for
    sequences also the overlap that the first one lacks), and once, the way an item reaches back: `reach` rows of its
    own actor, in parcels that alternate with those of all others. The share for episodes is enough from 128 steps an
    episode on. The margin is limited to a 64th (or 4096 frames, where memory is no matter): where it is too small,
    items leave a little early, and that is all.
    """
    most = shapes[f"frames/{key}"][0][0]  # new frames of one parcel
    slots, reach = physical_slots(plan), _reach(plan, leaf)
    per_item, share = (max(1, plan.sequence - plan.overlap), 32) if plan.sequence else (1, 128)
    base = slots * per_item
    wanted = base // share + actors * most * (1 + reach)
    return max(base + min(wanted, max(2 * base // share, 4096)), 2 * most)


def store_bytes(plan: Replay, shapes: Shapes, spec: EnvSpec, actors: int) -> int:
    books = 16 if plan.memory.remover == "inverse" else 8  # ids, and which slots are free
    total = physical_slots(plan) * (record_dtype(shapes, spec).itemsize + books)
    for key, leaf in image_leaves(spec).items():
        frame = prod(frame_shape(leaf)) * np.dtype(leaf.dtype).itemsize
        total += frame_rows(plan, shapes, key, leaf, actors) * (frame // PACKED if plan.memory.compress else frame)
    return total


def record_dtype(shapes: Shapes, spec: EnvSpec) -> np.dtype:
    """One item: every field aligned to its own type, the row to 8 bytes; frame numbers become rows of the ring."""
    fields: list[tuple[str, np.dtype, tuple[int, ...]]] = []
    for path, (shape, name) in shapes.items():
        if path not in _NOT_STORED and not path.startswith(("frames/", "first_frame/")):
            fields.append((path, np.dtype("int32" if _image_key(path, spec) else name), shape[1:]))
    fields.sort(key=lambda field: -field[1].alignment)  # descending: no gaps between them
    offsets, end = [], 0
    for _, dtype, shape in fields:
        offsets.append(end)
        end += dtype.itemsize * prod(shape)
    paths, formats = [path for path, *_ in fields], [(dtype, shape) for _, dtype, shape in fields]
    return np.dtype({"names": paths, "formats": formats, "offsets": offsets, "itemsize": -(-end // 8) * 8})


def _reach(plan: Replay, leaf: Leaf) -> int:
    """Rows between an item's oldest frame and the row in which its actor emits it, at most."""
    return (plan.burn_in + plan.sequence if plan.sequence else plan.n_step) + leaf.stack


def _image_key(path: str, spec: EnvSpec) -> str | None:
    top, _, key = path.partition("/")
    return key if top in ("obs", "next_obs") and key in image_leaves(spec) else None


class Store:
    """Records, their ids, and the frames they need. Slots are a ring, or with remover "inverse" any that is free."""

    def __init__(self, plan: Replay, shapes: Shapes, spec: EnvSpec, actors: int):
        self.before_write: BeforeWrite | None = None  # called before rows of arrays or vectors change: snapshots
        self.slots = physical_slots(plan)
        self.next_id = 0
        self.ids = np.full(self.slots, -1, np.int64)  # -1: no item here
        self._dtype = record_dtype(shapes, spec)
        self._records = np.zeros(self.slots, self._dtype)
        self._rows = self._records.view(f"V{self._dtype.itemsize}")  # fields are of no concern to a gather
        self._paths = self._dtype.names or ()
        self.columns = {path: self._records[path] for path in self._paths}
        self._by_time = plan.sequence > 0
        self._first = 0  # no older item is here
        self._free = np.arange(self.slots)[::-1].copy() if plan.memory.remover == "inverse" else None
        self._free_count = self.slots
        kind = PackedRing if plan.memory.compress else FrameRing
        self.rings = {
            key: kind(
                key, frame_rows(plan, shapes, key, leaf, actors), frame_shape(leaf), _reach(plan, leaf), leaf.dtype
            )
            for key, leaf in image_leaves(spec).items()
        }
        self._leaf_shape = {key: spec.obs[key].shape for key in self.rings}
        self._images = {  # ring -> columns that refer to it
            key: [path for path in self.columns if _image_key(path, spec) == key] for key in self.rings
        }
        for key, ring in self.rings.items():
            ring.prepare(plan.memory.batch * sum(prod(self.columns[path].shape[1:]) for path in self._images[key]))

    # In

    def losing(self, parcel: dict[str, np.ndarray]) -> np.ndarray:
        """Slots of items that lose a frame when the frames of `parcel` come in; to be freed before they do."""
        lost = [np.empty(0, np.int64)]
        for key, ring in self.rings.items():
            low = ring.head + int(parcel["count"][1]) - ring.rows
            for first, count in ring.watch.overdue(low):
                ids = np.arange(first, first + count)
                slots = ids % self.slots
                here = self.ids[slots] == ids
                ids, slots = ids[here], slots[here]
                rows = [_flat(self.columns[path][slots]) for path in self._images[key]]
                oldest = ring.ages(np.concatenate(rows, axis=1)).min(axis=1, initial=NEVER)
                gone = oldest < low
                lost.append(slots[gone])
                if not gone.all():
                    left = ids[~gone]
                    ring.watch.again((int(oldest[~gone].min()), int(left[0]), int(left[-1] - left[0] + 1)))
        return lost[0] if len(lost) == 1 else np.unique(np.concatenate(lost))

    def admit(self, parcel: dict[str, np.ndarray], actor: int) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
        """Take the frames of a parcel in; return its items as `add` wants them, and which of them can be kept.

        Some cannot (None: all can) if their actor is so slow that frames of theirs have been overwritten by others.
        """
        count = int(parcel["count"][0])
        items = {path: parcel[path][:count] for path in self.columns}
        keep = None
        for key, ring in self.rings.items():
            frames = parcel[f"frames/{key}"][: int(parcel["count"][1])]
            ring.write(frames, actor, int(parcel[f"first_frame/{key}"][0]), self.before_write)
            paths = self._images[key]
            widths = np.cumsum([0] + [prod(items[path].shape[1:]) for path in paths])
            numbers = np.concatenate([_flat(items[path]) for path in paths], axis=1)
            rows, oldest = ring.locate(actor, numbers)
            for path, begin, end in zip(paths, widths, widths[1:]):
                items[path] = rows[:, begin:end].reshape(items[path].shape)
            items[ring.name] = oldest
            if count and oldest.min() < 0:
                keep = oldest >= 0 if keep is None else keep & (oldest >= 0)
        return items, keep

    def ahead(self, count: int) -> np.ndarray:
        """The slots that the next `count` items go to; in a ring, older items may still be there."""
        if self._free is None:
            return np.arange(self.next_id, self.next_id + count) % self.slots
        assert count <= self._free_count, (count, self._free_count)
        return self._free[self._free_count - count : self._free_count][::-1].copy()

    @property
    def room(self) -> int:
        """Items that can be added before others have to be freed; a ring takes the slots of the oldest."""
        return self.slots if self._free is None else self._free_count

    def add(self, items: dict[str, np.ndarray], slots: np.ndarray) -> None:
        """Write items to the slots that `ahead` gave for them."""
        count = len(slots)
        if not count:
            return
        if self._free is None:
            parts: list[tuple[slice, Rows]] = list(runs(self.next_id % self.slots, count, self.slots))
        else:
            parts = [(slice(0, count), slots)]
            self._free_count -= count
        for here, there in parts:
            if self.before_write is not None:
                self.before_write("records", there)
                self.before_write("store/ids", there)
            for path, column in self.columns.items():
                column[there] = items[path][here]
        for ring in self.rings.values():
            ring.watch.add(int(items[ring.name].min()), self.next_id, count)
        self.ids[slots] = np.arange(self.next_id, self.next_id + count)
        self.next_id += count

    def free(self, slots: np.ndarray) -> None:
        if self.before_write is not None:
            self.before_write("store/ids", slots)
        self.ids[slots] = -1
        if self._free is not None:
            there = slice(self._free_count, self._free_count + len(slots))
            if self.before_write is not None:
                self.before_write("store/free", there)
            self._free[there] = slots
            self._free_count += len(slots)

    # Out

    def read(self, slots: np.ndarray) -> dict[str, np.ndarray]:
        """Copies of items, by column: [N, ...], and [rows, N, ...] for what sequences have by row. Images whole."""
        records = self._rows.take(slots).view(self._dtype)
        items = {path: records[path] for path in self._paths}
        if self._by_time:
            for path in items:
                if path.partition("/")[0] not in ("state", "version"):
                    items[path] = np.ascontiguousarray(items[path].swapaxes(0, 1))
        for key, ring in self.rings.items():
            paths = self._images[key]
            for path, frames in zip(paths, ring.gather([items[path] for path in paths])):
                items[path] = frames.reshape(*items[path].shape[:-1], *self._leaf_shape[key])
        return items

    def oldest(self, count: int) -> np.ndarray:
        """Slots of the `count` oldest items of a ring; to be freed."""
        first, found = max(self._first, self.next_id - self.slots), []
        while count > 0 and first < self.next_id:
            ids = np.arange(first, min(first + count, self.next_id))
            slots = ids % self.slots
            found.append(slots[self.ids[slots] == ids])
            count, first = count - len(found[-1]), first + len(ids)
        self._first = first
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def forget(self, actor: int) -> None:
        for ring in self.rings.values():
            ring.forget(actor)

    # Checkpoints

    def arrays(self) -> dict[str, np.ndarray | Packed]:
        """The bulk memory by name: views [rows, bytes]."""
        records = self._records.view(np.uint8).reshape(self.slots, -1)
        return {"records": records} | {ring.name: ring.array() for ring in self.rings.values()}

    def used(self) -> dict[str, int]:
        """Rows of `arrays()` that may have been written; all behind them are empty. New slots are taken in order."""
        frames = {ring.name: min(ring.head, ring.rows) for ring in self.rings.values()}
        return {"records": min(self.next_id, self.slots)} | frames

    def vectors(self) -> dict[str, np.ndarray]:
        """Parts of `state` that grow with the memory, as views. `before_write` calls them "store/ids", "store/free"."""
        free = np.empty(0, np.int64) if self._free is None else self._free[: self._free_count]
        return {"ids": self.ids, "free": free}

    def numbers(self) -> dict[str, Any]:
        """The state without them."""
        return {"next_id": self.next_id, "rings": {key: ring.state() for key, ring in self.rings.items()}}

    def state(self) -> dict[str, Any]:
        return self.numbers() | {name: vector.copy() for name, vector in self.vectors().items()}

    def load(self, state: dict[str, Any]) -> None:
        fill(self.ids, np.asarray(state["ids"]), "ids of items")
        self.next_id, self._first = int(state["next_id"]), 0
        if self._free is not None:
            self._free_count = len(state["free"])
            self._free[: self._free_count] = state["free"]
        for key, ring in self.rings.items():
            ring.load(state["rings"][key])


def _flat(rows: np.ndarray) -> np.ndarray:
    return rows.reshape(len(rows), prod(rows.shape[1:]))
