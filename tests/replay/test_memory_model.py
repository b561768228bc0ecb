"""The replay table against a plain dict of items in any order of operations, and again after it was restored."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support_memory import REMOVERS, SAMPLERS, SPECS, Model, filled, put, tensors_of
from support_parcels import replay

from rookery.codec import decode_tree, encode_tree
from rookery.errors import CheckpointError
from rookery.replay.memory import ReplayTable, Sample

priority = st.floats(2**-10, 2**10, width=32)

operation = st.one_of(
    st.tuples(
        st.just("insert"), st.integers(0, 1), st.integers(0, 4), st.integers(0, 6),
        st.lists(st.one_of(st.just(float("nan")), priority), min_size=4, max_size=4),
    ),
    st.tuples(st.just("sample"), st.floats(0, 1.2)),
    st.tuples(st.just("update"), st.integers(0, 3), st.lists(priority, min_size=1, max_size=5)),
    st.just(("remove_to_fit",)),
    st.tuples(st.just("forget"), st.integers(0, 1)),
)  # fmt: skip

operations = st.lists(operation, max_size=40)

memories = st.fixed_dictionaries({
    "sampler": st.sampled_from(SAMPLERS), "capacity": st.integers(1, 12), "batch": st.integers(1, 9),
    "start": st.sampled_from(["max", "actor"]), "weights": st.sampled_from(["batch", "memory", "raw"]),
    "beta_end": st.sampled_from([None, 1.0]), "alpha": st.sampled_from([0.0, 0.6, 1.0]), "compress": st.booleans(),
})  # fmt: skip

kinds = st.sampled_from([{"n_step": 2}, {"sequence": 3, "burn_in": 1, "overlap": 1}])


@pytest.mark.parametrize("remover", REMOVERS)
@settings(max_examples=150, deadline=None)
@given(memories, kinds, st.sampled_from(list(SPECS)), operations)
def test_a_table_is_what_a_list_of_items_would_be(remover, memory, kind, spec, todo):
    spec = "vector" if remover == "inverse" else spec
    model = Model(replay(**kind, **memory, remover=remover), SPECS[spec])
    for name, *arguments in todo:
        getattr(model, name)(*arguments)
        model.check()


def twin(table: ReplayTable, fresh: ReplayTable) -> ReplayTable:
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


def assert_same(one: Sample, other: Sample) -> None:
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
    table.before_write = lambda name, first, count: seen.append((name, first, count, records[first].any()))
    put(table, plan, [1.0] * 4)
    assert seen == [("records", 6, 2, False), ("records", 0, 2, True)]
    table.before_write = None
    put(table, plan, [1.0] * 4)
    assert len(seen) == 2
