"""States of actors on their way between processes."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays, scalar_dtypes

from rookery.core.errors import CheckpointError
from rookery.crews.states import pack_state, unpack_state


def travelled(state):
    return unpack_state(msgspec.msgpack.decode(msgspec.msgpack.encode(pack_state(state))))


def same(a, b) -> bool:
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(same(x, y) for x, y in zip(a, b))
    return type(a) is type(b) and (a == b or (a != a and b != b))


dtypes = scalar_dtypes().filter(lambda d: d.kind in "biuf" and d.itemsize <= 8 and d.isnative)
leaves = (
    st.none() | st.booleans() | st.floats() | st.text(st.characters(exclude_categories=["Cs"])) | st.binary()
    | st.integers(-(2**200), 2**200) | arrays(dtypes, array_shapes(min_dims=0, min_side=0, max_side=4))
)  # fmt: skip
trees = st.recursive(leaves, lambda inner: st.lists(inner) | st.tuples(inner) | st.dictionaries(st.integers(), inner))


@given(trees)
def test_states_come_back_as_they_were(state):
    assert same(state, travelled(state))


def test_a_random_generator_survives_and_arrays_can_be_written():
    rng = np.random.default_rng(5)
    rng.standard_normal(3)
    back = travelled({"generator": rng.bit_generator.state, "obs": np.arange(12).reshape(3, 4).T})
    other = np.random.default_rng(0)
    other.bit_generator.state = back["generator"]
    assert other.standard_normal(10).tolist() == rng.standard_normal(10).tolist()
    back["obs"][0] = 7
    assert back["obs"].shape == (4, 3)


@pytest.mark.parametrize("leaf", [object(), {1, 2}, np.array([object()]), np.array(["a"])])
def test_what_cannot_be_stored_cannot_travel(leaf):
    with pytest.raises(CheckpointError):
        pack_state({"env": [leaf]})


HOSTILE = [
    ("|O", (1,), b"12345678"),
    ("<f4", (2,), b"1234"),
    ("<f4", (-1,), b"1234"),
    ("<f4", (1 << 62, 1 << 62), b""),
    ("<f4", (5,), b""),
    ("V8", (1,), b"12345678"),
    ("f4,i4", (1,), b"12345678"),
    ("no such", (1,), b"1"),
]


@pytest.mark.parametrize("body", HOSTILE)
def test_forged_arrays_are_refused(body):
    with pytest.raises(ValueError):
        unpack_state({"tree": {"$array": "tree/0"}, "arrays": {"tree/0": body}})
