"""A replay table as a plain dict of items, and small tables to ask one question of: what several test files share."""

from __future__ import annotations

from math import isnan

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from support_parcels import MIXED, STACKED, VECTOR, Maker, shapes_of

from rookery.core import tree
from rookery.core.types import EnvSpec, Replay, Sequences, Transitions
from rookery.tables.memory import Drawn, Keys, ReplayMemory

SPECS = {"vector": VECTOR, "stacked": STACKED, "mixed": MIXED}

ROWS = 25  # of the frame rings of a model

REMOVERS, SAMPLERS = ("fifo", "soft", "inverse"), ("uniform", "proportional", "rank")

# What may be done to a `Model`, (name of the method, arguments), and to which

priority = st.floats(2**-10, 2**10, width=32)

operation = st.one_of(
    st.tuples(
        st.just("insert"), st.integers(0, 1), st.integers(0, 4), st.integers(0, 6),
        st.lists(st.one_of(st.just(float("nan")), priority), min_size=4, max_size=4),
    ),
    st.tuples(st.just("sample"), st.floats(0, 1.2)),
    st.tuples(st.just("update"), st.integers(0, 3), st.lists(priority, min_size=1, max_size=5)),
    st.just(("remove_to_fit",)),
    st.tuples(st.just("forget"), st.integers(0, 1)),
)  # fmt: skip

operations = st.lists(operation, max_size=40)

memories = st.fixed_dictionaries({
    "sampler": st.sampled_from(SAMPLERS), "capacity": st.integers(1, 12), "batch": st.integers(1, 9),
    "start": st.sampled_from(["max", "actor"]), "weights": st.sampled_from(["batch", "memory", "raw"]),
    "beta_end": st.sampled_from([None, 1.0]), "alpha": st.sampled_from([0.0, 0.6, 1.0]), "compress": st.booleans(),
})  # fmt: skip

kinds = st.sampled_from([{"n_step": 2}, {"sequence": 3, "burn_in": 1, "overlap": 1}])


def table_of(plan: Replay, spec: EnvSpec = VECTOR, items: int = 4, frames: int = 6, seed: int = 0) -> ReplayMemory:
    return ReplayMemory(plan, shapes_of(spec, plan, items, frames), spec, 2, seed)


def filled(plan: Replay, priorities: list[float], batches: int = 0) -> ReplayMemory:
    """A table with one item for each priority, as an actor gives them; `batches` are drawn then."""
    table = table_of(plan, items=len(priorities))
    put(table, plan, priorities)
    for _ in range(batches):
        table.sample()
    return table


def put(table: ReplayMemory, plan: Replay, priorities: list[float]) -> None:
    """Items whose serial numbers are their ids."""
    maker = Maker(VECTOR, plan, len(priorities), 0, 0, [table.store.next_id], 1)
    parcel, _ = maker.make(len(priorities))
    parcel["priority"][:] = priorities
    parcel["steps"][:] = 1
    table.insert(parcel, 0)


def alive(table: ReplayMemory) -> list[int]:
    return sorted(table.store.ids[table.store.ids >= 0].tolist())


def keys_of(table: ReplayMemory, *ids: int) -> Keys:
    slots = [int(np.flatnonzero(table.store.ids == id)[0]) for id in ids]
    return Keys(np.array(slots), np.array(ids))


def tensors_of(batch: Transitions | Sequences) -> list[torch.Tensor]:
    return [leaf for name in batch.__dataclass_fields__ for leaf in tree.leaves(getattr(batch, name))]


