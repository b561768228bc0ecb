"""The queues: batches that do not depend on who came first, bounded lag, memory that is given back once."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from rookery.core import tree
from rookery.core.types import ActorReport, Delivery
from rookery.core.unroll import Unroll
from rookery.tables.queue import LagQueue, RoundQueue

T, B = 4, 3


def unroll(actor: int, sequence: int = 0, recurrent: bool = True, version: int | None = None) -> Unroll:
    """Every number says where it belongs: actor, sequence, row, lane."""
    t, b = np.meshgrid(np.arange(T + 1), np.arange(B), indexing="ij")
    code = (10_000 * sequence + 1000 * actor + 10 * t + b).astype(np.float32)
    live = np.ones((T, B), bool)
    live[actor % T, 0] = False
    state = {"h": np.arange(2 * B * 5, dtype=np.float32).reshape(2, B, 5) + 1000 * actor} if recurrent else {}
    return Unroll(
        obs={"a": code, "b": np.stack([code, -code], -1).astype(np.int64)}, action=code[:-1].astype(np.int64),
        reward=code[:-1].copy(), terminated=code[:-1] % 2 == 0, truncated=code[:-1] % 3 == 0, live=live,
        logp=-code[:-1], state0=state, version=np.full(B, 7 + actor if version is None else version),
        lane=actor * B + np.arange(B), extras={"value": 2 * code[:-1]} if recurrent else {},
    )  # fmt: skip


def delivery(actor: int, sequence: int = 0, release=lambda: None, one: Unroll | None = None, **more) -> Delivery:
    one = unroll(actor, sequence, **more) if one is None else one
    fields = {f.name: getattr(one, f.name) for f in dataclasses.fields(one)}
    arrays = {path: leaf for path, leaf in tree.flatten(fields).items() if isinstance(leaf, np.ndarray)}
    return Delivery(actor, sequence, arrays, ActorReport(T * B - 1), release)


def put(table: RoundQueue | LagQueue, *deliveries: Delivery, version: int = 0) -> None:
    for each in deliveries:
        table.ordered(each.actor, version)
        table.insert(each)


def equal(a: Unroll, b: Unroll) -> bool:
    pairs = [
        (x, y)
        for field in dataclasses.fields(a)
        if getattr(a, field.name) is not None
        for x, y in zip(tree.leaves(getattr(a, field.name)), tree.leaves(getattr(b, field.name)), strict=True)
    ]
    return all(torch.equal(x, y) and x.dtype == y.dtype for x, y in pairs)


# One unroll of every actor


def test_a_batch_does_not_depend_on_the_order_of_arrival():
    """P101."""
    batches = []
    for order in itertools.permutations(range(4)):
        table = RoundQueue(4)
        put(table, *map(delivery, order))
        batches.append(table.next(0, 0.0).batch)
    assert all(equal(batches[0], batch) for batch in batches[1:])


def test_a_batch_is_its_unrolls_side_by_side_in_the_order_of_the_actors():
    table = RoundQueue(3)
    put(table, *map(delivery, (2, 0, 1)))
    batch, versions, fresh, _ = table.next(0, 0.0)
    assert batch.lane.tolist() == list(range(9)) and fresh == 3 * (T * B - 1)
    assert batch.version.tolist() == versions.tolist() == [7, 7, 7, 8, 8, 8, 9, 9, 9]
    assert batch.obs["a"].shape == (T + 1, 9) and batch.obs["b"].shape == (T + 1, 9, 2)
    assert batch.state0["h"].shape == (2, 9, 5) and batch.extras["value"].shape == (T, 9)
    for actor in range(3):
        part, one = slice(actor * B, (actor + 1) * B), unroll(actor)
        for name in ("reward", "logp", "action", "terminated", "truncated", "live"):
            np.testing.assert_array_equal(getattr(batch, name)[:, part].numpy(), getattr(one, name), err_msg=name)
        np.testing.assert_array_equal(batch.obs["b"][:, part].numpy(), one.obs["b"])
        np.testing.assert_array_equal(batch.state0["h"][:, part].numpy(), one.state0["h"])
        np.testing.assert_array_equal(batch.extras["value"][:, part].numpy(), one.extras["value"])


def test_small_integers_and_flags_keep_their_type():
    table = RoundQueue(1)
    one = dataclasses.replace(unroll(0), obs={"frame": np.full((T + 1, B, 2), 200, np.uint8)})
    put(table, delivery(0, one=one))
    batch = table.next(0, 0.0).batch
    assert batch.obs["frame"].dtype == torch.uint8 and batch.live.dtype == torch.bool
    assert batch.action.dtype == torch.int64 and batch.reward.dtype == torch.float32


def test_a_round_wants_everyone_once_and_is_completed_though_no_other_follows():
    table = RoundQueue(2)
    assert table.wants(0, True) and table.wants(1, True) and not table.wants(0, False) and table.settled
    table.ordered(0, 0)
    assert not table.wants(0, True) and table.wants(1, True) and table.wants(1, False) and not table.settled
    table.insert(delivery(0))
    assert not table.wants(0, True) and table.wants(1, False), "the round has begun"
    assert (len(table), table.steps, table.due, table.next(0, 0.0)) == (1, T * B - 1, False, None)
    table.ordered(1, 0)
    assert table.patience > 0
    table.insert(delivery(1))
    assert (len(table), table.steps, table.due, table.patience) == (2, 2 * (T * B - 1), True, 0.0)
    assert not table.wants(0, True), "what waits is trained on first"
    assert table.next(0, 0.0) is not None
    assert (len(table), table.steps, table.due, table.settled) == (0, 0, False, True) and table.wants(0, True)


def test_an_actor_that_was_replaced_is_ordered_again():
    table = RoundQueue(2)
    put(table, delivery(0))
    table.ordered(1, 0)
    assert not table.wants(1, True)
    assert table.lost(1) == 0 and table.wants(1, True) and table.wants(1, False)


def test_an_unroll_that_was_not_ordered_is_refused():
    table = RoundQueue(3)
    put(table, delivery(1, 5))
    with pytest.raises(AssertionError, match="unroll 6 of actor 1 was not ordered"):
        table.insert(delivery(1, 6))
    assert len(table) == 1


@pytest.mark.parametrize("unrolls", [1, 3])
@pytest.mark.parametrize("recurrent", [True, False])
def test_memory_is_released_once_after_it_was_copied_and_is_of_no_further_concern(unrolls, recurrent):
    """P96: every slot is poisoned in the moment it is given back."""
    table, clean, released = RoundQueue(unrolls), RoundQueue(unrolls), []
    for actor in range(unrolls):
        one = unroll(actor, recurrent=recurrent)

        def release(actor: int = actor, one: Unroll = one) -> None:
            released.append(actor)
            for leaf in (leaf for f in dataclasses.fields(one) for leaf in tree.leaves(getattr(one, f.name))):
                if leaf is not None:
                    leaf.fill(True if leaf.dtype == bool else -42)

        put(table, delivery(actor, 0, release, one))
        put(clean, delivery(actor, recurrent=recurrent))
    assert not released, "not before the batch is taken"
    batch = table.next(0, 0.0).batch
    assert released == list(range(unrolls))
    assert equal(batch, clean.next(0, 0.0).batch)
    assert released == list(range(unrolls))


def test_the_next_batch_may_use_the_same_memory():
    table, one = RoundQueue(1), unroll(0)
    put(table, delivery(0, one=one))
    first = table.next(0, 0.0).batch
    kept = first.reward.clone()
    one.reward[:] += 1
    put(table, delivery(0, 1, one=one))
    second = table.next(0, 0.0).batch
    assert torch.equal(first.reward, kept) and torch.equal(second.reward, kept + 1)


# With lag


def lanes(sample) -> list[int]:
    """The actors of a batch, in its order."""
    return [lane // B for lane in sample.batch.lane.tolist()[::B]]


def test_with_lag_the_first_that_come_are_trained_first():
    table = LagQueue(4, batch=2, max_lag=3)
    put(table, delivery(3, version=0), delivery(1, version=0), delivery(3, 1, version=0), delivery(0, version=0))
    assert lanes(table.next(0, 0.0)) == [3, 1] and lanes(table.next(1, 0.0)) == [3, 0]
    assert table.next(2, 0.0) is None


@pytest.mark.parametrize(("batch", "max_lag"), [(1, 1), (2, 1), (2, 3), (4, 2)])
def test_no_batch_is_older_than_the_bound_and_nothing_is_dropped_if_actors_are_equally_fast(batch, max_lag):
    """As many unrolls are ordered as the table wants; the actors deliver in the order of the orders."""
    table, ordered, version, oldest = LagQueue(4, batch, max_lag), [], 0, 0
    for _ in range(50):
        for actor in range(4):
            if table.wants(actor, True):
                table.ordered(actor, version)
                ordered.append((actor, version))
        assert len(ordered) + len(table) <= (max_lag + 1) * batch
        actor, acted = ordered.pop(0)
        table.insert(delivery(actor, version=acted))
        if (sample := table.next(version, 0.0)) is not None:
            oldest = max(oldest, version - int(sample.versions.min()))
            version += 1
    assert oldest == max_lag, "the bound is used, and kept"
    assert table.losses().dropped == {}


def test_what_is_too_old_is_dropped_counted_and_given_back():
    table, released = LagQueue(3, batch=2, max_lag=1), []
    slow = delivery(0, version=0, release=lambda: released.append(0))
    table.ordered(0, 0)
    for version in range(3):
        put(table, delivery(1, version, version=version), delivery(2, version, version=version), version=version)
        assert table.next(version, 0.0) is not None
    assert table.next(3, 0.0) is None
    table.insert(slow)
    assert len(table) == 0 and released == [0], "three versions old, and one is allowed"
    put(table, delivery(1, 9, version=2, release=lambda: released.append(1)), version=2)
    assert len(table) == 1 and table.next(3, 0.0) is None
    assert table.next(4, 0.0) is None and released == [0, 1], "it became too old while it waited"
    losses = table.losses()
    assert losses.dropped == {"too_old": 2 * (T * B - 1)} and losses.evicted == 0
    assert table.losses().dropped == {}, "told once"


def test_a_slow_actor_does_not_stop_the_others():
    """It holds an order for ever; batches go on, also when its order has become older than the bound."""
    table, trained = LagQueue(3, batch=2, max_lag=1), 0
    table.ordered(0, 0)
    for version in range(20):
        for actor in (1, 2):
            assert table.wants(actor, True), version
            put(table, delivery(actor, version, version=version), version=version)
        trained += table.next(version, 0.0) is not None
    assert trained == 20


def test_orders_that_have_become_too_old_make_room_for_others():
    """Two actors hold their orders for ever, and later two more: each pair is half of the bound."""
    table = LagQueue(6, batch=2, max_lag=1)
    for version in range(8):
        for slow in {0: (0, 1), 4: (2, 3)}.get(version, ()):
            assert table.wants(slow, True), version
            table.ordered(slow, version)
        for actor in (4, 5):
            assert table.wants(actor, True), version
            put(table, delivery(actor, version, version=version), version=version)
        assert table.next(version, 0.0) is not None


def test_a_replaced_actor_has_no_orders_left():
    table = LagQueue(2, batch=2, max_lag=1)
    for actor in (0, 0, 1, 1):
        table.ordered(actor, 0)
    assert not table.wants(0, True), "four are ordered: two batches"
    assert table.lost(0) == 0 and table.wants(1, True)
    put(table, delivery(0, version=0), delivery(0, 1, version=0))
    assert lanes(table.next(0, 0.0)) == [0, 0] and not table.wants(0, False)
