"""Straggler preemption: who stops when, and that no round sees the count of another (P23)."""

from __future__ import annotations

import numpy as np
import pytest

from rookery.topologies.preempt import Preemption


class Store:
    """The group's store, and a clock that moves only by hand."""

    def __init__(self, size: int):
        self.size, self.now, self.numbers, self.looks = size, 0.0, {}, 0

    def rank(self, rank: int, share: float) -> Preemption:
        store = self

        class Group:
            def __init__(self):
                self.rank, self.size = rank, store.size

            def count(self, key, more=0):
                store.looks += 1
                store.numbers[key] = store.numbers.get(key, 0) + more
                return store.numbers[key]

            def forget(self, key):
                store.numbers.pop(key, None)

        return Preemption(Group(), share, lambda: store.now)


@pytest.mark.parametrize(
    ("size", "share", "enough"), [(10, 0.6, 6), (2, 0.5, 1), (2, 0.6, 2), (5, 0.6, 3), (3, 0.0, 1)]
)
def test_the_others_stop_once_enough_have_finished(size, share, enough):
    store = Store(size)
    ranks = [store.rank(rank, share) for rank in range(size)]
    for finished in range(size):
        store.now += 1.0
        assert ranks[-1].due() == (finished >= enough), finished
        ranks[finished].finished()


def test_a_round_never_sees_the_count_of_another_one():
    """A fast rank may be in the next round before a slow one has looked at this one's count."""
    store = Store(2)
    fast, slow = store.rank(0, 0.5), store.rank(1, 0.5)
    for round in range(50):
        fast.begin(round)
        slow.begin(round)
        store.now += 1.0
        assert not fast.due() and not slow.due(), "at the start of a round nobody has finished"
        fast.finished()
        store.now += 1.0
        assert slow.due()
        slow.finished()
        assert len(store.numbers) <= 2, "old counts are removed"


def test_the_store_is_not_asked_in_every_row():
    store = Store(2)
    rank = store.rank(0, 0.5)
    for _ in range(1000):
        store.now += 1e-5
        rank.due()
    assert store.looks <= 6


def test_preemption_with_one_slow_environment_raises_the_rate():
    """A simulated clock: two ranks of one step per tick and one that is ten times slower, 100 rounds of 128 rows."""

    def rate(share: float, rows: int = 128, after: float = 0.25, learn: float = 20.0) -> float:
        speeds, time, steps = np.array([1.0, 1.0, 10.0]), 0.0, 0
        for round in range(100):
            store = Store(3)
            ranks = [store.rank(r, share) for r in range(3)]
            left, done, tick = np.full(3, rows), np.zeros(3, bool), 0.0
            for each in ranks:
                each.begin(round)
            while not done.all():
                tick += 1.0
                store.now = tick
                for r in range(3):
                    if done[r] or tick % speeds[r]:
                        continue
                    left[r] -= 1
                    past = rows - left[r] >= after * rows
                    if left[r] == 0 or (past and ranks[r].due()):
                        done[r] = True
                        ranks[r].finished()
            time += tick + learn
            steps += 3 * rows - left.sum()
        return steps / time

    assert rate(0.6) >= 1.5 * rate(1.0)
