"""Trees of state survive JSON and safetensors unchanged, and what does not fit is refused by name."""

import math
import random

import msgspec
import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rookery.core.errors import CheckpointError
from rookery.storage import codec
from rookery.storage.codec import LONG, MAX_DEPTH, decode_tree, encode_tree


def through_disk(tree):
    """What a checkpoint does to a tree: the JSON part to text, the tensors to safetensors bytes, and back."""
    part, tensors = encode_tree(tree, "x")
    return decode_tree(
        msgspec.json.decode(msgspec.json.encode(part)), safetensors.torch.load(safetensors.torch.save(tensors))
    )


def same(a, b):
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    elif isinstance(a, np.ndarray):
        assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    elif isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b)
    elif isinstance(a, float):
        assert (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    else:
        assert a == b


numbers = ["bool", "uint8", "int8", "int16", "uint16", "int32", "int64", "uint64", "float16", "float32", "float64"]
arrays = st.sampled_from(numbers).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
scalars = st.none() | st.booleans() | st.integers() | st.integers(2**60, 2**200) | st.floats() | text | st.binary()
keys = text | st.integers() | st.tuples(st.integers(), text) | st.just("$int")
trees = st.recursive(
    scalars | arrays,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3) | st.tuples(inner, inner),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(trees)
def test_any_tree_comes_back_equal(tree):
    same(tree, through_disk(tree))


columns = st.sampled_from([st.integers(), st.floats(), st.booleans(), st.integers(-(2**62), 2**62), st.just(0.5)])
long = columns.flatmap(lambda one: st.lists(one, min_size=LONG - 2, max_size=LONG + 6))


@settings(max_examples=60, deadline=None)
@given(long | st.tuples(long, long).map(list), st.integers(1, 20))
def test_long_lists_come_back_as_lists_of_the_same_types(numbers, columns):
    width = max(1, len(numbers) // columns)
    for tree in (numbers, tuple(numbers), [numbers[at : at + width] for at in range(0, len(numbers), width)]):
        same(tree, through_disk(tree))
        same([tree, {"a": tree}], through_disk([tree, {"a": tree}]))


@pytest.mark.parametrize(
    "tree",
    [
        [0.25] * 100, [3] * 100, [True] * 100, tuple(range(100)), [[1, 2, 3]] * 50, [[[0.5]] * 4] * 20,
        "long text, ä" * 200, [np.float32(0.1)] * 100,
    ],
)  # fmt: skip
def test_long_lists_and_texts_are_not_json(tree):
    part, tensors = encode_tree(tree)
    assert len(tensors) == 1 and len(msgspec.json.encode(part)) < 40


@pytest.mark.parametrize(
    "tree",
    [
        [1] * 99 + [0.5], [0] * 99 + [False], [0.5] * 99 + [None], [2**64] * 100, [[1]] * 99 + [[1, 2]],
        [[1]] * 99 + [(1,)], [[]] * 100, [""] * 100, [np.uint64(2**63)] * 100,
    ],
)  # fmt: skip
def test_mixed_lists_keep_their_types(tree):
    same([item.item() if isinstance(item, np.generic) else item for item in tree], through_disk(tree))


def test_what_could_not_be_read_back_is_refused(monkeypatch):
    monkeypatch.setattr(codec, "MAX_ELEMENTS", 300)
    monkeypatch.setattr(codec, "MAX_LISTED", 1000)
    encode_tree([[]] * 299), encode_tree([[0] * 400, [1.5] * 600])
    with pytest.raises(CheckpointError, match="more than 300 values besides arrays"):
        encode_tree([[]] * 301)
    with pytest.raises(CheckpointError, match="more than 300 values besides arrays"):
        encode_tree([0] * 1001)
    with pytest.raises(CheckpointError, match="1,000 numbers in all"):
        encode_tree([[0] * 400, [1.5] * 601])
    with pytest.raises(CheckpointError, match="a list of 1001 numbers"):
        decode_tree({"$list": "a"}, {"a": torch.zeros(1001, dtype=torch.int64)})


def test_trees_as_they_were_stored_before_are_read():
    """Lists and text of any length used to be JSON."""
    part = {"a": list(range(100)), "b": "x" * 5000, "c": {"$tuple": [0.5] * 100}, "d": {"$dict": [[1, [2.5]]]}}
    same(decode_tree(part, {}), {"a": list(range(100)), "b": "x" * 5000, "c": (0.5,) * 100, "d": {1: [2.5]}})


@pytest.mark.parametrize("generator", [np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64])
def test_numpy_generators_continue_where_they_stopped(generator):
    rng = np.random.Generator(generator(7))
    rng.normal(size=5)
    rng.integers(0, 9, dtype=np.int32)  # leaves half a word in the generator's buffer
    copy = np.random.Generator(generator())
    copy.bit_generator.state = through_disk(rng.bit_generator.state)
    np.testing.assert_array_equal(copy.integers(0, 2**31, 50), rng.integers(0, 2**31, 50))


def test_python_and_torch_generators_continue_where_they_stopped():
    rng, copy = random.Random(3), random.Random()
    rng.gauss(0, 1)
    copy.setstate(through_disk(rng.getstate()))
    assert copy.gauss(0, 1) == rng.gauss(0, 1) and copy.random() == rng.random()
    torch_rng, torch_copy = torch.Generator().manual_seed(3), torch.Generator()
    torch_copy.set_state(through_disk(torch_rng.get_state()))
    assert torch.equal(torch.rand(9, generator=torch_rng), torch.rand(9, generator=torch_copy))


def test_restored_arrays_can_be_written_to():
    array = through_disk({"a": np.arange(3)})["a"]
    array += 1
    np.testing.assert_array_equal(array, [1, 2, 3])


def test_foreign_byte_order_keeps_its_values():
    np.testing.assert_array_equal(through_disk(np.arange(5, dtype=">i4")), np.arange(5))


@pytest.mark.parametrize(
    "bad", [object(), {1, 2}, np.array(["text"]), np.array([object()]), np.longdouble(1), lambda: 0]
)
def test_objects_are_refused_by_name(bad):
    with pytest.raises(CheckpointError, match="env/state"):
        encode_tree({"a": [bad]}, "env/state")


def test_a_tree_that_contains_itself_is_refused():
    loop: list = []
    loop.append(loop)
    with pytest.raises(CheckpointError, match=f"deeper than {MAX_DEPTH}"):
        encode_tree(loop)


HOSTILE_TENSORS = {
    "half": torch.zeros(1, dtype=torch.bfloat16),
    "number": torch.tensor(1),
    "bits": torch.full((3,), 255, dtype=torch.int64),
}


@pytest.mark.parametrize(
    "part",
    [
        {"$array": "not there"}, {"$array": ["x"]}, {"$int": "zz"}, {"$int": 5}, {"$float": "1"}, {"$float": []},
        {"$object": "os.system"}, {"$tuple": 3}, {"$dict": [[1]]}, {"$dict": [[[1], 2]]}, {"$int": "0x1", "b": 2},
        {"$bytes": None}, {"$array": "half"}, {"$list": "half"}, {"$list": "number"}, {"$list": 3}, {"$text": "bits"},
        {"$tuple": {"$array": "bits"}}, {"$tuple": {"$list": "nope"}}, [{"$list": "bits"}, {"$list": "bits"}],
        [{"$array": "bits"}, {"$bytes": "bits"}],
    ],
)  # fmt: skip
def test_a_malformed_tag_is_a_clean_error(part):
    with pytest.raises(CheckpointError, match="cannot be decoded"):
        decode_tree({"a": part}, HOSTILE_TENSORS)


def test_depth_is_bounded_when_reading():
    part: list = []
    for _ in range(MAX_DEPTH + 1):
        part = [part]
    with pytest.raises(CheckpointError, match="deeper"):
        decode_tree(part, {})
