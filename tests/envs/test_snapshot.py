"""A restored set of lanes goes on exactly: time limits, ended lanes and generators included."""

import json

import gymnasium
import numpy as np
import pytest
from gymnasium.wrappers import NormalizeObservation

from rookery.core.config import AtariConfig, NetConfig
from rookery.core.errors import UsageError
from rookery.envs.lanes import SyncLanes
from rookery.envs.last import LastLanes
from rookery.envs.make import make
from rookery.envs.scripted import Counter
from rookery.envs.snapshot import generator_state, restored_generator
from rookery.storage.codec import decode_tree, encode_tree


class Config:
    def __init__(self, env, **kwargs):
        self.env, self.env_kwargs, self.atari, self.net = env, kwargs, AtariConfig(), NetConfig()


def singles(env_id, **kwargs):
    return SyncLanes(env_id, [gymnasium.make(env_id, **kwargs) for _ in range(3)])


SOURCES = {
    "cartpole batch": lambda: make(Config("CartPole-v1", max_episode_steps=30), 3),
    "masked batch": lambda: make(Config("rookery/CartPoleMasked-v0"), 3),
    "masked singles": lambda: singles("rookery/CartPoleMasked-v0", max_episode_steps=20),
    "maze batch": lambda: make(Config("rookery/TMaze-v0"), 3),
    "maze singles": lambda: singles("rookery/TMaze-v0"),
    "repeat batch": lambda: make(Config("rookery/RepeatPrevious-v0", length=6), 3),
    "repeat singles": lambda: singles("rookery/RepeatPrevious-v0", length=6),
    "walk batch": lambda: make(Config("rookery/CliffWalk-v0", n=3), 3),
    "walk singles": lambda: singles("rookery/CliffWalk-v0", n=3),
    "catch batch": lambda: make(Config("rookery/Catch-v0", rows=4), 3),
    "catch singles": lambda: singles("rookery/Catch-v0", rows=4),
    "switch batch": lambda: make(Config("rookery/PixelSwitch-v0", length=7), 3),
    "switch singles": lambda: singles("rookery/PixelSwitch-v0", length=7, truncate=True),
    "cue batch": lambda: make(Config("rookery/Cue-v0", length=8), 3),
    "cue singles": lambda: singles("rookery/Cue-v0", length=8),
    "fed with the last action": lambda: LastLanes(make(Config("rookery/TMaze-v0"), 3)),
    "counter, limited": lambda: singles("rookery/Counter-v0", lengths=[3, 9], max_episode_steps=5),
    "faulty, harmless": lambda: singles("rookery/Faulty-v0", fault="none", env="rookery/TMaze-v0"),
}


def rows(lanes, steps, first):
    out = []
    for t in range(first, first + steps):
        action = np.random.default_rng(t).integers(lanes.spec.action.choices[0], size=3)
        obs, *rest = lanes.step(action)
        out.append([*(x.tolist() for x in obs.values()), *(column.tolist() for column in rest)])
    return out


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("steps", [0, 5, 11, 40])
def test_another_process_could_go_on_exactly(name, steps):
    lanes = SOURCES[name]()
    lanes.reset([1, 2, 3])
    rows(lanes, steps, 0)
    plain, tensors = encode_tree(lanes.get_state())
    expected = rows(lanes, 60, steps)
    fresh = SOURCES[name]()  # has played something else meanwhile
    fresh.reset([7, 8, 9])
    rows(fresh, 3, 500)
    fresh.set_state(decode_tree(json.loads(json.dumps(plain)), tensors))
    assert rows(fresh, 60, steps) == expected


def test_a_state_is_not_touched_by_what_follows():
    lanes = SOURCES["repeat batch"]()
    lanes.reset([1, 2, 3])
    state = lanes.get_state()
    first = rows(lanes, 20, 0)
    for _ in range(2):
        lanes.set_state(state)
        assert rows(lanes, 20, 0) == first


def test_environments_without_a_state_say_so():
    lanes = singles("CartPole-v1")
    lanes.reset([1, 2, 3])
    assert lanes.get_state() is None


def test_a_wrapper_with_a_state_of_its_own_is_not_restored_nearly():
    assert SyncLanes("counter", [Counter()]).get_state() is not None
    assert SyncLanes("counter", [NormalizeObservation(Counter())]).get_state() is None


def test_vector_environments_without_a_state_refuse_to_be_restored():
    lanes = make(Config("ALE/Pong-v5"), 1)
    assert lanes.get_state() is None
    with pytest.raises(UsageError, match="cannot be restored"):
        lanes.set_state({})
    lanes.close()


def test_generators_are_restored_by_name_and_nothing_else():
    generator = np.random.Generator(np.random.Philox(3))
    generator.normal(size=5)
    state = generator_state(generator)
    assert generator.normal(size=4).tolist() == restored_generator(state).normal(size=4).tolist()
    for name in ("default_rng", "__builtins__", "Generator", "nothing"):
        with pytest.raises(ValueError, match="not a bit generator"):
            restored_generator(state | {"bit_generator": name})
