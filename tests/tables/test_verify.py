"""Stored replay memories whose digests fit and whose numbers do not: refused when they are loaded, part by part."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
from support_parcels import DISCRETE
from support_replay_file import CASES, Life, forge

from rookery.core.errors import CheckpointError
from rookery.core.types import EnvSpec, Leaf
from rookery.storage import files, replay_file
from rookery.tables.snapshot import Snapshot
from rookery.tables.verify import check_columns, check_ends


@pytest.fixture(autouse=True)
def no_sync(monkeypatch):
    monkeypatch.setattr("os.fsync", lambda _: None)


def put(*path, value):
    """A change of a state: the value at that path, or what a function makes of the one there."""

    def change(state):
        *parents, name = path
        for parent in parents:
            state = state[parent]
        state[name] = value(copy.deepcopy(state[name])) if callable(value) else value

    return change


def at(index, value):
    def change(array):
        array[index] = value
        return array

    return change


def swapped(array):
    array[[0, -1]] = array[[-1, 0]]
    return array


FORGED = {
    "a negative size": ("uniform", put("counts", "_size", value=-1)),
    "another size": ("uniform", put("counts", "_size", value=lambda n: n - 1)),
    "negative waiting steps": ("uniform", put("waiting", value=at(0, -5))),
    "waiting steps that do not add up": ("uniform", put("counts", "steps_waiting", value=lambda n: n + 1)),
    "fewer inserted than there are": ("uniform", put("counts", "inserted", value=3)),
    "negative evictions": ("uniform", put("counts", "evicted", value=-1)),
    "a count that is no number": ("uniform", put("counts", "sampled", value=float("nan"))),
    "a next id of the past": ("uniform", put("store", "next_id", value=2)),
    "a next id far ahead": ("uniform", put("store", "next_id", value=2**60)),
    "a next id that is no whole number": ("uniform", put("store", "next_id", value=1.5)),
    "an id below -1": ("uniform", put("store", "ids", value=at(3, -7))),
    "an id twice": ("uniform", put("store", "ids", value=lambda ids: at(3, ids[4])(ids))),
    "ids in other places": ("uniform", put("store", "ids", value=swapped)),
    "a sampler of other slots": ("uniform", put("sampler", "item", value=at(0, 10**6))),
    "a sampler that draws one twice": ("uniform", put("sampler", "item", value=lambda item: at(0, item[1])(item))),
    "a sampler that misses one": ("uniform", put("sampler", "item", value=lambda item: item[1:])),
    "an infinite leaf": ("proportional", put("sampler", "leaf", value=at(2, np.inf))),
    "a negative leaf": ("proportional", put("sampler", "leaf", value=at(2, -1.0))),
    "an empty leaf": ("proportional", put("sampler", "leaf", value=at(2, 0.0))),
    "a key of no item": ("rank", put("sampler", "key", value=at(2, -1))),
    "a key above all": ("rank", put("sampler", "key", value=at(2, (0x7F900000 << 32) | 2))),
    "a free slot that is taken": ("inverse", put("store", "free", value=lambda _: np.array([0]))),
    "too many free slots": ("inverse", put("store", "free", value=lambda _: np.arange(10**5))),
    "a remover of nothing": ("inverse", put("remover", "leaf", value=lambda leaf: leaf * 0)),
    "a negative priority": ("proportional", put("priority", value=at(0, -1.0))),
    "a priority that is no number": ("proportional", put("priority", value=at(0, np.nan))),
    "a largest priority below another": ("proportional", put("largest", value=1e-9)),
    "a largest priority that is no number": ("uniform", put("largest", value=float("nan"))),
    "an empty last batch": ("uniform", put("last", "ids", value=lambda ids: ids[:0])),
    "a last batch of the future": ("uniform", put("last", "next", value=10**9)),
    "a limiter of other counts": ("ratio", put("limiter", "inserted", value=lambda n: n + 10**6)),
    "a limiter of negative draws": ("ratio", put("limiter", "sampled", value=-(10**9))),
    "a ratio without bounds": ("ratio", put("limiter", "samples_per_insert", value=float("inf"))),
    "another generator": ("uniform", put("rng", "bit_generator", value="MT19937")),
    "a generator without a state": ("uniform", put("rng", "state", "state", value=-1)),
    "a ring of other frames": ("mixed", put("store", "rings", "eye", "head", value=lambda n: n - 1)),
    "a negative head": ("mixed", put("store", "rings", "eye", "head", value=-5)),
    "spans beyond the head": (
        "mixed",
        put("store", "rings", "eye", "spans", value=lambda s: s + np.array([0, 0, 10**6, 0])),
    ),
    "spans of nothing": ("mixed", put("store", "rings", "eye", "spans", value=lambda s: s * np.array([1, 1, 0, 1]))),
    "spans with gaps": ("mixed", put("store", "rings", "eye", "spans", value=lambda s: np.vstack([s[:1], s[:1]]))),
    "a watch over ids without end": (
        "mixed",
        put("store", "rings", "map", "watch", value=lambda w: w + np.array([0, 0, 2**40])),
    ),
    "a watch that is no heap": (
        "mixed",
        put("store", "rings", "map", "watch", value=lambda w: np.array([w[0], [5, 0, 1], [3, 1, 1]])),
    ),
    "no watch": ("mixed", put("store", "rings", "map", "watch", value=lambda w: w[:0])),
}


def forged_and_loaded(folder: Path, case: str, change) -> None:
    """Save a table, change the state in the file, have the digests fit again, and load it into another."""
    life = Life(case, 40)
    path = replay_file.save(folder, 20, Snapshot(life.table))
    state, _ = files.unpack({name: (path / name).read_bytes() for name in (files.META, files.TENSORS)})
    change(state)
    forge(path, lambda body: None, files.pack(state))
    replay_file.load(path, life.empty())


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_state_is_refused(tmp_path, name):
    with pytest.raises(CheckpointError, match="remove the folder to continue with an empty memory"):
        forged_and_loaded(tmp_path, *FORGED[name])


@pytest.mark.parametrize("case", CASES)
def test_what_was_not_forged_is_loaded(tmp_path, case):
    forged_and_loaded(tmp_path, case, lambda state: None)


def row(name: str, value):
    """A change of one item's column, in the bulk memory."""

    def change(table):
        slot = int(np.flatnonzero(table.store.ids >= 0)[0])
        table.store.columns[name][slot] = value

    return change


