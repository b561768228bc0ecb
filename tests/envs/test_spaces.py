"""Spaces: what observations and actions become, which are refused, and what is caught on the way (users.md item 14)."""

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector.utils import batch_space
from hypothesis import given
from hypothesis import strategies as st

from rookery.core.errors import UsageError
from rookery.core.types import Leaf
from rookery.envs.lanes import SyncLanes
from rookery.envs.spaces import Actions, Mismatch, Observations


def box(shape, dtype=np.float32, low=-1, high=1):
    return spaces.Box(low, high, shape, dtype)


def leaf(space):
    (only,) = Observations(space, "env").leaves.values()
    return only


@pytest.mark.parametrize(
    "space, expected",
    [
        (box((4,)), Leaf((4,), "float32", "vector")),
        (box((4,), np.float64), Leaf((4,), "float32", "vector")),
        (box((2, 5)), Leaf((2, 5), "float32", "vector")),  # two axes of floats: a table, not a picture
        (box((4,), np.int32, -5, 5), Leaf((4,), "float32", "vector")),
        (box((128,), np.uint8, 0, 255), Leaf((128,), "float32", "vector")),  # memory of a machine
        (box((84, 84), np.uint8, 0, 255), Leaf((84, 84), "uint8", "image")),
        (box((7, 7, 3), np.uint8, 0, 255), Leaf((7, 7, 3), "uint8", "image")),
        (box((4, 84, 84), np.uint8, 0, 255), Leaf((4, 84, 84), "uint8", "image")),
        (box((32, 32, 3)), Leaf((32, 32, 3), "float32", "image")),
        (box((2, 3, 4)), Leaf((2, 3, 4), "float32", "vector")),  # three axes, but nothing to convolve over
        (box((30, 5, 30)), Leaf((30, 5, 30), "float32", "vector")),  # no channels at either end
        (spaces.Discrete(5, start=3), Leaf((), "int64", "discrete", 5, starts=(3,))),
        (spaces.MultiBinary(6), Leaf((6,), "float32", "vector")),
        (spaces.MultiBinary((2, 3)), Leaf((2, 3), "float32", "vector")),
        (spaces.MultiDiscrete([3, 2]), Leaf((2,), "uint8", "multi", counts=(3, 2))),
        (spaces.MultiDiscrete([[3, 256]]), Leaf((1, 2), "uint8", "multi", counts=(3, 256))),
        (spaces.MultiDiscrete([3, 257], start=[0, -4]), Leaf((2,), "int16", "multi", counts=(3, 257), starts=(0, -4))),
        (spaces.MultiDiscrete([2, 40_000]), Leaf((2,), "int32", "multi", counts=(2, 40_000))),
    ],
)
def test_kinds_of_observation(space, expected):
    assert leaf(space) == expected


def test_dictionaries_are_joined_by_dots():
    space = spaces.Dict({"a": box((2,)), "b": spaces.Dict({"walker/speed": box((3,)), "goal": spaces.Discrete(4)})})
    observations = Observations(space, "env")
    assert set(observations.leaves) == {"a", "b.walker.speed", "b.goal"}
    out = observations.allocate(2)
    observations.write({"a": np.ones(2), "b": {"walker/speed": np.full(3, 2.0), "goal": np.int64(3)}}, out, 1)
    assert out["a"].tolist() == [[0, 0], [1, 1]] and out["b.walker.speed"][1].tolist() == [2, 2, 2]
    assert out["b.goal"].tolist() == [0, 3]


def test_names_that_fall_together_are_refused():
    space = spaces.Dict({"a.b": box((2,)), "a": spaces.Dict({"b": box((2,))})})
    with pytest.raises(UsageError, match=r"a\.b"):
        Observations(space, "env")


def test_tuples_are_counted_and_joined_by_dots():
    space = spaces.Tuple(
        [box((2,)), spaces.Dict({"a": spaces.Tuple([spaces.Discrete(3), spaces.MultiDiscrete([2, 4])])})]
    )
    observations = Observations(space, "env")
    assert list(observations.leaves) == ["0", "1.a.0", "1.a.1"]
    out = observations.allocate(2)
    observations.write((np.ones(2), {"a": (2, np.array([1, 3]))}), out, 1)
    assert out["0"][1].tolist() == [1, 1] and out["1.a.0"].tolist() == [0, 2] and out["1.a.1"][1].tolist() == [1, 3]
    with pytest.raises(Mismatch, match=r"without '1\.a\.1'"):
        observations.write((np.ones(2), {"a": (2,)}), out, 0)


class Strange(spaces.Space):
    pass


