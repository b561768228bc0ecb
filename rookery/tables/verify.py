"""Whether a stored replay memory is one that a table could have written: its numbers agree, its items can be used.

A file whose digests fit may still be forged. What is taken for granted while drawing and inserting is checked here,
once, when a memory is loaded: slots and ids, free slots, sampler, limiter, frames, and the values in the records. What
does not pass is a CheckpointError that names the part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rookery.core.errors import CheckpointError
from rookery.core.types import EnvSpec
from rookery.tables.fast.order import NONE
from rookery.tables.fast.sum_tree import LARGEST
from rookery.tables.frames import ZERO, image_leaves
from rookery.tables.ring import FrameRing
from rookery.tables.sampler import Proportional, Rank, Uniform
from rookery.tables.store import Store

MOST = 1 << 53  # of anything that is counted
_ROWS = 1 << 16  # records that are looked at together


def check_state(table: Any, state: dict[str, Any], used: Mapping[str, int]) -> None:
    """Of a `ReplayMemory`: `state` has the parts and types of its own. `used`: rows of each array that were stored."""
    store, counts = state["store"], state["counts"]
    for path, value in _numbers({"counts": counts, "limiter": state["limiter"], "next_id": store["next_id"]}):
        _need(path, isinstance(value, bool | int | float) and 0 <= value < MOST)
    ids, next_id = store["ids"], _whole("next_id", store["next_id"])
    here = ids >= 0
    slots, size = len(ids), int(np.count_nonzero(here))
    _need("records in use", used["records"] == min(next_id, slots))
    _need("ids", ids.shape == table.store.ids.shape and bool((ids >= -1).all()))
    _need("ids", _distinct(ids[here]) and size <= slots and int(ids.max(initial=-1)) < next_id)
    if table.remover is None:  # a ring: an item lies where its number says
        _need("ids", bool((ids[here] % slots == np.flatnonzero(here)).all()))
        _need("ids", int(ids[here].min(initial=MOST)) >= next_id - slots)
    else:
        free = store["free"]
        _need("free slots", len(free) == slots - size and _distinct(free))
        _need("free slots", not len(free) or bool((free >= 0).all() and (free < slots).all() and not here[free].any()))
    _check_counts(state, here, size, next_id)
    _check_sampler("sampler", table.sampler, state["sampler"], here)
    if table.remover is not None:
        _check_sampler("remover", table.remover, state["remover"], here)
    for key, ring in table.store.rings.items():
        _check_ring(key, ring, store["rings"][key], slots, next_id, used)
    _check_generator(table, state["rng"])


def _check_counts(state: dict[str, Any], here: np.ndarray, size: int, next_id: int) -> None:
    counts, waiting, priority, last = state["counts"], state["waiting"], state["priority"], state["last"]
    _need("waiting steps", waiting.shape == here.shape and bool((waiting >= 0).all()))
    _need("priorities", priority.shape == here.shape and bool(np.isfinite(priority).all() and (priority >= 0).all()))
    _need("size", _whole("size", counts["_size"]) == size)
    _need("steps_waiting", counts["steps_waiting"] == int(waiting[here].sum(dtype=np.int64)))
    _need("items inserted", counts["inserted"] - counts["evicted"] == size and counts["inserted"] >= next_id)
    _need("limiter", state["limiter"]["inserted"] == counts["inserted"])
    largest = state["largest"]
    _need("largest priority", isinstance(largest, float) and priority.max(initial=0.0) <= largest * 1.001 < np.inf)
    ids, then = last["ids"], _whole("last batch", last["next"])
    _need("last batch", len(ids) > 0 and bool((ids >= 0).all()) and then <= max(next_id, 1))
    _need("last batch", int(ids.max()) < then)


def _check_sampler(name: str, sampler: Any, state: dict[str, np.ndarray], here: np.ndarray) -> None:
    """That it draws the slots that hold an item, and no other."""
    if isinstance(sampler, Uniform):
        item = state["item"]
        inside = not len(item) or bool((item >= 0).all() and (item < len(here)).all())
        _need(name, inside and _distinct(item) and len(item) == np.count_nonzero(here) and bool(here[item].all()))
    elif isinstance(sampler, Proportional):
        leaf = state["leaf"]
        _need(name, leaf.shape == here.shape and bool((leaf >= 0).all() and (leaf <= LARGEST).all()))
        _need(name, bool(((leaf > 0) == here).all()))
    elif isinstance(sampler, Rank):
        key = state["key"]
        _need(name, key.shape == here.shape and bool(((key != NONE) == here).all()))
        _need(name, bool((key[here] >= 0).all() and (key[here] >> 32 <= 0x7F800000).all()))


def _check_ring(
    key: str, ring: FrameRing, state: dict[str, Any], slots: int, next_id: int, used: Mapping[str, int]
) -> None:
    """Where frames lie, and which items are watched because they need them."""
    name, head = f"frames of {key}", _whole(f"frames of {key}", state["head"])
    _need(name, used.get(ring.name, min(head, ring.rows)) == min(head, ring.rows))
    spans, watch = state["spans"], state["watch"]
    _need(name, spans.shape[1:] == (4,) and bool((spans >= 0).all()) and watch.shape[1:] == (3,) and len(watch) > 0)
    ends: dict[int, int] = {}
    for actor, first, count, start in spans.tolist():
        _need(name, count > 0 and start + count <= head and ends.get(actor, first) == first)
        ends[actor] = first + count
    oldest, first, items = watch.T
    _need(name, bool((watch >= 0).all()) and bool((items <= slots + 512).all() and (first <= next_id - items).all()))
    heap = list(zip(*(column.tolist() for column in (oldest[1:], first[1:], items[1:]))))
    _need(name, all(heap[(at - 1) // 2] <= heap[at] for at in range(1, len(heap))))


def _check_generator(table: Any, state: Any) -> None:
    try:
        type(table._rng.bit_generator)().state = state
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise CheckpointError(f"the state of the random generator cannot be used ({error})") from error


def check_records(store: Store, spec: EnvSpec, ids: np.ndarray) -> None:
    """The items themselves, once their rows are in the store: what a network or an index is made of."""
    here = np.flatnonzero(ids >= 0)
    for begin in range(0, len(here), _ROWS):
        part = here[begin : begin + _ROWS]
        check_columns({path: column[part] for path, column in store.columns.items()}, spec, rings=store.rings)
    for ring in store.rings.values():
        memory = getattr(ring, "memory", None)
        if ring.dtype.kind == "f" and memory is not None:
            _need(f"frames of {ring.name}", bool(np.isfinite(memory.view(ring.dtype)).all()))


def check_columns(
    columns: Mapping[str, np.ndarray], spec: EnvSpec, rings: Mapping[str, FrameRing] | None = None,
    frames: Mapping[str, int] | None = None,
) -> None:  # fmt: skip
    """Values of items or of rows: finite, actions and discrete observations among their choices, frames that exist.

    Images stand in them as rows of `rings`, or as numbers below `frames`.
    """
    images = image_leaves(spec)
    for path, column in columns.items():
        top, _, key = path.partition("/")
        if column.dtype == bool:
            _need(path, int(column.view(np.uint8).max(initial=0)) <= 1)
        elif column.dtype.kind == "f":
            _need(path, bool(np.isfinite(column).all()))
        elif top == "action":
            _need(
                path, bool((column >= 0).all() and (column < np.reshape(spec.action.choices, spec.action.shape)).all())
            )
        elif top in ("obs", "next_obs") and key in images:
            ring = None if rings is None else rings[key]
            least, most = (0, ring.rows) if ring is not None else (ZERO, max(0, (frames or {})[key] - 1))
            _need(path, bool((column >= least).all() and (column <= most).all()))
            if ring is not None:
                _need(path, bool(((column < ring.head) | (column == ring.rows)).all()))
        elif top in ("obs", "next_obs") and spec.obs[key].kind in ("discrete", "multi"):
            _need(path, spec.obs[key].admits(column))
        elif top in ("version", "steps"):
            _need(path, bool((column >= 0).all() and (column < MOST).all()))


def check_ends(live: np.ndarray, ends: np.ndarray) -> None:
    """Rows [T, B] of an actor: a dead row follows each end, and no other; rows before the first one are empty."""
    begun = np.logical_or.accumulate(live | ends, axis=0)
    follows = live[1:] == ~ends[:-1]
    _need("ends of episodes", bool((follows | ~begun[:-1]).all() and not (ends & ~live).any()))


def _numbers(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found = []
    for key, value in tree.items():
        found += _numbers(value, f"{prefix}{key}/") if isinstance(value, dict) else [(f"{prefix}{key}", value)]
    return found


def _whole(name: str, value: Any) -> int:
    _need(name, isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST)
    return value


def _distinct(values: np.ndarray) -> bool:
    return len(np.unique(values)) == len(values)


def _need(what: str, holds: bool) -> None:
    if not holds:
        raise CheckpointError(f"{what}: these are not numbers that a replay memory has")
