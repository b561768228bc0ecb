"""Trees of arrays: shape kept, order kept, nothing copied that need not be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rookery.core import tree

names = st.text("abc.", min_size=1, max_size=3)
trees = st.recursive(st.integers(), lambda inner: st.dictionaries(names, inner, min_size=1, max_size=3), max_leaves=8)


@given(trees)
def test_map_keeps_the_shape_and_visits_leaves_in_order(a):
    seen = []
    doubled = tree.map(lambda x: seen.append(x) or 2 * x, a)
    assert seen == tree.leaves(a) and tree.leaves(doubled) == [2 * x for x in seen]
    assert tree.flatten(doubled, "r").keys() == tree.flatten(a, "r").keys()


@given(st.dictionaries(names, trees, min_size=1, max_size=3))
def test_flatten_and_unflatten_are_inverse(a):
    flat = tree.flatten(a)
    assert tree.unflatten(flat) == a
    assert list(flat.values()) == tree.leaves(a)


def test_paths():
    a = {"x": {"y": 1, "z": {"w": 2}}, "v": 3}
    assert tree.flatten(a) == {"x/y": 1, "x/z/w": 2, "v": 3}
    assert tree.flatten(a, "obs") == {"obs/x/y": 1, "obs/x/z/w": 2, "obs/v": 3}
    assert tree.flatten(5, "reward") == {"reward": 5} and tree.flatten({}, "state0") == {}


def test_map_goes_by_name_and_not_by_order():
    assert tree.map(lambda x, y: (x, y), {"a": 1, "b": 2}, {"b": 20, "a": 10}) == {"a": (1, 10), "b": (2, 20)}
    with pytest.raises(KeyError):
        tree.map(lambda x, y: x, {"a": 1}, {"b": 1})
    assert tree.map(lambda x: x, {}) == {}


def test_to_torch_is_a_view():
    a = {"x": np.zeros(3, np.float32), "y": {"z": np.zeros(2, bool)}}
    b = tree.to_torch(a)
    a["x"][1], a["y"]["z"][0] = 5, True
    assert b["x"].tolist() == [0, 5, 0] and b["y"]["z"].tolist() == [True, False]


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_concat_copies_along_an_axis(make):
    parts = [{"x": make([[1.0, 2.0]])}, {"x": make([[3.0, 4.0]])}]
    for axis, expected in ((0, [[1, 2], [3, 4]]), (1, [[1, 2, 3, 4]])):
        joined = tree.concat(parts, axis)
        assert joined["x"].tolist() == expected and type(joined["x"]) is type(parts[0]["x"])
    alone = tree.concat(parts[:1], 0)
    parts[0]["x"][0, 0] = 9
    assert alone["x"].tolist() == [[1, 2]], "one part is copied too"
    assert tree.concat([{}, {}], 1) == {}


@dataclass(frozen=True)
class Record:
    a: Any
    b: Any
    c: Any = None


def test_map_fields_leaves_none_and_skipped_fields_alone():
    record = Record({"x": 1, "y": 2}, 3)
    assert tree.map_fields(record, lambda x: -x) == Record({"x": -1, "y": -2}, -3, None)
    assert tree.map_fields(record, lambda x: -x, skip=("a",)) == Record({"x": 1, "y": 2}, -3)
    other = Record({"y": 20, "x": 10}, 30)
    assert tree.map_fields(record, lambda x, y: x + y, other) == Record({"x": 11, "y": 22}, 33)
    assert record == Record({"x": 1, "y": 2}, 3)
