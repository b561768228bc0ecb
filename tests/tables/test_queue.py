"""The queue: batches that do not depend on who came first, memory that is given back once and never read again."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from rookery.core import tree
from rookery.core.types import Unroll
from rookery.tables.queue import QueueTable

T, B = 4, 3


def unroll(actor: int, sequence: int = 0, recurrent: bool = True) -> Unroll:
    """Every number says where it belongs: actor, sequence, row, lane."""
    t, b = np.meshgrid(np.arange(T + 1), np.arange(B), indexing="ij")
    code = (10_000 * sequence + 1000 * actor + 10 * t + b).astype(np.float32)
    live = np.ones((T, B), bool)
    live[actor % T, 0] = False
    state = {"h": np.arange(2 * B * 5, dtype=np.float32).reshape(2, B, 5) + 1000 * actor} if recurrent else {}
    return Unroll(
        obs={"a": code, "b": np.stack([code, -code], -1).astype(np.int64)}, action=code[:-1].astype(np.int64),
        reward=code[:-1].copy(), terminated=code[:-1] % 2 == 0, truncated=code[:-1] % 3 == 0, live=live,
        logp=-code[:-1], state0=state, version=np.full(B, 7 + actor), lane=actor * B + np.arange(B),
        extras={"value": 2 * code[:-1]} if recurrent else {},
    )  # fmt: skip


def equal(a: Unroll, b: Unroll) -> bool:
    pairs = [
        (x, y)
        for field in dataclasses.fields(a)
        for x, y in zip(tree.leaves(getattr(a, field.name)), tree.leaves(getattr(b, field.name)), strict=True)
    ]
    return all(torch.equal(x, y) and x.dtype == y.dtype for x, y in pairs)


def test_a_batch_does_not_depend_on_the_order_of_arrival():
    """P101."""
    batches = []
    for order in itertools.permutations(range(4)):
        table = QueueTable(4)
        for actor in order:
            table.insert(unroll(actor), actor, 0)
        batches.append(table.sample())
    assert all(equal(batches[0], batch) for batch in batches[1:])


def test_a_batch_is_its_unrolls_side_by_side_in_the_order_of_the_actors():
    table = QueueTable(3)
    for actor in (2, 0, 1):
        table.insert(unroll(actor), actor, 0)
    batch = table.sample()
    assert batch.lane.tolist() == list(range(9))
    assert batch.version.tolist() == [7, 7, 7, 8, 8, 8, 9, 9, 9]
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
    table = QueueTable(1)
    one = dataclasses.replace(unroll(0), obs={"frame": np.full((T + 1, B, 2), 200, np.uint8)})
    table.insert(one, 0, 0)
    batch = table.sample()
    assert batch.obs["frame"].dtype == torch.uint8 and batch.live.dtype == torch.bool
    assert batch.action.dtype == torch.int64 and batch.reward.dtype == torch.float32


def test_older_unrolls_come_first():
    table = QueueTable(2)
    for actor, sequence in ((0, 4), (1, 4), (0, 3), (1, 3)):
        table.insert(unroll(actor, sequence), actor, sequence)
    assert table.sample().reward[0, 0] == 30_000 and table.sample().reward[0, 0] == 40_000
    assert len(table) == 0 and not table.can_sample()


def test_can_insert_and_can_sample_follow_the_number_of_unrolls():
    table = QueueTable(2)
    assert (table.can_insert(), table.can_sample(), len(table), table.steps) == (True, False, 0, 0)
    table.insert(unroll(1), 1, 0)
    assert (table.can_insert(), table.can_sample(), len(table), table.steps) == (True, False, 1, T * B - 1)
    table.insert(unroll(0), 0, 0)
    assert (table.can_insert(), table.can_sample(), len(table), table.steps) == (False, True, 2, 2 * (T * B - 1))
    table.sample()
    assert (table.can_insert(), table.can_sample(), len(table), table.steps) == (True, False, 0, 0)


def test_an_unroll_that_comes_twice_is_refused():
    table = QueueTable(3)
    table.insert(unroll(1), 1, 5)
    table.insert(unroll(1), 1, 6)  # another one of the same actor is not the same
    with pytest.raises(AssertionError, match="unroll 5 of actor 1 came twice"):
        table.insert(unroll(1), 1, 5)
    assert len(table) == 2


@pytest.mark.parametrize("unrolls", [1, 3])
@pytest.mark.parametrize("recurrent", [True, False])
def test_memory_is_released_once_after_it_was_copied_and_is_of_no_further_concern(unrolls, recurrent):
    """P96: every slot is poisoned in the moment it is given back."""
    table, clean, released = QueueTable(unrolls), QueueTable(unrolls), []
    for actor in range(unrolls):
        one = unroll(actor, recurrent=recurrent)

        def release(actor: int = actor, one: Unroll = one) -> None:
            released.append(actor)
            for leaf in (leaf for f in dataclasses.fields(one) for leaf in tree.leaves(getattr(one, f.name))):
                leaf.fill(True if leaf.dtype == bool else -42)

        table.insert(one, actor, 0, release)
        clean.insert(unroll(actor, recurrent=recurrent), actor, 0)
    assert not released, "not before the batch is taken"
    batch = table.sample()
    assert released == list(range(unrolls))
    assert equal(batch, clean.sample())
    assert released == list(range(unrolls))


def test_the_next_batch_may_use_the_same_memory():
    table, one = QueueTable(1), unroll(0)
    table.insert(one, 0, 0)
    first = table.sample()
    kept = first.reward.clone()
    one.reward[:] += 1
    table.insert(one, 0, 1)
    second = table.sample()
    assert torch.equal(first.reward, kept) and torch.equal(second.reward, kept + 1)


def test_a_batch_is_not_put_together_from_too_few_unrolls():
    table = QueueTable(2)
    table.insert(unroll(0), 0, 0)
    with pytest.raises(AssertionError):
        table.sample()
    assert len(table) == 1, "what waits is still there"


def test_a_batch_holds_one_unroll_of_every_actor():
    """Two of the same actor are not a batch: its lanes would be there twice, another's not at all."""
    table = QueueTable(2)
    table.insert(unroll(0, 0), 0, 0)
    table.insert(unroll(0, 1), 0, 1)
    assert not table.can_sample()
    table.insert(unroll(1, 0), 1, 0)
    assert table.can_sample()
    assert table.sample().lane.tolist() == list(range(2 * B))
