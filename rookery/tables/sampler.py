"""Which slots of a memory are drawn: uniformly, in proportion to priority, or by rank.

Prioritized Experience Replay, Schaul et al. 2016, §3.3: P(i) = p_i^alpha / sum_k p_k^alpha, where p_i is a priority
(`Proportional`) or 1/rank of it (`Rank`). Both are drawn stratified, appendix B.2.1: the total mass is cut into n equal
ranges and one number is drawn in each. Together the n draws cover the mass evenly, so item i is expected exactly
n * P(i) times whether it fills many ranges or a small part of one: P(i) is what importance weights have to use.

All results depend on the numbers drawn from the given generator only, and are the same bits with numba and without.
Not here: what lies in a slot, importance weights, the largest priority so far (memory.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import numpy as np

from rookery.tables.fast import kernel
from rookery.tables.fast.order import NONE, make_order
from rookery.tables.fast.power import Power
from rookery.tables.fast.sum_tree import SumTree
from rookery.tables.ring import Rows


class Sampler(Protocol):
    """Over slots 0..capacity-1; `len` is the number of slots that hold an item."""

    before_write: Callable[[Rows], None] | None  # called before entries of its vector change: snapshots

    def set(self, slot: np.ndarray, priority: np.ndarray) -> None:
        """Items come in or change. Raw priorities, finite and >= 0; the last one counts where a slot stands twice."""

    def remove(self, slot: np.ndarray) -> None:
        """Items go. Slots without one are passed over."""

    def draw(self, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """n slots (int64), and the probability P(i) of each per draw (float64)."""

    def lowest(self) -> float:
        """The smallest P(i) of all items that can be drawn."""

    @property
    def mass(self) -> float:
        """What the P(i) are shares of."""

    def __len__(self) -> int: ...

    def vectors(self) -> dict[str, np.ndarray]:
        """All that `load` needs to draw the same again: one vector by its name, as a view."""

    def state(self) -> dict[str, np.ndarray]:
        """The same as a copy."""

    def load(self, state: dict[str, np.ndarray]) -> None: ...


class Uniform:
    """Every item with probability 1/N, each draw independent of the others. Priorities are not looked at."""

    def __init__(self, capacity: int):
        self._item = np.empty(capacity, np.int64)  # slots that hold one, in the order they came
        self._place = np.full(capacity, -1, np.int64)  # where in `_item` a slot stands
        self._size = 0
        self.before_write: Callable[[Rows], None] | None = None

    def __len__(self) -> int:
        return self._size

    def set(self, slot: np.ndarray, priority: np.ndarray) -> None:
        slot = _slots(slot, len(self._place))
        new = slot[self._place[slot] < 0]
        if not len(new):
            return
        new = np.unique(new)
        self._put(new, np.arange(self._size, self._size + len(new)))
        self._size += len(new)

    def remove(self, slot: np.ndarray) -> None:
        """The last items move to the places that become free."""
        slot = _slots(slot, len(self._place))
        place = np.unique(self._place[slot])
        place = place[place >= 0]
        self._place[slot] = -1
        size = self._size - len(place)
        moving = self._item[size : self._size]
        self._put(moving[self._place[moving] >= 0], place[place < size])
        self._size = size

    def _put(self, slot: np.ndarray, place: np.ndarray) -> None:
        if self.before_write is not None:
            self.before_write(place)
        self._item[place] = slot
        self._place[slot] = place

    def draw(self, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        _some(self)
        return self._item.take(rng.integers(0, self._size, n)), np.full(n, 1 / self._size)

    def lowest(self) -> float:
        _some(self)
        return 1 / self._size

    @property
    def mass(self) -> float:
        return float(self._size)

    def vectors(self) -> dict[str, np.ndarray]:
        return {"item": self._item[: self._size]}

    def state(self) -> dict[str, np.ndarray]:
        return {"item": self._item[: self._size].copy()}

    def load(self, state: dict[str, np.ndarray]) -> None:
        item = _slots(state["item"], len(self._place))
        if len(np.unique(item)) != len(item):
            raise ValueError("the state names a slot twice")
        self._place[:] = -1
        self._size = len(item)
        self._put(item, np.arange(len(item)))


class Proportional:
    """P(i) = p_i^alpha / sum. alpha is applied here, once, at write; a negative one prefers low priorities.

    An item of priority 0 is never drawn beside others (beside none but such, all are drawn equally often), and
    `lowest` does not count it. With a negative alpha it is the other way round: 0 goes before all others.
    """

    def __init__(self, capacity: int, alpha: float):
        self._power = Power(alpha)
        self._tree = SumTree(capacity)
        self.before_write: Callable[[Rows], None] | None = None

    def __len__(self) -> int:
        return int(np.count_nonzero(self._tree.leaves))  # counted on request: keeping count would slow `set` down

    def set(self, slot: np.ndarray, priority: np.ndarray) -> None:
        self._write(slot, self._power(priority))

    def remove(self, slot: np.ndarray) -> None:
        self._write(slot, np.zeros(len(slot)))

    def _write(self, slot: np.ndarray, leaf: np.ndarray) -> None:
        if self.before_write is not None:
            self.before_write(slot)
        self._tree.set(slot, leaf)

    def draw(self, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        return self._tree.draw(rng.random(n))

    def lowest(self) -> float:
        smallest = self._tree.smallest()
        return smallest / self._tree.total if smallest < math.inf else 1 / _some(self)

    @property
    def mass(self) -> float:
        return self._tree.total

    def vectors(self) -> dict[str, np.ndarray]:
        return {"leaf": self._tree.leaves}

    def state(self) -> dict[str, np.ndarray]:
        return {"leaf": self._tree.leaves.copy()}

    def load(self, state: dict[str, np.ndarray]) -> None:
        leaf = np.asarray(state["leaf"])
        if leaf.shape != self._tree.leaves.shape:
            raise ValueError(f"the state has {leaf.shape} leaves, this sampler {self._tree.leaves.shape}")
        self._write(np.arange(len(leaf)), leaf)


class Rank:
    """P(i) = rank(i)^-alpha / sum over ranks 1..N, where the largest priority has rank 1.

    The ranks 1..N are the leaves of a sum tree, and drawn as `Proportional` draws slots: the mass is cut into n equal
    ranges anywhere, not between two ranks only, so a range may cover a part of one rank or a thousand of them. None is
    ever empty, for any n and N, and rank r is expected exactly n * P(r) times.

    # Deviates: from the paper's appendix B.2.1, where segments are made of whole ranks and drawn from uniformly: what
    # that draws is 1/(n * size of the segment), not P(i), and with n near N or above it has empty segments.
    # Deviates: from the paper's heap, which is sorted now and then: ranks here are exact after every change. Otherwise
    # an item of rank 1 (one in 200 draws at N = 10^6, alpha = 0.7) would be drawn on and on after its error has gone.

    Ranks go by the priority as float32, equal ones by slot, lower slots first.
    """

    def __init__(self, capacity: int, alpha: float):
        if not 0 <= alpha < math.inf:
            raise ValueError(f"alpha is {alpha}: for ranks it must be finite and not negative")
        self._alpha, self._order = alpha, make_order(capacity)
        self._tree = SumTree(capacity)  # leaf r: the mass of rank r + 1
        self.before_write: Callable[[Rows], None] | None = None

    def __len__(self) -> int:
        return len(self._order)

    def set(self, slot: np.ndarray, priority: np.ndarray) -> None:
        slot, priority = _slots(slot, len(self._order.key)), np.asarray(priority)
        if slot.shape != priority.shape:
            raise ValueError(f"slots {slot.shape} and priorities {priority.shape}: two vectors of one length")
        if len(slot) and not (priority.min() >= 0 and priority.max() < np.inf):
            raise ValueError("a priority is negative, infinite or not a number")
        self._change(slot, _keys(slot, priority))

    def remove(self, slot: np.ndarray) -> None:
        slot = _slots(slot, len(self._order.key))
        self._change(slot, np.full(len(slot), NONE))

    def _change(self, slot: np.ndarray, key: np.ndarray) -> None:
        if self.before_write is not None:
            self.before_write(slot)
        old = len(self._order)
        self._order.set(slot, key)
        new = len(self._order)
        if new > old:
            self._tree.set(np.arange(old, new), np.arange(old + 1, new + 1, dtype=np.float64) ** -self._alpha)
        elif new < old:
            self._tree.set(np.arange(new, old), np.zeros(old - new))

    def draw(self, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        rank, probability = self._tree.draw(rng.random(n))
        return self._order.at(rank), probability

    def lowest(self) -> float:
        return float(self._tree.leaves[_some(self) - 1] / self._tree.total)

    @property
    def mass(self) -> float:
        return self._tree.total

    def vectors(self) -> dict[str, np.ndarray]:
        return {"key": self._order.key}

    def state(self) -> dict[str, np.ndarray]:
        return {"key": self._order.key.copy()}

    def load(self, state: dict[str, np.ndarray]) -> None:
        key, slot = np.array(state["key"], np.int64), np.arange(len(self._order.key))
        if key.shape != slot.shape:
            raise ValueError(f"the state has {key.shape} keys, this sampler {slot.shape}")
        if not ((key == NONE) | ((key >= 0) & (key & 0xFFFFFFFF == slot))).all():
            raise ValueError("the state has a key that is not of its slot")
        self._change(slot, key)


_LARGEST = np.finfo(np.float32).max


def _keys(slot: np.ndarray, priority: np.ndarray) -> np.ndarray:
    """Ascending keys are descending priorities: the bits of floats that are not negative are ordered as the floats."""
    single = np.minimum(priority, _LARGEST).astype(np.float32) + np.float32(0)  # 0 for -0
    return ((0x7F800000 - single.view(np.int32).astype(np.int64)) << 32) | slot


def _slots(slot: np.ndarray, capacity: int) -> np.ndarray:
    slot = kernel.plain(slot, np.int64)
    if len(slot) and not (slot.min() >= 0 and slot.max() < capacity):
        raise ValueError(f"slots {slot.min()}..{slot.max()}: there are 0..{capacity - 1}")
    return slot


def _some(sampler: Sampler) -> int:
    size = len(sampler)
    if not size:
        raise ValueError("nothing to draw: there is no item")
    return size