class Model:
    """What a replay table means, with a dict of items and no thought for speed. It cannot know what is drawn at random
    (batches, victims of "inverse"): it is told, and checks that it could be."""

    def __init__(self, plan: Replay, spec: EnvSpec, actors: int = 2, reach: int = 8):
        self.plan, self.memory, self.spec = plan, plan.memory, spec
        serials = [0]
        self.makers = [Maker(spec, plan, 4, 6, seed, serials, reach) for seed in range(actors)]
        self.table = self.new_table(5)
        self.items: dict[int, dict] = {}  # id -> what it looks like, and its books
        self.next_id = self.frames = 0
        self.place: list[list[int]] = [[] for _ in range(actors)]  # actor -> number over all of each of its frames
        self.largest = 1.0
        self.counts = dict.fromkeys(("inserted", "sampled", "evicted", "gone", "trained", "lost", "steps"), 0)
        self.drawn: list[Keys] = []

    def new_table(self, seed: int) -> ReplayMemory:
        table = ReplayMemory(self.plan, self.makers[0].shapes, self.spec, len(self.makers), seed)
        for key, ring in table.store.rings.items():  # too small on purpose: normally slots run out before frames
            table.store.rings[key] = type(ring)(key, ROWS, ring.shape, 9, ring.dtype)
        return table

    def evict(self, id: int) -> None:
        item = self.items.pop(id)
        self.counts["evicted"] += 1
        self.counts["lost"] += 0 if item["drawn"] else int(item["steps"])

    def insert(self, actor: int, count: int, frames: int, priorities: list[float]) -> None:
        frames = frames if self.makers[actor].seen else 0
        parcel, looks = self.makers[actor].make(count, frames)
        parcel["priority"][:count] = priorities[:count]
        self.table.insert(parcel, actor)
        for column in parcel.values():
            column[...] = 66  # it may be used again at once
        self.place[actor] += range(self.frames, self.frames + frames)
        self.frames += frames
        low = self.frames - ROWS
        for id in [id for id, item in self.items.items() if item["oldest"] < low]:
            self.evict(id)
        given = np.float32(priorities[:count])
        self.largest = max(
            [self.largest, *(p for p in given.tolist() if self.memory.start == "actor" and not isnan(p))]
        )
        for look, priority in zip(looks, given.tolist()):
            self.counts["inserted"] += 1
            self.counts["steps"] += int(look["steps"])
            numbers = [n for path in look if path.endswith("#") for n in look[path].ravel().tolist() if n >= 0]
            oldest = min((self.place[actor][n] for n in numbers), default=np.inf)
            if oldest < low:
                self.counts["evicted"] += 1
                self.counts["lost"] += int(look["steps"])
                continue
            priority = self.largest if self.memory.start == "max" or isnan(priority) else priority
            self.items[self.next_id] = look | {"drawn": False, "priority": priority, "oldest": oldest}
            self.next_id += 1
        if self.memory.remover == "inverse":
            gone = set(self.items) - set(alive(self.table))
            assert len(gone) == max(0, len(self.items) - self.memory.capacity)
            for id in gone:
                self.evict(id)
        else:
            room = self.memory.capacity if self.memory.remover == "fifo" else -(-self.memory.capacity * 5 // 4)
            for id in [id for id in self.items if id < self.next_id - room]:
                self.evict(id)

    def remove_to_fit(self) -> None:
        self.table.remove_to_fit()
        for id in sorted(self.items)[: max(0, len(self.items) - self.memory.capacity)]:
            assert self.memory.remover == "soft"
            self.evict(id)

    def forget(self, actor: int) -> None:
        self.table.forget(actor)
        self.makers[actor].restart()
        self.place[actor] = []

    def sample(self, progress: float) -> Drawn | None:
        assert self.table.can_insert() and self.table.can_sample() == (len(self.items) >= self.memory.min_size)
        if not self.table.can_sample():
            return None
        given, draw = [], self.table.sampler.draw
        self.table.sampler.draw = lambda n, rng: given.append(draw(n, rng)) or given[-1]
        sample = self.table.sample(progress)
        self.table.sampler.draw = draw
        ids = sample.keys.id.tolist()
        items = [self.items[id] for id in ids]
        fresh = {id: int(self.items[id]["steps"]) for id in ids if not self.items[id]["drawn"]}
        assert sample.fresh == sum(fresh.values())
        for item in items:
            item["drawn"] = True
        self.counts["trained"] += sum(fresh.values())
        self.counts["sampled"] += len(ids)
        check_batch(sample.batch, items, self.plan)
        np.testing.assert_allclose(sample.batch.weight, self.weights(ids, given[0][1], progress), rtol=1e-5)
        self.drawn.append(sample.keys)
        return sample

    def weights(self, ids: list[int], given: np.ndarray, progress: float) -> np.ndarray:
        memory = self.memory
        if memory.sampler == "uniform":
            return np.ones(len(ids))
        probability, lowest = given, self.table.sampler.lowest()
        if memory.sampler == "proportional":  # from nothing but the definition
            mass = {id: np.float64(item["priority"]) ** memory.alpha for id, item in self.items.items()}
            total = sum(mass.values())
            probability = np.array([mass[id] / total for id in ids])
            lowest = min(mass.values()) / total
            np.testing.assert_allclose(given, probability, rtol=1e-9)
        beta = memory.beta
        if memory.beta_end is not None:
            beta += (memory.beta_end - memory.beta) * min(1.0, progress)
        weight = (len(self.items) * probability) ** -beta
        if memory.weights == "batch":
            return weight / weight.max()
        return weight / (len(self.items) * lowest) ** -beta if memory.weights == "memory" else weight

    def update(self, which: int, priorities: list[float]) -> None:
        if not self.drawn:
            return
        keys = self.drawn[which % len(self.drawn)]
        priorities = np.float32(np.resize(priorities, len(keys.id)))
        self.table.update(keys, priorities)
        for id, priority in zip(keys.id.tolist(), priorities.tolist()):
            if id not in self.items:
                self.counts["gone"] += 1
            else:
                self.items[id]["priority"] = priority
                self.largest = max(self.largest, priority)

    def check(self) -> None:
        table, stats = self.table, self.table.stats()
        assert alive(table) == sorted(self.items) and len(table) == len(self.items) == len(table.sampler)
        for name in ("inserted", "sampled", "evicted", "gone"):
            assert stats[name] == self.counts[name] == getattr(table, name), name
        assert stats["size"] == len(self.items) == stats["inserted"] - stats["evicted"]
        waiting = sum(int(item["steps"]) for item in self.items.values() if not item["drawn"])
        assert (table.steps_waiting, table.steps_evicted) == (waiting, self.counts["lost"])
        assert self.counts["steps"] == self.counts["trained"] + waiting + self.counts["lost"], "the ledger balances"
        priorities = [item["priority"] for item in self.items.values()] or [0.0]
        assert stats["priority_max"] == np.float32(max(priorities))
        assert stats["priority_mean"] == pytest.approx(np.mean(priorities), rel=1e-6)
        assert table._largest == self.largest


def check_batch(batch: Transitions | Sequences, items: list[dict], plan: Replay) -> None:
    assert type(batch) is (Sequences if plan.sequence else Transitions)
    flat = tree.flatten({name: getattr(batch, name) for name in batch.__dataclass_fields__})
    flat.pop("weight")
    for path, tensor in flat.items():
        wanted = np.stack([item[path] for item in items])
        if plan.sequence and path.split("/")[0] not in ("state", "version"):
            wanted = wanted.swapaxes(0, 1)
        np.testing.assert_array_equal(tensor.numpy(), wanted, err_msg=path)
        assert tensor.numpy().dtype == wanted.dtype, path
