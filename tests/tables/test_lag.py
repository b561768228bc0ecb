"""Queues with lag, loaders and slow learners: bounded age, bounded memory, and every unroll accounted for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support_unrolls import B, Source, by_hand, codes, steps_of, work

from rookery.core.types import Circular, DataPlan, Queue, Sample
from rookery.tables.batch import Batcher
from rookery.tables.circular import CircularTable
from rookery.tables.factory import make_table
from rookery.tables.queue import LagQueue


@pytest.fixture(autouse=True)
def hands(monkeypatch):
    """Loader threads that move when told."""
    by_hand(monkeypatch)


def table_of(actors: int, batch: int, lag: int, loaders: int, circular: tuple[int, int] | None = None):
    """As the factory makes it for actors in processes."""
    queue = Queue(lag, batch, loaders)
    plan = DataPlan(3, 3, queue if circular is None else Circular(queue, *circular))
    return make_table(plan, {"reward": ((3, 2), "float32")}, None, actors, seed=1, alone=False)


class Actors:
    """Virtual actors around a table: each fills its orders one after the other, with the weights of the order."""

    def __init__(self, table: LagQueue | CircularTable, actors: int):
        self.table, self.version = table, 0
        self.queue = table.queue if isinstance(table, CircularTable) else table
        self.openings = deque(list(range(actors)) * table.ahead)
        self.source = Source(self.openings.append)
        self.orders: list[deque[tuple[int, int]]] = [deque() for _ in range(actors)]  # number of the order, version
        self.placed, self.versions = 0, dict[int, int]()  # by code: version of an unroll
        self.owner: dict[int, int] = {}
        self.trained: list[int] = []  # codes, in the order of training
        self.lags: list[int] = []
        self.dropped = 0  # steps

    def supply(self) -> None:
        """As the loop does: from the actor that has waited longest, until the table has enough."""
        while self.openings and self.table.wants(self.openings[0], True):
            self.order(self.openings.popleft())

    def order(self, actor: int) -> None:
        self.orders[actor].append((self.placed, self.version))
        self.table.ordered(actor, self.version)
        self.placed += 1

    def first(self, among: int | None = None) -> int:
        """Who of the first so many actors was given the oldest order."""
        return min((orders[0], actor) for actor, orders in enumerate(self.orders[:among]) if orders)[1]

    def deliver(self, actor: int, newer: int = 0) -> None:
        """`newer`: versions by which the weights that it took were newer than when it was told."""
        _, version = self.orders[actor].popleft()
        version = min(self.version, version + newer)
        delivery = self.source(actor, version)
        self.versions[delivery.sequence], self.owner[delivery.sequence] = version, actor
        self.table.insert(delivery)
        self.count()

    def fail(self, actor: int) -> None:
        self.openings.extend([actor] * len(self.orders[actor]))
        self.orders[actor].clear()
        self.table.lost(actor)

    def learn(self) -> Sample | None:
        sample = self.table.next(self.version, 0.0)
        self.count()
        if sample is not None:
            self.lags += (self.version - sample.versions).tolist()
            if sample.fresh:
                self.trained += codes(sample)
                assert sample.fresh == steps_of(*codes(sample))
                stamped = [self.versions[code] for code in codes(sample) for _ in range(B)]
                assert sample.versions.tolist() == sample.batch.version.tolist() == stamped
            self.version += 1
            self.table.update(sample, None, self.version)
        return sample

    def count(self) -> None:
        losses = self.table.losses()
        assert losses.dropped.keys() <= {"too_old"}
        self.dropped += sum(losses.dropped.values()) + losses.evicted

    def balanced(self) -> None:
        """Every step that was inserted is trained on, dropped, or waits."""
        inserted = steps_of(*range(self.source.made))
        assert inserted == steps_of(*self.trained) + self.dropped + self.table.steps

    def run(self, updates: int, choose: Callable[[int], int] = lambda many: 0) -> None:
        """Actors as fast as the queue lets them, and a learner that is always the last to move."""
        for _ in range(8 * updates):
            if self.version == updates:
                return
            self.supply()
            while any(self.orders):
                self.deliver(self.first())
                self.supply()
            while work(self.queue._batcher, choose):
                pass
            self.learn()
            self.balanced()
        raise AssertionError("actors and learner wait for each other")


@pytest.mark.parametrize("loaders", [0, 1, 2])
@pytest.mark.parametrize(("actors", "batch", "lag"), [(1, 1, 1), (1, 1, 3), (2, 2, 1), (3, 2, 2), (4, 1, 3)])
def test_a_learner_slower_than_its_actors_for_long(actors, batch, lag, loaders):
    """P49: the bound holds and is used, memory stays as it is, nothing is dropped: actors wait."""
    table = table_of(actors, batch, lag, loaders)
    crew, most, memory = Actors(table, actors), 0, set()
    for updates in range(1, 80):
        crew.run(updates, choose=lambda many: many - 1)
        most = max(most, len(crew.source.out))
        memory |= {id(each) for each in table._batcher._idle}
    assert max(crew.lags) == lag and crew.lags[-1] == lag
    assert most <= (lag + 1) * batch and len(memory) <= 2, "unrolls that were not given back, and batches"
    assert crew.dropped == 0 and crew.trained == list(range(79 * batch)), "first come, first trained"


@pytest.mark.parametrize("loaders", [0, 1, 2])
def test_an_unroll_that_is_too_old_for_its_turn_does_not_take_its_batch_with_it(loaders):
    """The third is one version old, and will be two when the second batch is trained on."""
    table, source = LagQueue(1, batch=2, max_lag=1, batcher=Batcher(loaders, 2)), Source()
    for version in (1, 1, 0, 1, 1):
        table.ordered(0, version)
        table.insert(source(0, version))
    for version, expected in ((1, [0, 1]), (2, [3, 4])):
        while (sample := table.next(version, 0.0)) is None:
            assert work(table._batcher), "there is nothing to wait for"
        assert codes(sample) == expected
        table.update(sample, None, version + 1)
    assert table.losses().dropped == {"too_old": steps_of(2)} and len(table) == 0 and not source.out


def test_a_batch_that_took_threads_too_long_is_dropped_and_counted():
    """Updates went on without it, on what a circular buffer keeps."""
    table, source = LagQueue(1, batch=2, max_lag=2, batcher=Batcher(1, 2)), Source()
    for _ in range(2):
        table.ordered(0, 0)
        table.insert(source())
    assert table.next(0, 0.0) is None and table.next(3, 0.0) is None and table.due
    assert work(table._batcher) and table.next(3, 0.0) is None
    assert not table.due and not source.out and len(table._batcher._idle) == 2
    assert table.losses().dropped == {"too_old": steps_of(0, 1)} and table.stats()["late_share"] == 1.0


@pytest.mark.parametrize("loaders", [0, 1, 2])
def test_a_slow_actor_loses_its_own_unrolls_and_nobody_elses(loaders):
    """Its unrolls come when they are too old, or will be when their turn comes; those beside them are trained on."""
    table = table_of(3, 2, 1, loaders)
    crew, slow = Actors(table, 3), 2
    for _ in range(800):
        if crew.version == 100:
            break
        crew.supply()
        while any(crew.orders[:slow]):
            crew.deliver(crew.first(slow))
            crew.supply()
        if crew.orders[slow] and crew.version - crew.orders[slow][0][1] > crew.version % 2:
            crew.deliver(slow)
        while work(crew.queue._batcher):
            pass
        crew.learn()
        crew.balanced()
    lost = set(range(crew.source.made)) - set(crew.trained) - crew.source.out
    assert max(crew.lags) == 1 and len(lost) > 20
    assert {crew.owner[code] for code in lost} == {slow}
    assert crew.dropped == steps_of(*lost) and table.stats()["late_share"] == len(lost) / (len(lost) + 200)


events = st.lists(
    st.tuples(st.sampled_from(["others", "others", "deliver", "learn", "learn", "learn", "fail"]), st.integers(0, 3)),
    min_size=30,  # long enough for an actor to become slow
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.integers(1, 3), events)
def test_loaders_change_nothing_about_what_is_trained_on_and_what_is_dropped(batch, lag, loaders, buffers, script):
    """Whatever the order in which actors deliver, against the same queue without loaders."""
    actors = min(3, (lag + 1) * batch)
    plain = Actors(LagQueue(actors, batch, lag), actors)
    ahead = Actors(LagQueue(actors, batch, lag, batcher=Batcher(loaders, buffers)), actors)
    for name, number in script:
        while plain.openings and plain.table.wants(plain.openings[0], True):
            actor = plain.openings.popleft()  # the same order for both; one of them may have dropped something earlier
            for crew in (plain, ahead):
                crew.order(actor)
        for crew in (plain, ahead):
            for actor in range(actors):
                if crew.orders[actor] and name in ("deliver", "others") and (name == "deliver") == (actor == number):
                    crew.deliver(actor)
            if name == "fail" and number == 0:
                crew.fail(0)
            if name == "learn":
                crew.learn()
        if name == "learn" and ahead.version < plain.version:
            while work(ahead.table._batcher, lambda many: many - 1):
                pass
            assert ahead.learn() is not None
        assert ahead.version == plain.version and ahead.trained == plain.trained and ahead.lags == plain.lags
        ahead.balanced()
        plain.balanced()
        assert len(ahead.table) <= len(plain.table), "what will be too old is dropped at once"
    assert max(plain.lags, default=0) <= lag


class Machine(RuleBasedStateMachine):
    """Anything in any order: actors that overtake each other, take newer weights, fail; loaders that are slow."""

    @initialize(
        actors=st.integers(1, 4), batch=st.integers(1, 3), lag=st.integers(1, 3), loaders=st.integers(0, 2),
        circular=st.sampled_from([None, None, (1, 1), (2, 2), (3, 1)]),
    )  # fmt: skip
    def begin(self, actors, batch, lag, loaders, circular):
        actors = min(actors, (lag + 1) * batch)
        self.crew = Actors(table_of(actors, batch, lag, loaders, circular), actors)
        self.bound, self.most, self.circular = lag, (lag + 1) * batch, circular
        self.newer = 0  # unrolls with newer weights than at their order: one that was given up may be in time
        if circular is not None:
            kept, uses = circular
            self.bound = (lag + kept) * uses
            entry, next_ = [], self.crew.queue.next
            self.entries = entry

            def watched(version: int, progress: float) -> Sample | None:
                if (sample := next_(version, progress)) is not None:
                    entry.append(version - int(sample.versions.min()))
                return sample

            self.crew.queue.next = watched

    @rule()
    def supply(self):
        self.crew.supply()

    @precondition(lambda self: any(self.crew.orders))
    @rule(data=st.data(), newer=st.sampled_from([0, 0, 1]))
    def deliver(self, data, newer):
        busy = [actor for actor, orders in enumerate(self.crew.orders) if orders]
        self.newer += newer
        self.crew.deliver(data.draw(st.sampled_from(busy)), newer)

    @rule(slow=st.integers(0, 3))
    def go_on_without(self, slow):
        """All others deliver what they were told to, and the learner takes it."""
        self.crew.supply()
        for actor in range(len(self.crew.orders)):
            while actor != slow and self.crew.orders[actor]:
                self.crew.deliver(actor)
        for _ in range(3):
            while work(self.crew.queue._batcher):
                pass
            self.crew.learn()

    @rule(actor=st.integers(0, 15))
    def fail(self, actor):
        if actor < len(self.crew.orders):
            self.crew.fail(actor)

    @rule(number=st.integers(0, 1))
    def work(self, number):
        work(self.crew.queue._batcher, lambda many: number % many)

    @rule()
    def learn(self):
        if not self.crew.queue._batcher.room and self.crew.queue._batcher._threads:
            work(self.crew.queue._batcher)
        self.crew.learn()

    @invariant()
    def nothing_is_lost_silently(self):
        if hasattr(self, "crew"):
            self.crew.balanced()
            lags = self.crew.lags if self.circular is None else self.entries
            assert max(lags, default=0) <= self.bound
            assert sorted(self.crew.trained) == sorted(set(self.crew.trained)), "trained on for the first time twice"

    @invariant()
    def what_was_not_given_back_waits(self):
        if hasattr(self, "crew"):
            assert len(self.crew.source.out) == len(self.crew.queue)
            most = self.most + self.newer
            assert len(self.crew.queue) + len(self.crew.queue._young) <= most, "no more than the bound"
            assert len(self.crew.source.out) <= len(self.crew.orders) * self.crew.table.ahead, "as many slots there are"


Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_machine = pytest.mark.usefixtures("hands")(Machine.TestCase)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 2), st.integers(0, 2), st.integers(1, 3), st.integers(1, 3),
    st.lists(st.integers(0, 4), min_size=20, max_size=40),
)  # fmt: skip
def test_a_circular_buffer_drops_nothing_of_actors_that_deliver_in_order(batch, lag, loaders, kept, uses, pauses):
    """However long the learner goes on with what it has, meanwhile: (lag + batches) * uses updates at most."""
    table = table_of(2, batch, lag, loaders, (kept, uses)) if (lag + 1) * batch >= 2 else None
    if table is None:
        return
    crew = Actors(table, 2)
    for deliveries in pauses:
        crew.supply()
        for _ in range(deliveries):
            if any(crew.orders):
                crew.deliver(crew.first())
        while work(crew.queue._batcher):
            pass
        while crew.learn() is not None and deliveries == 0:
            pass  # the actors are slow: everything is used up
        crew.balanced()
    assert table.queue.stats()["late_share"] == 0.0
