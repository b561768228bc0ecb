"""Batches put together elsewhere: as here, in order, again when an aggregator is lost, given up when data is."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch
from support_unrolls import Source, codes

from rookery.core.errors import LearnerError
from rookery.core.types import DataPlan, Mix, Queue
from rookery.roles.aggregator import Aggregator, AggregatorSetup
from rookery.tables import aggregated
from rookery.tables.aggregated import EACH, AggregatedBatches
from rookery.tables.batch import Batcher, Load
from rookery.tables.circular import CircularTable
from rookery.tables.factory import ring_share
from rookery.tables.queue import LagQueue, RoundQueue
from rookery.tables.service import ArgumentLost, ServiceLost
from rookery.tables.unroll_ring import UnrollRing


class StepAggregator:
    """Answers one question for each `step`."""

    def __init__(self, index: int = 0, ring: int = 0, proportion: float = 0.0):
        self.life, self.up, self.why = 0, True, ""
        self.target = Aggregator(AggregatorSetup(ring, proportion, 5, index).builtins())
        self.asked: deque[tuple[Future[Any], str, tuple[Any, ...]]] = deque()

    def ask(self, op: str, *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if self.up:
            self.asked.append((future, op, args))
        else:
            future.set_exception(ServiceLost("away"))
        return future

    def look(self) -> None:
        pass

    def step(self) -> None:
        future, op, args = self.asked.popleft()
        made = getattr(self.target, op)(*args)
        for array in made.arrays.values():
            array.flags.writeable = False  # as what comes out of an object store
        future.set_result(made)

    def kill(self, why: str) -> None:
        self.life, self.up, self.why = self.life + 1, False, why
        while self.asked:
            self.asked.popleft()[0].set_exception(ServiceLost(why))


def batches_of(count: int = 2, **more: Any) -> tuple[AggregatedBatches, list[StepAggregator]]:
    services = [StepAggregator(index, **more) for index in range(count)]
    return AggregatedBatches(services, deadline=5.0), services


def load_of(source: Source, *actors: int) -> Load:
    deliveries = [source(actor, version=10 + actor) for actor in actors]
    return Load(deliveries, (), sum(int(d.arrays["live"].sum()) for d in deliveries))


def same(one: Any, other: Any) -> bool:
    pairs = zip(one.batch.obs.values(), other.batch.obs.values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs) and torch.equal(one.batch.reward, other.batch.reward)


def test_a_batch_is_the_one_that_would_be_made_here():
    batches, services = batches_of()
    load = load_of(Source(), 0, 2, 1)
    batches.start(load)
    assert not batches.ready and list(batches.under_way) == [load]
    services[0].step()
    loaded, here = batches.take(), Batcher().now(load)
    assert loaded.load is load and not batches.under_way
    assert same(loaded.sample, here) and loaded.sample.fresh == here.fresh > 0
    np.testing.assert_array_equal(loaded.sample.versions, here.versions)
    loaded.sample.batch.reward.add_(1)  # the learner owns it


def test_batches_come_in_the_order_in_which_they_were_begun_and_aggregators_take_turns():
    batches, services = batches_of()
    loads = [load_of(Source(), actor) for actor in range(3)]
    for load in loads:
        batches.start(load)
    assert [len(service.asked) for service in services] == [2, 1] and batches.room
    services[1].step()
    assert batches.take() is None, "the first one is not made yet"
    services[0].step()
    assert [batches.take().load, batches.take().load] == loads[:2]
    for _ in range(2 * EACH):
        assert batches.room
        batches.start(loads[0])
        if len(batches.under_way) == 2 * EACH:
            break
    assert not batches.room


def test_what_a_lost_aggregator_had_is_made_by_another():
    batches, services = batches_of()
    load = load_of(Source(), 0, 1)
    batches.start(load)
    services[0].kill("killed")
    assert batches.take() is None and len(services[1].asked) == 1
    services[1].kill("killed")
    assert batches.take() is None and not batches.room
    services[0].up = True
    assert batches.take() is None
    services[0].step()
    assert same(batches.take().sample, Batcher().now(load))


def test_a_batch_whose_unrolls_are_gone_is_given_up():
    batches, services = batches_of(1)
    load = load_of(Source(), 0, 1)
    batches.start(load)
    services[0].asked.popleft()[0].set_exception(ArgumentLost("its node is gone"))
    loaded = batches.take()
    assert loaded.load is load and loaded.sample is None and services[0].up


def test_an_aggregator_that_takes_too_long_is_killed_and_none_at_all_ends_the_run(monkeypatch):
    clock = [50.0]
    monkeypatch.setattr(aggregated.time, "monotonic", lambda: clock[0])
    batches, services = batches_of(1)
    batches.start(load_of(Source(), 0))
    clock[0] += 4.0
    assert not batches.ready and services[0].up
    clock[0] += 2.0
    assert not batches.ready and not services[0].up and "5 s" in services[0].why
    clock[0] += 6.0
    with pytest.raises(LearnerError, match="no aggregator"):
        _ = batches.ready


def test_an_aggregator_that_was_killed_is_not_killed_again_while_its_answer_is_awaited(monkeypatch):
    clock = [50.0]
    monkeypatch.setattr(aggregated.time, "monotonic", lambda: clock[0])
    batches, services = batches_of(1)
    batches.start(load_of(Source(), 0))
    waiting = services[0].asked.popleft()[0]  # its failure comes later than the kill
    clock[0] += 6.0
    for _ in range(3):
        assert not batches.ready
    assert services[0].life == 1
    services[0].up = True
    assert not batches.ready and services[0].life == 1, "nor is its successor"
    waiting.set_exception(ServiceLost("killed"))
    assert not batches.ready
    services[0].step()
    assert batches.ready


def test_earlier_unrolls_are_added_from_a_ring_of_its_own():
    batches, services = batches_of(1, ring=4, proportion=1.0)
    source, ring = Source(), UnrollRing(4, 1.0, 0)
    for turn in range(5):
        load = load_of(source, 0, 1)
        batches.start(load)
        services[0].step()
        batch = batches.take().sample.batch
        new = 2 * len(load.deliveries[0].arrays["lane"])
        if turn:
            assert batch.replayed.tolist() == [False] * new + [True] * new
        ring.mixed_with(load.deliveries)
    stats = batches.stats()
    assert stats["ring"] == len(ring) == 4 and stats["replayed"] == 2.0 and stats["aggregators"] == 1.0


def test_a_ring_is_divided():
    mix = Mix(Queue(1), 0.5, 10)
    assert ring_share(DataPlan(1, 1, mix), 4) == (2, 0.5)
    assert ring_share(DataPlan(1, 1, Queue(1)), 4) == (0, 0.0)


# In the queues


def test_a_round_is_learnt_before_the_next_one_begins():
    batches, services = batches_of(1)
    table, source = RoundQueue(2, batcher=batches), Source()
    for actor in (0, 1):
        table.ordered(actor, 0)
        table.insert(source(actor))
    steps = table.steps
    assert table.next(0, 0.0) is None and table.due and table.steps == steps > 0 and not table.settled
    assert not table.wants(0, True), "nobody acts while a batch is under way"
    services[0].step()
    assert table.patience == 0.0
    sample = table.next(0, 0.0)
    assert sample.fresh == steps and table.steps == 0 and table.settled and table.wants(0, True)
    assert not source.out


def test_a_round_that_is_lost_is_counted():
    batches, services = batches_of(1)
    table, source = RoundQueue(1, batcher=batches), Source()
    table.ordered(0, 0)
    table.insert(source(0))
    steps = table.steps
    assert table.next(0, 0.0) is None
    services[0].asked.popleft()[0].set_exception(ArgumentLost("gone"))
    assert table.next(0, 0.0) is None and not table.due and table.wants(0, True)
    assert table.losses().dropped == {"lost": steps} and not source.out


def test_a_queue_with_lag_hands_over_batches_as_they_are_made():
    batches, services = batches_of(2)
    table, source = LagQueue(4, batch=2, max_lag=2, batcher=batches), Source()
    for actor in range(4):
        table.ordered(actor, 0)
        table.insert(source(actor))
    steps = table.steps
    assert table.next(0, 0.0) is None and table.steps == steps and len(table) == 4
    assert [len(service.asked) for service in services] == [1, 1]
    services[1].step()
    assert table.next(0, 0.0) is None
    services[0].step()
    first, second = table.next(0, 0.0), table.next(1, 0.0)
    assert codes(first) == [0, 1] and codes(second) == [2, 3]
    assert first.fresh + second.fresh == steps and table.steps == 0


def test_what_is_lost_on_the_way_leaves_the_queue_by_a_reason():
    batches, services = batches_of(1)
    table, source = LagQueue(2, batch=2, max_lag=1, batcher=batches), Source()
    for actor in range(2):
        table.ordered(actor, 0)
        table.insert(source(actor))
    steps = table.steps
    assert table.next(0, 0.0) is None
    services[0].asked.popleft()[0].set_exception(ArgumentLost("gone"))
    assert table.next(0, 0.0) is None
    assert table.losses().dropped == {"lost": steps} and table.steps == 0 and not source.out


def test_a_circular_buffer_keeps_what_aggregators_made():
    batches, services = batches_of(1)
    queue = LagQueue(2, batch=2, max_lag=4, batcher=batches)
    table, source = CircularTable(queue, batches=2, uses=2, seed=1), Source()
    for actor in range(2):
        table.ordered(actor, 0)
        table.insert(source(actor))
    assert table.next(0, 0.0) is None
    services[0].step()
    uses = 0
    while (sample := table.next(uses, 0.0)) is not None:
        uses += 1
        table.update(sample, None, uses)
    assert uses == 2 and not source.out
