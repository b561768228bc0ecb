"""The replay memory: items are inserted, drawn by priority, given new priorities, and evicted. It never blocks.

Prioritized Experience Replay (Schaul et al. 2016) with the settings of its successors; single-threaded. The store holds
the data, the sampler draws, the limiter says when. Here: ids, priorities, importance weights (Schaul et al., §3.4), and
the count of steps: an item's environment steps count as trained when it is drawn for the first time, and as evicted if
it is removed before that.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from rookery.core import tree
from rookery.core.errors import CheckpointError, NumericError, UsageError
from rookery.core.seeding import seed_of
from rookery.core.types import Arrays, EnvSpec, Replay, Sequences, Shapes, Transitions
from rookery.tables import verify
from rookery.tables.drawn import Drawn, Keys, Picked, as_batch, importance_weights
from rookery.tables.frames import fill, image_leaves
from rookery.tables.limiter import Limiter
from rookery.tables.ring import BeforeWrite, Packed, Rows
from rookery.tables.sampler import Proportional, Rank, Sampler, Uniform
from rookery.tables.snapshot import allowance
from rookery.tables.store import Store, physical_slots, store_bytes


class ReplayMemory:
    def __init__(self, plan: Replay, shapes: Shapes, spec: EnvSpec, actors: int, seed: int):
        memory = plan.memory
        _check(plan, spec)
        self.memory, self._spec = memory, spec
        self.store = Store(plan, shapes, spec, actors)
        slots = self.store.slots
        samplers: dict[str, Callable[[], Sampler]] = {
            "uniform": lambda: Uniform(slots),
            "proportional": lambda: Proportional(slots, memory.alpha),
            "rank": lambda: Rank(slots, memory.alpha),
        }
        self.sampler = samplers[memory.sampler]()
        self.remover = Proportional(slots, memory.remove_alpha) if memory.remover == "inverse" else None
        self.limiter = Limiter(memory.min_size, memory.batch, memory.samples_per_insert, memory.slack)
        self._rng = np.random.Generator(np.random.PCG64(seed_of(seed, "replay")))
        self._sequences = plan.sequence > 0
        self._paths = [path for path in shapes if path in self.store.columns]
        self._priority = np.zeros(slots, np.float32)  # raw, as written; 0 where no item is
        self._waiting = np.zeros(slots, np.int32)  # environment steps of an item that was not drawn yet
        self._largest = 1.0  # largest raw priority so far
        self._size = 0
        self._full = False  # whether an item ever had to make room
        self.inserted = self.sampled = self.evicted = self.gone = 0  # items
        self.steps_waiting = self.steps_evicted = 0
        self._last = (np.zeros(1, np.int64), 1)  # ids of the last batch, and the id that was next then

    @staticmethod
    def bytes_needed(plan: Replay, shapes: Shapes, spec: EnvSpec, actors: int = 1) -> int:
        """Bytes of a full memory: records, frames, ids, priorities, books. An estimate where frames are compressed."""
        memory = plan.memory
        books = 8 + _SAMPLER_BYTES[memory.sampler] + _SAMPLER_BYTES["proportional"] * (memory.remover == "inverse")
        return store_bytes(plan, shapes, spec, actors) + books * physical_slots(plan)

    @staticmethod
    def bytes_to_save(plan: Replay, shapes: Shapes, spec: EnvSpec, actors: int = 1) -> int:
        """Bytes that a snapshot of it takes at most, on top: a copy of the vectors, and what it may hold aside."""
        vectors = 40 if plan.memory.remover == "inverse" else 24  # per slot; the test counts them
        return vectors * physical_slots(plan) + allowance(store_bytes(plan, shapes, spec, actors))

    def __len__(self) -> int:
        return self._size

    def can_insert(self) -> bool:
        return self.limiter.can_insert(self._filling())

    def can_sample(self) -> bool:
        return self.limiter.can_sample(self._filling())

    def _filling(self) -> int:
        """The size that the limiter waits for: once an item had to go, the memory is as full as it gets.

        Short episodes may use the frames up before the slots, and a `min_size` near the capacity is never reached then.
        """
        return max(self._size, self.memory.min_size) if self._full and self._size else self._size

    def settle(self) -> None:
        """Count no step of the items in memory as waiting: the ledger of a later checkpoint has counted them."""
        self._changing("waiting", slice(0, len(self._waiting)))
        self._waiting[:] = 0
        self.steps_waiting = 0

    def cap_versions(self, version: int) -> None:
        """No item was acted with newer weights than these: in a memory of a later moment, some were."""
        column = self.store.columns["version"]
        if len(column) and column.max() > version:
            np.minimum(column, version, out=column)

    # In

    @property
    def full(self) -> bool:
        """Whether an item ever had to make room."""
        return self._full

    @property
    def largest(self) -> float:
        """The largest raw priority so far."""
        return self._largest

    def raise_largest(self, priority: float) -> None:
        """New items of the largest priority so far have this one at least: another part of the memory has seen it."""
        self._largest = max(self._largest, priority)

    def insert(self, parcel: dict[str, np.ndarray], actor: int) -> None:
        """Copy the items of a parcel in; it may be used again at once."""
        store, count = self.store, int(parcel["count"][0])
        steps, priority = parcel["steps"][:count], self._start(parcel["priority"][:count], actor)
        losing = store.losing(parcel)
        if len(losing):
            self._remove(losing)
        items, keep = store.admit(parcel, actor)
        self.inserted += count
        self.limiter.inserted(count)
        if keep is not None:
            self.evicted += count - int(keep.sum())
            self.steps_evicted += int(steps[~keep].sum())
            items = {path: column[keep] for path, column in items.items()}
            steps, priority = steps[keep], priority[keep]
        for begin in range(0, len(steps), store.slots):  # one piece, unless the memory is smaller than a parcel
            part = slice(begin, begin + store.slots)
            piece = items if len(steps) <= store.slots else {path: column[part] for path, column in items.items()}
            self._add(piece, steps[part], priority[part])

    def _add(self, items: dict[str, np.ndarray], steps: np.ndarray, priority: np.ndarray) -> None:
        self._make_room(len(steps))
        slots = self.store.ahead(len(steps))
        full = self._size == self.store.slots  # the usual case: no need to look which slots are taken
        old = slots if full else slots[self.store.ids.take(slots) >= 0]
        if len(old):
            self._write_off(old)  # the sampler need not be told: the slots are set again right away
        self.store.add(items, slots)
        self._set(slots, priority)
        self._changing("waiting", slots)
        self._waiting[slots] = steps
        self.steps_waiting += int(steps.sum())
        self._size += len(slots)

    def _start(self, given: np.ndarray, actor: int) -> np.ndarray:
        """Raw priorities of new items."""
        if self.memory.start == "max":
            return np.full(len(given), self._largest)
        priority = given.astype(np.float64)
        if not priority.max(initial=0.0) < np.inf:
            if np.isinf(priority).any():
                raise NumericError(
                    f"actor {actor}: the start priority of an item is infinite, because the action values behind it "
                    "overflow. Resume from an earlier checkpoint, or use a smaller step size"
                )
            priority[np.isnan(given)] = self._largest = max(self._largest, _largest(given[~np.isnan(given)]))
        self._largest = max(self._largest, _largest(priority))
        return priority

    def _set(self, slots: np.ndarray, priority: np.ndarray) -> None:
        self.sampler.set(slots, priority)
        if self.remover is not None:
            self.remover.set(slots, priority)
        self._changing("priority", slots)
        self._priority[slots] = priority.astype(np.float32)  # numpy is slow to convert within the write

    def forget(self, actor: int) -> None:
        """A new life of that actor begins: it numbers its frames from 0 again."""
        self.store.forget(actor)

    # Out

    def _make_room(self, count: int) -> None:
        """Free slots by drawing victims, until `count` are free. A ring takes those of its oldest items instead.

        Several victims are drawn at once (and once more for those drawn twice), each with its share of the mass.
        """
        while count > self.store.room:
            assert self.remover is not None  # a ring always has room
            victims, _ = self.remover.draw(count - self.store.room, self._rng)
            self._remove(np.unique(victims))

    def remove_to_fit(self, most: int | None = None) -> bool:
        """Remove the oldest items beyond a soft capacity, at most so many at once; whether there are more."""
        beyond = self._size - self.memory.capacity if self.memory.remover == "soft" else 0
        if beyond > 0:
            self._remove(self.store.oldest(beyond if most is None else min(beyond, most)))
        return most is not None and beyond > most

    def _remove(self, slots: np.ndarray) -> None:
        self._write_off(slots)
        self.store.free(slots)
        self.sampler.remove(slots)
        if self.remover is not None:
            self.remover.remove(slots)
        self._changing("priority", slots)
        self._priority[slots] = 0.0

    def _write_off(self, slots: np.ndarray) -> None:
        lost = int(self._waiting.take(slots).sum())
        self._size -= len(slots)
        self._full = True
        self.evicted += len(slots)
        self.steps_waiting -= lost
        self.steps_evicted += lost

    # Learning

    def sample(self, progress: float = 0.0) -> Drawn:
        """A batch of tensors that own their memory; `progress` in [0, 1] anneals the importance weights."""
        assert self.can_sample(), f"{self._size} items, {self.sampled} drawn of {self.inserted} inserted"
        picked = self.pick(progress)
        return Drawn(self.copy(picked), picked.keys, picked.fresh)

    def pick(self, progress: float, count: int | None = None) -> Picked:
        """Draw a batch (or `count` items) without copying it: cheap, and all that the table's own numbers are for."""
        slots, probability = self.sampler.draw(self.memory.batch if count is None else count, self._rng)
        steps = self._take_fresh(slots)
        keys = Keys(slots, self.store.ids.take(slots))
        self._last = keys.id, self.store.next_id
        self.sampled += len(slots)
        self.limiter.sampled(len(slots))
        return Picked(keys, probability, self._weights(probability, progress), steps)

    def replaced(self, picked: Picked, gone: np.ndarray, progress: float) -> Picked:
        """The same draw with other items in the place of those [N] that have left before they were copied."""
        slots, probability, steps = picked.keys.slot.copy(), picked.probability.copy(), picked.steps.copy()
        self.steps_evicted += int(steps[gone].sum())
        slots[gone], probability[gone] = self.sampler.draw(int(np.count_nonzero(gone)), self._rng)
        steps[gone] = self._take_fresh(slots[gone])
        keys = Keys(slots, self.store.ids.take(slots))
        return Picked(keys, probability, self._weights(probability, progress), steps)

    def copy(self, picked: Picked) -> Transitions | Sequences:
        """The items as a batch of tensors. If others write meanwhile, ask `lacks` afterwards."""
        return as_batch(self.read(picked.keys), picked.weight, self._sequences)

    def read(self, keys: Keys) -> Arrays:
        """Copies of the columns of these items, by path."""
        columns = self.store.read(keys.slot)
        return {path: columns[path] for path in self._paths}

    def lacks(self, keys: Keys) -> np.ndarray:
        """[N] which of these items have left the memory."""
        return self.store.ids.take(keys.slot) != keys.id

    def _take_fresh(self, slots: np.ndarray) -> np.ndarray:
        """[N] environment steps of these items if they are drawn for the first time; of one drawn twice, once."""
        steps = self._waiting.take(slots)
        if not np.count_nonzero(steps):  # quicker than any()
            return steps
        self._changing("waiting", slots)
        mark = np.arange(-len(slots), 0, dtype=np.int32)
        self._waiting[slots] = mark
        steps[self._waiting.take(slots) != mark] = 0
        self._waiting[slots] = 0
        self.steps_waiting -= int(steps.sum())
        return steps

    def _weights(self, probability: np.ndarray, progress: float) -> np.ndarray:
        return importance_weights(self.memory, probability, progress, self._size, self.sampler.lowest)

    def update(self, keys: Keys, priorities: np.ndarray) -> None:
        """New raw priorities for drawn items. Those that have gone are ignored; of one drawn twice, the last counts."""
        slots, priorities = keys.slot, np.asarray(priorities, np.float64)
        largest = _largest(priorities)
        gone = self.lacks(keys)
        if np.count_nonzero(gone):
            slots, priorities = slots[~gone], priorities[~gone]
            self.gone += len(gone) - len(slots)
            largest = _largest(priorities)
        self._set(slots, priorities)
        self._largest = max(self._largest, largest)

    def stats(self) -> dict[str, float]:
        """Ages are those of the last batch drawn, in items inserted since; priorities those in the memory."""
        ids, then = self._last
        raw = self._priority[: min(self.store.next_id, len(self._priority))]  # 0 where no item is
        return {
            "size": self._size,
            "inserted": self.inserted,
            "sampled": self.sampled,
            "sample_insert_ratio": self.sampled / max(self.inserted, 1),
            "age_mean": float(then - 1 - ids.mean()),
            "age_max": float(then - 1 - ids.min()),
            "priority_mean": float(raw.sum(dtype=np.float64) / max(self._size, 1)),
            "priority_max": float(raw.max(initial=0.0)),
            "gone": self.gone,
            "evicted": self.evicted,
        }

    # Checkpoints: `arrays` are bulk memory, `vectors` the parts of the state that grow with it, `numbers` all the rest.

    @property
    def before_write(self) -> BeforeWrite | None:
        """Called with (name, rows) before rows of an array or a vector change: a snapshot copies them first."""
        return self.store.before_write

    @before_write.setter
    def before_write(self, hook: BeforeWrite | None) -> None:
        self.store.before_write = hook
        for name, sampler in self._samplers().items():
            (vector,) = sampler.vectors()
            sampler.before_write = None if hook is None else partial(hook, f"{name}/{vector}")

    def _changing(self, name: str, rows: Rows) -> None:
        if self.store.before_write is not None:
            self.store.before_write(name, rows)

    def _samplers(self) -> dict[str, Sampler]:
        return {"sampler": self.sampler} | ({"remover": self.remover} if self.remover is not None else {})

    def arrays(self) -> dict[str, np.ndarray | Packed]:
        return self.store.arrays()

    def used(self) -> dict[str, int]:
        """Rows of `arrays()` written so far; those behind them are empty."""
        return self.store.used()

    def vectors(self) -> dict[str, np.ndarray]:
        """By path in the state; views."""
        owners: dict[str, Store | Sampler] = {"store": self.store, **self._samplers()}
        found = {f"{name}/{key}": vector for name, owner in owners.items() for key, vector in owner.vectors().items()}
        return found | {"priority": self._priority, "waiting": self._waiting}

    def numbers(self) -> dict[str, Any]:
        return {
            "store": self.store.numbers(),
            "sampler": {},
            "remover": {},
            "limiter": self.limiter.state(),
            "rng": self._rng.bit_generator.state,
            "largest": self._largest,
            "last": {"ids": self._last[0], "next": self._last[1]},
            "counts": {name: int(getattr(self, name)) for name in _COUNTS},
        }

    def state(self) -> dict[str, Any]:
        """All that is not in `arrays`, as copies."""
        return tree.merged(self.numbers(), {path: vector.copy() for path, vector in self.vectors().items()})

    def check_state(self, state: dict[str, Any], used: dict[str, int]) -> None:
        """CheckpointError unless this table could have written it; before `arrays()` are filled."""
        verify.check_state(self, state, used)

    def check_records(self) -> None:
        """The same for what `arrays()` hold, after `load`."""
        verify.check_records(self.store, self._spec, self.store.ids)

    def load(self, state: dict[str, Any]) -> None:
        """Go on from there; `arrays()` have been filled before."""
        try:
            self._load(state)
        except (KeyError, ValueError, TypeError) as error:
            raise CheckpointError(f"the stored replay memory does not fit: {error}") from error

    def _load(self, state: dict[str, Any]) -> None:
        self.store.load(state["store"])
        self.sampler.load(state["sampler"])
        if self.remover is not None:
            self.remover.load(state["remover"])
        self.limiter.load(state["limiter"])
        self._rng.bit_generator.state = state["rng"]
        fill(self._priority, np.asarray(state["priority"]), "priorities")
        self._priority[self.store.ids < 0] = 0.0  # older files have what was there before
        fill(self._waiting, np.asarray(state["waiting"]), "steps")
        self._largest = float(state["largest"])
        self._last = np.array(state["last"]["ids"]), int(state["last"]["next"])
        for name in _COUNTS:
            setattr(self, name, int(state["counts"][name]))


_SAMPLER_BYTES = {"uniform": 16, "proportional": 10, "rank": 50}  # per slot
_COUNTS = ("_size", "_full", "inserted", "sampled", "evicted", "gone", "steps_waiting", "steps_evicted")


def _check(plan: Replay, spec: EnvSpec) -> None:
    memory = plan.memory
    if memory.remover == "inverse" and image_leaves(spec):
        raise UsageError(
            "remover 'inverse' frees items of any age, but image observations lie in a ring of frames that neighbours "
            "share, where only the oldest can go; use remover 'fifo' or 'soft'"
        )
    if memory.min_size > memory.capacity:
        raise UsageError(
            f"algo.replay.min_size is {memory.min_size}; it must be at most the capacity, {memory.capacity}"
        )


def _largest(priorities: np.ndarray) -> float:
    if not len(priorities):
        return 0.0
    least, largest = float(priorities.min()), float(priorities.max())
    if not (least >= 0 and largest < np.inf):
        raise ValueError(f"priorities are {least}..{largest}; they must be finite and not negative")
    return largest