@pytest.mark.parametrize(
    "space, name, way_out",
    [
        (spaces.Text(5), "observation is a Text", "one integer per character"),
        (spaces.Sequence(box((2,))), "observation is a Sequence", "pad it to the largest size"),
        (spaces.Dict({"a": box((2,)), "b": spaces.Graph(box((2,)), None)}), "observation 'b' is a Graph", "pad it"),
        (spaces.Tuple([box((2,)), spaces.OneOf([box((2,))])]), "observation '1' is a OneOf", "Dict of all"),
        (Strange(), "observation is a Strange", "turn it into one of these"),
        (spaces.MultiDiscrete(np.full((300, 300), 2)), "MultiDiscrete observation 'obs' has 90000", "Box of integers"),
    ],
)
def test_other_observations_are_refused_with_the_way_out(space, name, way_out):
    with pytest.raises(UsageError, match=rf"env: .*{name}.*{way_out}.*ObservationWrapper.*package\.module:factory"):
        Observations(space, "env")


@pytest.mark.parametrize("space", [spaces.Dict({}), spaces.Tuple([]), spaces.Dict({"a": spaces.Tuple([])})])
def test_an_observation_without_entries_is_refused(space):
    with pytest.raises(UsageError, match="has no entries"):
        Observations(space, "env")


@given(st.integers(0, 2**32))
def test_a_batch_reads_as_its_environments_write(seed):
    """The two ways in, one by one and as a batch, agree for every kind of leaf."""
    space = spaces.Dict(
        {"v": box((2, 3), np.float64), "i": box((3, 8, 8), np.uint8, 0, 255), "d": spaces.Discrete(3, start=-1),
         "m": spaces.MultiBinary(4), "n": spaces.Dict({"s": box((), np.float32)}),
         "t": spaces.Tuple([spaces.MultiDiscrete([[3, 2], [300, 4]], start=[[0, -2], [7, 1]]),
                            spaces.MultiBinary((2, 2)), spaces.Tuple([spaces.Discrete(4, start=2)])])}
    )  # fmt: skip
    observations = Observations(space, "env")
    batched = batch_space(space, 3)
    batched.seed(seed)
    batch = batched.sample()
    one_by_one = observations.allocate(3)
    for lane, single in enumerate(gymnasium.vector.utils.iterate(batched, batch)):
        observations.write(single, one_by_one, lane)
    whole = observations.read(batch, observations.allocate(3), 3)
    assert whole.keys() == one_by_one.keys()
    for name, array in whole.items():
        assert array.dtype == one_by_one[name].dtype == observations.leaves[name].dtype
        assert np.array_equal(array, one_by_one[name])


def test_an_integer_outside_its_space_is_caught():
    observations = Observations(spaces.Discrete(3, start=1), "env")
    out = observations.allocate(1)
    observations.write(3, out, 0)
    assert out["obs"].tolist() == [2]
    for wrong in (0, 4):
        with pytest.raises(Mismatch, match="outside its space, 1 to 3"):
            observations.write(wrong, out, 0)


@pytest.mark.parametrize("wrong, said", [
    ([[4, 1], [0, 9]], r"\[0, 0\] is 1 to 3: 4"), ([[1, 2], [0, 9]], r"\[0, 1\] is 0 to 1: 2"),
    ([[1, 1], [0, 8]], r"\[1, 1\] is 9 to 11: 8"), ([[1, -1], [0, 9]], r"\[0, 1\] is 0 to 1: -1"),
])  # fmt: skip
def test_one_of_several_integers_outside_its_space_is_caught(wrong, said):
    space = spaces.Dict({"m": spaces.MultiDiscrete([[3, 2], [1, 3]], start=[[1, 0], [0, 9]])})
    observations = Observations(space, "env")
    out, right = observations.allocate(1), [[3, 0], [0, 11]]
    observations.write({"m": right}, out, 0)
    assert out["m"].tolist() == [[[2, 0], [0, 2]]]
    with pytest.raises(Mismatch, match=f"observation 'm' outside its space, {said}"):
        observations.write({"m": wrong}, out, 0)
    with pytest.raises(Mismatch, match=said):
        observations.read({"m": np.array([right, wrong])}, observations.allocate(2), 2)


def test_frames_of_floats_are_not_cut_to_bytes():
    observations = Observations(box((8, 8), np.uint8, 0, 255), "env")
    with pytest.raises(Mismatch, match="dtype float64, expected uint8"):
        observations.write(np.zeros((8, 8)), observations.allocate(1), 0)


def test_a_missing_key_is_named():
    observations = Observations(spaces.Dict({"a": box((2,)), "b": box((2,))}), "env")
    with pytest.raises(Mismatch, match="without 'b'"):
        observations.write({"a": np.zeros(2)}, observations.allocate(1), 0)


