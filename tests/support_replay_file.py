"""Replay memories with a life of their own, to be saved, damaged and compared."""

import copy
from pathlib import Path

import msgspec
import numpy as np
from support_parcels import MIXED, STACKED, VECTOR, Maker, replay

from rookery.core import tree
from rookery.storage import files
from rookery.storage.files import MANIFEST
from rookery.tables.memory import ReplayMemory

CASES = {
    "uniform": (VECTOR, replay(capacity=50)),
    "ratio": (VECTOR, replay(capacity=50, min_size=7, batch=8, samples_per_insert=1.5, slack=20.0)),
    "proportional": (VECTOR, replay(capacity=50, sampler="proportional", start="actor")),
    "rank": (VECTOR, replay(capacity=50, sampler="rank")),
    "inverse": (VECTOR, replay(capacity=50, sampler="proportional", remover="inverse")),
    "soft": (STACKED, replay(n_step=3, capacity=40, remover="soft", remove_every=5)),
    "mixed": (MIXED, replay(capacity=30, sampler="proportional")),
    "sequences": (MIXED, replay(sequence=3, burn_in=1, overlap=1, capacity=30, sampler="proportional")),
    "packed": (STACKED, replay(capacity=30, compress=True)),
}
ITEMS, FRAMES = 5, 6  # at most, in a parcel


class Life:
    """A table and the actors that feed it; `play` does to any table what a run does, and says what came out."""

    def __init__(self, case: str, parcels: int = 0):
        self.spec, self.plan = CASES[case]
        serials = [0]
        self.makers = [Maker(self.spec, self.plan, ITEMS, FRAMES, seed, serials, 9) for seed in range(2)]
        self.rng = np.random.default_rng(5)
        self.table = self.empty()
        self.play(self.table, self.parcels(parcels))

    def empty(self) -> ReplayMemory:
        return ReplayMemory(self.plan, self.makers[0].shapes, self.spec, len(self.makers), seed=3)

    def parcels(self, count: int) -> list[tuple[dict[str, np.ndarray], int]]:
        made = []
        for _ in range(count):
            actor, items, frames = (int(self.rng.integers(n)) for n in (len(self.makers), ITEMS + 1, FRAMES + 1))
            made.append((copy.deepcopy(self.makers[actor].make(items, frames, float(self.rng.random()))[0]), actor))
        return made

    def play(self, table: ReplayMemory, parcels: list, draws: int = 2) -> list[np.ndarray]:
        seen = []
        for parcel, actor in parcels:
            table.insert(parcel, actor)
            for _ in range(draws):
                if table.can_sample():
                    batch, keys, fresh = table.sample(0.5)
                    fields = tree.flatten(vars(batch))
                    seen += [*keys, np.array(fresh), *(fields[path].numpy() for path in sorted(fields))]
                    table.update(keys, (keys.id % 7 + 0.5) * (1 + table.sampled % 3))
            table.remove_to_fit()
        return seen


def contents(table) -> dict:
    """A deep copy of all that is in a table."""
    used = table.used()
    rows = {name: array[: used[name]].copy() for name, array in table.arrays().items()}
    return copy.deepcopy({"rows": rows, "state": table.state()})


def same(left, right) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right, equal_nan=left.dtype.kind == "f")
    return left == right


def forge(path: Path, change, blobs: dict[str, bytes] | None = None) -> None:
    """Rewrite a memory as a hostile author would: any content, and digests that fit it."""
    body = msgspec.json.decode((path / MANIFEST).read_bytes())["manifest"]
    for name, blob in (blobs or {}).items():
        (path / name).write_bytes(blob)
        body["files"][name] = {"size": len(blob), "blake2b": files.digest(blob)}
    body = change(body) or body
    outer = {"digest": files.digest(msgspec.json.encode(body)), "manifest": body}
    (path / MANIFEST).write_bytes(files.pretty(outer))
