"""Proportional sampling against another implementation, cpprb: same probabilities, same weights, same frequencies.

cpprb keeps (p + eps)^alpha in a binary float32 tree, draws stratified, and normalises weights by the largest in the
buffer. Its random numbers cannot be seeded, hence the generous limit of the frequency test.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from cpprb import PrioritizedReplayBuffer
from hypothesis import given, settings
from hypothesis import strategies as st

from rookery.tables.sampler import Proportional

EPS = 1e-4


class Pair:
    """The same items in both: a ring of `capacity` slots."""

    def __init__(self, capacity: int, alpha: float):
        self.theirs = PrioritizedReplayBuffer(capacity, {"number": {"dtype": np.int64}}, alpha=alpha, eps=EPS)
        self.ours = Proportional(capacity, alpha)
        self.capacity, self.added = capacity, 0

    def add(self, priority: np.ndarray) -> None:
        number = np.arange(self.added, self.added + len(priority))
        self.ours.set(number % self.capacity, priority + EPS)
        room = self.capacity - self.added % self.capacity
        for part in (slice(None, room), slice(room, None)):  # cpprb 11.0.0 mixes priorities up if a batch goes around
            if len(priority[part]):
                self.theirs.add(number=number[part], priorities=priority[part])
        self.added += len(priority)

    def update(self, slot: np.ndarray, priority: np.ndarray) -> None:
        self.theirs.update_priorities(slot, priority)
        self.ours.set(slot, priority + EPS)

    def our_weights(self, slot: np.ndarray, beta: float) -> np.ndarray:
        leaf = self.ours.state()["leaf"]
        return (leaf[slot] / leaf.sum() / self.ours.lowest()) ** -beta


positive = st.floats(0.01, 100)


@given(
    capacity=st.integers(1, 70),
    alpha=st.sampled_from([0.0, 0.5, 0.6, 1.0]),
    beta=st.sampled_from([0.0, 0.4, 1.0]),
    steps=st.lists(st.tuples(st.booleans(), st.lists(positive, min_size=1, max_size=20)), min_size=1, max_size=6),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=60, deadline=None)
def test_weights_after_any_history(capacity, alpha, beta, steps, seed):
    pair, rng = Pair(capacity, alpha), np.random.default_rng(seed)
    pair.add(np.array([1.0]))
    for adding, priority in steps:
        priority = np.array(priority)[:capacity]
        size = min(pair.added, capacity)
        if adding:
            pair.add(priority)
        else:
            pair.update(rng.integers(0, size, len(priority)), priority)
    size = min(pair.added, capacity)
    assert len(pair.ours) == pair.theirs.get_stored_size() == size
    drawn = pair.theirs.sample(64, beta=beta)
    slot = drawn["indexes"].astype(np.int64)
    np.testing.assert_allclose(drawn["weights"], pair.our_weights(slot, beta), rtol=2e-5)
    found, probability = pair.ours.draw(64, rng)
    leaf = pair.ours.state()["leaf"]
    np.testing.assert_allclose(probability, leaf[found] / leaf.sum(), rtol=1e-12)


@pytest.mark.parametrize("n", [8, 64, 512])
def test_frequencies(n):
    """Two samples of one distribution, compared by chi-square; ours to the power of 1.1 would not pass for theirs."""
    size, rng = 50, np.random.default_rng(n)
    priority = rng.random(size) * 3 + 0.05
    pair, other = Pair(64, 0.6), Proportional(64, 0.66)
    pair.add(priority)
    other.set(np.arange(size), priority + EPS)
    rounds = 400_000 // n

    def count(draw) -> np.ndarray:
        return sum(np.bincount(draw(), minlength=size) for _ in range(rounds))

    theirs = count(lambda: pair.theirs.sample(n)["indexes"].astype(np.int64))
    ours, off = (count(lambda s=s: s.draw(n, rng)[0]) for s in (pair.ours, other))

    def chi_square(a, b) -> float:
        return float(((a - b) ** 2 / (a + b)).sum())

    limit = size - 1 + 8 * math.sqrt(2 * (size - 1))
    assert chi_square(ours, theirs) < limit
    assert chi_square(off, theirs) > limit