def test_discrete_actions_count_from_the_spaces_start():
    actions = Actions(spaces.Discrete(3, start=5), "env")
    assert (actions.spec.kind, actions.spec.choices) == ("discrete", (3,))
    assert actions.batch(np.array([0, 2])).tolist() == [5, 7]


def test_branches():
    actions = Actions(spaces.MultiDiscrete([3, 2], start=[0, 10]), "env")
    assert (actions.spec.kind, actions.spec.choices, actions.spec.shape) == ("multi", (3, 2), (2,))
    assert actions.batch(np.array([[2, 1], [0, 0]])).tolist() == [[2, 11], [0, 10]]
    binary = Actions(spaces.MultiBinary(3), "env")
    assert (binary.spec.kind, binary.spec.choices) == ("multi", (2, 2, 2))
    sent = binary.batch(np.array([[1, 0, 1]]))
    assert sent.dtype == np.int8 and spaces.MultiBinary(3).contains(sent[0])


def test_bounded_boxes_are_mapped_from_minus_one_to_one():
    space = spaces.Box(np.array([-2, 0], np.float32), np.array([2, 10], np.float32))
    sent = Actions(space, "env").batch(np.array([[-1, -1], [0, 0], [1, 1], [-9, 9]], np.float32))
    assert sent.tolist() == [[-2, 0], [0, 5], [2, 10], [-2, 10]] and sent.dtype == np.float32


def test_unbounded_dimensions_pass_raw_and_keep_the_bound_they_have():
    largest = np.finfo(np.float32).max
    space = spaces.Box(np.array([-np.inf, 0, -largest, -1]), np.array([np.inf, np.inf, largest, 1]), dtype=np.float64)
    actions = Actions(space, "env")
    assert actions.spec.low == (None, 0.0, None, -1.0) and actions.spec.high == (None, None, None, 1.0)
    sent = actions.batch(np.array([[7, -7, 7, 7]], np.float32))
    assert sent.tolist() == [[7, 0, 7, 1]] and sent.dtype == np.float64


def test_boxes_of_several_axes_are_flat_inside_and_shaped_outside():
    actions = Actions(box((2, 3)), "env")
    assert (actions.spec.size, actions.spec.shape, actions.spec.box_shape) == (6, (6,), (2, 3))
    flat = np.linspace(-1, 1, 12, dtype=np.float32).reshape(2, 6)
    assert np.allclose(actions.batch(flat), flat.reshape(2, 2, 3), atol=1e-6)
    assert Actions(box(()), "env").batch(np.zeros((2, 1), np.float32)).shape == (2,)


BOUND = st.one_of(st.none(), st.floats(-1e6, 1e6, width=32))


@given(st.lists(st.tuples(BOUND, BOUND), min_size=1, max_size=4), st.integers(0, 2**32))
def test_the_mapping_is_that_of_the_action_spec(bounds, seed):
    """What lanes send equals what a policy outside Rookery would send through `ActionSpec.to_env`."""
    low = np.array([-np.inf if a is None else a if b is None else min(a, b) for a, b in bounds], np.float32)
    high = np.array([np.inf if b is None else b if a is None else max(a, b) for a, b in bounds], np.float32)
    actions = Actions(spaces.Box(low, high), "env")
    action = np.random.default_rng(seed).normal(size=(5, len(bounds))).astype(np.float32)
    sent = actions.batch(action)
    assert np.array_equal(sent, actions.spec.to_env(action))
    assert (sent >= low).all() and (sent <= high).all()


@pytest.mark.parametrize(
    "space",
    [
        box((2,), np.int32, -3, 3),
        spaces.MultiDiscrete([[2, 2], [2, 2]]),
        spaces.Tuple([spaces.Discrete(2)]),
        spaces.Dict({"a": spaces.Discrete(2)}),
    ],
)
def test_other_actions_are_refused_with_the_way_out(space):
    with pytest.raises(UsageError, match=r"(?s)env: action space .* is not one Rookery can act in.*ActionWrapper"):
        Actions(space, "env")


class Echo(gymnasium.Env):
    """Observes the action it was given."""

    observation_space = spaces.Dict({"last": spaces.Box(-5, 5, (2, 2), np.float64)})
    action_space = spaces.Box(-5, 5, (2, 2), np.float64)

    def reset(self, **kwargs):
        return {"last": np.zeros((2, 2))}, {}

    def step(self, action):
        assert action.dtype == np.float64 and self.action_space.contains(action)
        return {"last": action}, 0.0, False, False, {}


def test_actions_and_observations_meet_in_the_lanes():
    lanes = SyncLanes("echo", [Echo(), Echo()])
    lanes.reset([0, 0])
    action = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)
    obs = lanes.step(action)[0]["last"]
    assert obs.dtype == np.float32 and obs.shape == (2, 2, 2)
    assert np.allclose(obs.reshape(2, 4), 5 * action, atol=1e-6)
