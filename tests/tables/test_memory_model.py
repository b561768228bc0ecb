"""The replay table against a plain dict of items in any order of operations, and again after it was restored."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support_memory import REMOVERS, SPECS, Model, filled, kinds, memories, operations, put, tensors_of
from support_parcels import replay

from rookery.core import tree
from rookery.core.errors import CheckpointError
from rookery.storage.codec import decode_tree, encode_tree
from rookery.tables.memory import Drawn, ReplayMemory


@pytest.mark.parametrize("remover", REMOVERS)
@settings(max_examples=150, deadline=None)
@given(memories, kinds, st.sampled_from(list(SPECS)), operations)
def test_a_table_is_what_a_list_of_items_would_be(remover, memory, kind, spec, todo):
    spec = "vector" if remover == "inverse" else spec
    model = Model(replay(**kind, **memory, remover=remover), SPECS[spec])
    for name, *arguments in todo:
        getattr(model, name)(*arguments)
        model.check()


def twin(table: ReplayMemory, fresh: ReplayMemory) -> ReplayMemory:
    """A copy of a table by way of what a checkpoint would hold."""
    part, tensors = encode_tree(table.state())
    for name, array in table.arrays().items():
        used = table.used()[name]
        fresh.arrays()[name][:used] = array[:used]
    fresh.load(decode_tree(part, tensors))
    return fresh


@pytest.mark.parametrize("remover", REMOVERS)
@settings(max_examples=60, deadline=None)
@given(memories, kinds, st.sampled_from(list(SPECS)), operations, operations)
def test_a_restored_table_goes_on_bit_by_bit(remover, memory, kind, spec, before, after):
    spec = SPECS["vector" if remover == "inverse" else spec]
    plan = replay(**kind, **memory, remover=remover)
    first, second = Model(plan, spec), Model(plan, spec)
    for name, *arguments in before:
        getattr(first, name)(*arguments)
        if name in ("insert", "forget"):
            getattr(second, name)(*arguments)  # brings its makers to the same point
    second.table = twin(first.table, first.new_table(9))
    second.items = {id: dict(item) for id, item in first.items.items()}
    second.counts, second.largest = dict(first.counts), first.largest
    second.drawn, second.next_id = list(first.drawn), first.next_id
    for name, *arguments in after:
        results = [getattr(model, name)(*arguments) for model in (first, second)]
        for model in (first, second):
            model.check()
        if results[0] is not None:
            assert_same(*results)
    assert first.table.stats() == second.table.stats()
    states = [encode_tree(model.table.state()) for model in (first, second)]
    assert states[0][0] == states[1][0]
    assert all(torch.equal(tensor, states[1][1][name]) for name, tensor in states[0][1].items())


def assert_same(one: Drawn, other: Drawn) -> None:
    assert one.fresh == other.fresh
    assert np.array_equal(one.keys.id, other.keys.id) and np.array_equal(one.keys.slot, other.keys.slot)
    for a, b in zip(tensors_of(one.batch), tensors_of(other.batch), strict=True):
        assert a.numpy().tobytes() == b.numpy().tobytes()


def test_the_state_does_not_change_when_the_table_goes_on():
    plan = replay(capacity=8, batch=4, sampler="proportional", remover="soft")
    table = filled(plan, [1.0] * 6, batches=1)
    state = table.state()
    part, tensors = encode_tree(state)
    for _ in range(3):
        put(table, plan, [1.0] * 6)
        table.update(table.sample().keys, np.full(4, 8.0))
        table.remove_to_fit()
    later, tensors_later = encode_tree(state)
    assert later == part and all(torch.equal(tensors[name], tensors_later[name]) for name in tensors)


def test_the_state_of_another_memory_is_refused():
    state = filled(replay(capacity=8), [1.0] * 3).state()
    with pytest.raises(CheckpointError, match="expected"):
        filled(replay(capacity=9), [1.0] * 3).load(state)
    with pytest.raises(CheckpointError, match="does not fit"):
        filled(replay(capacity=8, sampler="proportional"), [1.0] * 3).load(state)


def test_the_hook_is_called_before_rows_change():
    plan = replay(capacity=8)
    table, seen = filled(plan, [1.0] * 6), []
    assert table.before_write is None
    records = table.arrays()["records"]

    def hook(name, rows):
        if name == "records":
            seen.append((rows, records[rows].any()))

    table.before_write = hook
    put(table, plan, [1.0] * 4)
    assert seen == [(slice(6, 8), False), (slice(0, 2), True)]
    table.before_write = None
    put(table, plan, [1.0] * 4)
    assert len(seen) == 2


@pytest.mark.parametrize("remover", REMOVERS)
@settings(max_examples=60, deadline=None)
@given(memories, kinds, st.sampled_from(list(SPECS)), operations, operations)
def test_every_change_of_a_vector_is_announced(remover, memory, kind, spec, before, after):
    """What was announced, as it was then, and the rest as it is now, are the vectors then."""
    spec = "vector" if remover == "inverse" else spec
    model = Model(replay(**kind, **memory, remover=remover), SPECS[spec])
    for name, *arguments in before:
        getattr(model, name)(*arguments)
    vectors = model.table.vectors()  # views, as long as they are now
    moment, announced = {path: vector.copy() for path, vector in vectors.items()}, {}

    def hook(name, rows):
        if name in vectors:
            rows = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
            for row in rows[rows < len(vectors[name])].tolist():
                announced.setdefault((name, row), vectors[name][row])

    model.table.before_write = hook
    for name, *arguments in after:
        getattr(model, name)(*arguments)
    model.table.settle()
    now = {path: vector.copy() for path, vector in vectors.items()}
    for (path, row), value in announced.items():
        now[path][row] = value
    for path, vector in moment.items():
        np.testing.assert_array_equal(now[path], vector, err_msg=path)


def test_numbers_and_vectors_are_the_state():
    table = filled(replay(capacity=8, sampler="rank", remover="inverse"), [1.0] * 6, batches=1)
    numbers, vectors, state = table.numbers(), table.vectors(), table.state()
    assert set(vectors) == {"store/ids", "store/free", "sampler/key", "remover/leaf", "priority", "waiting"}
    assert all(not isinstance(leaf, np.ndarray) or leaf.size < 5 for leaf in tree.leaves(numbers))
    flat = tree.flatten(state)
    assert all(np.array_equal(flat.pop(path), vector) for path, vector in vectors.items())
    assert flat.keys() == tree.flatten(numbers).keys() - {"sampler", "remover"}
