"""IMPACT's circular buffer: no batch more often than allowed, the oldest out first, every step counted once."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support_unrolls import Source, codes, steps_of

from rookery.core.types import Sample
from rookery.tables.circular import CircularTable
from rookery.tables.queue import LagQueue, RoundQueue


class Chosen(random.Random):
    """Draws what it is told to."""

    def __init__(self, *positions: int):
        super().__init__(0)
        self.positions = list(positions)

    def choice(self, seq):
        return seq[self.positions.pop(0) if self.positions else 0]


class Script:
    """A buffer of batches of one unroll, and what has come of it."""

    def __init__(self, batches: int, uses: int, queue: type = LagQueue, seed: int = 0):
        inner = RoundQueue(1) if queue is RoundQueue else LagQueue(1, batch=1, max_lag=1000)
        self.table, self.source, self.version = CircularTable(inner, batches, uses, seed), Source(), 0
        self.fresh = self.evicted = 0

    def put(self, many: int = 1) -> None:
        for _ in range(many):
            self.table.ordered(0, self.version)
            self.table.insert(self.source(0, self.version))

    def drawn(self) -> Sample | None:
        sample = self.table.next(self.version, 0.0)
        self.fresh += 0 if sample is None else sample.fresh
        return sample

    def learn(self) -> int | None:
        """The batch that was trained on."""
        if (sample := self.drawn()) is None:
            return None
        (code,) = codes(sample)
        self.version += 1
        self.table.update(sample, None, self.version)
        self.count()
        return code

    def count(self) -> None:
        self.evicted += self.table.losses().evicted

    def balanced(self) -> bool:
        return self.fresh + self.evicted + self.table.steps == steps_of(*range(self.source.made))

    @property
    def kept(self) -> list[int]:
        return [codes(kept.sample)[0] for kept in self.table._kept]


def test_two_batches_of_two_uses_step_by_step():
    """P47. One new batch comes with each of the first updates; what is drawn is scripted."""
    script = Script(2, 2)
    script.table._rng = Chosen(0, 1, 0, 0, 1, 0, 0)
    script.put(4)
    assert script.learn() == 0 and script.kept == [0], "0 was used once"
    assert script.learn() == 1 and script.kept == [0, 1], "1 was used once"
    assert script.learn() == 1 and script.kept == [2], (
        "2 came and the oldest left, used once; 1 was used twice and left"
    )
    assert script.learn() == 2 and script.kept == [2, 3], "3 came"
    assert script.evicted == 0 and script.table.stats()["uses_per_batch"] == 1.5
    assert script.learn() == 3 and script.kept == [2, 3]
    assert script.learn() == 2 and script.kept == [3]
    assert script.learn() == 3 and script.kept == [] and script.learn() is None
    assert script.evicted == 0 and script.fresh == steps_of(0, 1, 2, 3) and script.balanced()
    assert script.table.stats() == {"late_share": 0.0, "kept_batches": 0.0, "uses_per_batch": 7 / 4}


def test_a_batch_that_makes_room_before_it_was_used_is_counted_as_evicted():
    script = Script(2, 2)
    script.table._rng = Chosen(0, 1, 1)
    script.put(3)
    assert script.learn() == 0 and script.learn() == 1 and script.kept == [0, 1]
    assert script.learn() == 2 and script.kept == [1, 2] and script.evicted == 0, "0 was used"
    script = Script(2, 9)
    script.table._rng = Chosen(0, 0, 1, 1)
    script.put(4)
    assert [script.learn() for _ in range(4)] == [0, 0, 2, 3]
    assert script.evicted == steps_of(1) > 0 and script.kept == [2, 3] and script.balanced()


def test_steps_that_are_being_trained_on_do_not_wait_any_more():
    """If the update fails they are counted as lost by the loop, and must not be in the checkpoint a second time."""
    script = Script(2, 2)
    script.put()
    assert script.table.steps == steps_of(0)
    assert script.drawn().fresh == steps_of(0) and script.table.steps == 0 and script.balanced()


def test_memory_is_given_back_when_a_batch_has_left_and_not_before():
    script = Script(2, 2)
    script.put()
    idle = script.table.queue._batcher._idle
    first = script.drawn()
    memory = first.keys.sample.keys
    script.table.update(first, None, 1)
    second = script.drawn()
    assert not any(each is memory for each in idle), "it is being used a second time"
    assert second.batch.logp is first.batch.logp and second.fresh == 0 and codes(second) == [0]
    assert first.batch.replayed is None and second.batch.replayed.all(), "statistics count it once"
    script.table.update(second, None, 2)
    assert any(each is memory for each in idle)


@pytest.mark.parametrize("queue", [RoundQueue, LagQueue])
@settings(max_examples=100, deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.lists(st.booleans(), max_size=60), st.integers(0, 99))
def test_against_a_list_of_batches(queue, batches, uses, script, seed):
    """`script`: an unroll comes, or the learner takes what there is."""
    run, kept, waiting, used = Script(batches, uses, queue, seed), [], [], Counter()
    for comes in script:
        if comes:
            if run.table.wants(0, True):
                run.put()
                waiting.append(run.source.made - 1)
        else:
            if waiting:
                if len(kept) == batches:
                    kept.pop(0)
                kept.append(waiting.pop(0))
            code = run.learn()
            assert (code in kept) if kept else code is None
            if code is not None:
                used[code] += 1
                if used[code] == uses:
                    kept.remove(code)
        assert run.kept == kept and len(run.table) == len(waiting)
        assert run.table.due == bool(kept or waiting) and (run.table.patience == 0) == run.table.due
        assert run.table.steps == steps_of(*waiting, *(code for code in kept if not used[code]))
        assert len(run.source.out) == len(waiting)
        assert run.balanced() and max(used.values(), default=0) <= uses
        if queue is RoundQueue:
            assert run.table.wants(0, True) == (not kept and not waiting) == run.table.settled
            assert run.table.wants(0, False) is False
    gone = set(range(run.source.made)) - set(waiting) - set(kept)
    assert run.evicted == steps_of(*(code for code in gone if not used[code]))


def test_in_turns_every_batch_is_used_up_before_the_next_is_collected():
    script = Script(3, 2, RoundQueue)
    for code in range(3):
        assert script.table.wants(0, True) and script.table.settled
        script.put()
        assert not script.table.wants(0, True) and not script.table.settled
        assert script.learn() == code and not script.table.wants(0, True) and not script.table.settled
        assert script.learn() == code
    assert script.table.settled and not script.table.due and script.evicted == 0 and script.balanced()


def test_draws_are_random_and_the_seed_decides():
    def order(seed: int) -> list[int]:
        script = Script(4, 100, seed=seed)
        script.put(4)
        return [script.learn() for _ in range(200)]

    assert order(1) == order(1) != order(2)
    counts = Counter(order(1)[4:])
    assert counts.keys() == {0, 1, 2, 3} and min(counts.values()) > 30


def test_after_a_request_to_shut_down_only_what_was_never_trained_on_is_due_and_that_once():
    script = Script(3, 5)
    script.table._rng = Chosen(0, 0, 0)
    script.put(3)
    assert [script.learn() for _ in range(3)] == [0, 0, 0] and script.kept == [0, 1, 2]
    script.put()
    for _ in range(2):  # the loop says so after every update
        script.table.stop()
        assert script.kept == [1, 2] and script.table.due
    assert {script.learn() for _ in range(3)} == {1, 2, 3}
    assert not script.table.due and script.learn() is None
    assert script.evicted == 0 and script.fresh == steps_of(0, 1, 2, 3) and script.balanced()


def test_closing_counts_what_was_never_trained_on_and_gives_all_memory_back():
    script = Script(3, 5)
    script.table._rng = Chosen(0, 0, 0)
    script.put(3)
    for _ in range(3):
        script.learn()
    script.table.close()
    script.count()
    assert script.kept == [] and script.evicted == steps_of(1, 2) and script.table.steps == 0 and script.balanced()
    assert len(script.table.queue._batcher._idle) == 3


def test_what_a_queue_has_dropped_is_told_too():
    queue = LagQueue(1, batch=1, max_lag=1)
    table, source = CircularTable(queue, 2, 1, seed=0), Source()
    table.ordered(0, 0)
    table.insert(source(0, 0))
    assert table.next(5, 0.0) is None
    losses = table.losses()
    assert losses.dropped == {"too_old": steps_of(0)} and losses.evicted == 0 and table.losses().dropped == {}
    table.ordered(0, 5)
    assert table.lost(0) == 0 and not queue._young, "orders of an actor that was replaced"