ROWS = {
    "an action that is none": ("uniform", row("action", 3)),
    "a negative action": ("uniform", row("action", -1)),
    "an observation that is no number": ("uniform", row("obs/obs", np.nan)),
    "an infinite reward": ("uniform", row("reward", np.inf)),
    "a frame outside the ring": ("mixed", row("obs/eye", 10**6)),
    "a frame before the ring": ("mixed", row("next_obs/eye", -1)),
    "a room that does not exist": ("mixed", row("obs/room", 9)),
    "a version of before the start": ("sequences", row("version", -1)),
    "a state that is no number": ("sequences", row("state/core/h", np.nan)),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_forged_item_is_refused(tmp_path, name):
    case, change = ROWS[name]
    life = Life(case, 40)
    change(life.table)
    with pytest.raises(CheckpointError, match="remove the folder"):
        replay_file.load(replay_file.save(tmp_path, 20, Snapshot(life.table)), life.empty())


def test_bytes_that_are_no_booleans_are_refused():
    live = np.array([0, 255], np.uint8).view(bool)
    with pytest.raises(CheckpointError, match="live"):
        check_columns({"live": live}, EnvSpec("x", {"obs": Leaf((1,), "float32", "vector")}, DISCRETE))


def test_versions_of_a_later_moment_are_capped():
    life = Life("uniform", 40)
    life.table.cap_versions(7)
    assert life.table.store.columns["version"].max() == 7


ENDS = [
    ("1101", "0100", True), ("0001", "0000", True), ("0111", "0001", True), ("0000", "0000", True), ("1", "1", True),
    ("1111", "0100", False), ("1101", "0000", False), ("1101", "0110", False), ("0000", "0100", False),
]  # fmt: skip


@pytest.mark.parametrize("live, ends, holds", ENDS)
def test_a_dead_row_follows_each_end_and_no_other(live, ends, holds):
    rows = [np.array([[digit == "1"] for digit in text]) for text in (live, ends)]
    if holds:
        check_ends(*rows)
    else:
        with pytest.raises(CheckpointError):
            check_ends(*rows)
