"""Copies around the cache: the same bytes as any other copy, of every size, and not one byte beside them."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support_memory import Model, table_of
from support_parcels import STACKED, replay

from rookery.tables.fast import kernel, stream

UNTOUCHED = 201


def copied(frames: np.ndarray, rows: np.ndarray, offset: int) -> tuple[np.ndarray, np.ndarray]:
    """What `copy` gives if this is large, and the memory around it; `offset`: from a place that can be streamed to."""
    size = rows.size * frames.shape[1]
    memory = np.full(size + 128, UNTOUCHED, np.uint8)
    begin = 32 + -memory.ctypes.data % 16 + offset
    out = memory[begin : begin + size].reshape(rows.size, frames.shape[1])
    with mock.patch.object(stream, "LARGE", 0):
        stream.copy(frames, rows, out)
    return out.copy(), np.concatenate([memory[:begin], memory[begin + size :]])


@settings(deadline=None)  # the first example may have to be compiled for
@given(st.integers(1, 70), st.integers(1, 3), st.integers(0, 6), st.sampled_from([0, 0, 0, 5, 15]), st.randoms())
def test_every_size_and_place(size, arrays, each, offset, random):
    rng = np.random.default_rng(random.getrandbits(32))
    frames = rng.integers(0, 200, (9, size), np.uint8)
    rows = rng.integers(0, 9, (arrays, each), np.int32)
    out, around = copied(frames, rows, offset)
    np.testing.assert_array_equal(out, frames[rows.ravel()])
    assert (around == UNTOUCHED).all()


def test_a_row_that_is_not_there_reads_no_other_memory():
    frames = np.arange(8, dtype=np.uint8)[:, None] * np.ones(33, np.uint8)
    rows = np.array([[-1, 8, -(2**31), 2**31 - 1, 7]], np.int32)
    for offset in (0, 1):  # streamed, and not
        assert copied(frames, rows, offset)[0][:, 32].tolist() == [0, 7, 0, 7, 7]


@pytest.mark.parametrize("large", [0, stream.LARGE])
@pytest.mark.parametrize("compress", [False, True])
def test_batches_of_a_memory_are_the_same_bytes(large, compress, monkeypatch):
    monkeypatch.setattr(stream, "LARGE", large)
    model = Model(replay(capacity=16, batch=9, n_step=2, compress=compress), STACKED)
    for actor in (0, 1, 0, 0, 1, 1):
        model.insert(actor, 4, 6, [1.0] * 4)
        model.sample(0.0)  # compares with what went in


def test_large_batches_are_streamed_and_small_ones_are_not(monkeypatch):
    streamed = []
    monkeypatch.setattr(stream, "_streaming", lambda: lambda frames, size, rows, out: streamed.append(len(out)))
    frames = np.zeros((2, 1 << 10), np.uint8)
    for count in (stream.LARGE // 1024 - 1, stream.LARGE // 1024):
        stream.copy(frames, np.zeros((1, count), np.int32), np.empty((count, 1 << 10), np.uint8))
    assert streamed == [stream.LARGE]


@pytest.mark.parametrize("batch, streamed", [(stream.LARGE // 60, False), (stream.LARGE // 60 + 1, True)])
def test_compiled_when_the_memory_is_made_if_its_batches_are_large(batch, streamed):
    assert kernel.numba() is not None, "the tests need the extra `fast`"
    kernel.compiled.cache_clear()
    table_of(replay(capacity=8, batch=batch, sampler="uniform"), STACKED)  # two stacks of three frames of 10 bytes
    assert kernel.compiled.cache_info().currsize == streamed


def test_streaming_stores_and_a_fence_and_other_threads_go_on():
    assert stream._streaming().targetoptions["nogil"]
    fresh = kernel.numba().njit(stream._SIGNATURE)(stream._copy)  # numba cannot look into code that it has kept
    (code,) = fresh.inspect_llvm().values()
    assert "!nontemporal" in code and "fence seq_cst" in code


def test_without_numba_it_is_an_ordinary_copy(monkeypatch):
    monkeypatch.setattr(kernel, "numba", lambda: None)
    frames = np.arange(8, dtype=np.uint8)[:, None] * np.ones(33, np.uint8)
    assert copied(frames, np.array([[3, 5]], np.int32), 0)[0][:, 32].tolist() == [3, 5]
