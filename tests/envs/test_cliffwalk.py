"""The blind cliffwalk: one way through, and it alone is paid."""

import itertools

import gymnasium
import numpy as np
import pytest

from rookery.core.config import AtariConfig, NetConfig
from rookery.envs.check import check
from rookery.envs.cliffwalk import CliffWalk, CliffWalkVector, right
from rookery.envs.lanes import SyncLanes
from rookery.envs.make import make
from rookery.envs.vector import VectorLanes


class Config:
    def __init__(self, env, **kwargs):
        self.env, self.env_kwargs, self.atari, self.net = env, kwargs, AtariConfig(), NetConfig()


def walk(env, actions):
    """States seen, rewards and ends until the episode is over or the actions are."""
    rows = [(env.reset()[0], 0.0, False)]
    for action in actions:
        obs, reward, terminated, truncated, _ = env.step(action)
        assert env.observation_space.contains(obs) and not truncated
        rows.append((obs, reward, terminated))
        if terminated:
            break
    return zip(*rows)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_of_all_ways_one_is_paid(n):
    env = gymnasium.make("rookery/CliffWalk-v0", n=n, one_hot=False)
    paid = []
    for actions in itertools.product((0, 1), repeat=n):
        states, rewards, ends = walk(env, actions)
        assert ends[-1] and not any(ends[:-1])  # the first wrong action is the last one
        assert list(states[:-1]) == list(range(len(ends) - 1))  # every right one goes one state on
        assert sum(rewards) in (0.0, 1.0)
        if sum(rewards):
            assert rewards[-1] == 1.0 and len(ends) == n + 1
            paid.append(actions)
    assert paid == [tuple(right(state) for state in range(n))]


def test_which_action_is_right_depends_on_the_state():
    assert {int(right(state)) for state in range(8)} == {0, 1}
    env = CliffWalk(n=6)
    for action in (0, 1):
        _, rewards, _ = walk(env, [action] * 6)
        assert sum(rewards) == 0.0 and len(rewards) <= 3


def test_states_are_shown_one_hot_or_as_numbers():
    hot, plain = CliffWalk(n=3), CliffWalk(n=3, one_hot=False)
    assert plain.observation_space == gymnasium.spaces.Discrete(3) and hot.observation_space.shape == (3,)
    states, *_ = walk(hot, [0, 1, 1])  # on, on, and off the cliff, which is seen from where one stood
    assert np.array_equal(states, np.eye(3)[[0, 1, 2, 2]])
    states, *_ = walk(plain, [0, 0])
    assert states == (0, 1, 1)


@pytest.mark.parametrize("kwargs", [{}, {"n": 1}, {"n": 3, "one_hot": False}])
def test_the_batch_plays_the_episodes_of_single_environments(kwargs):
    name = "rookery/CliffWalk-v0"
    lanes = make(Config(name, **kwargs), 3)
    singles = SyncLanes(name, [gymnasium.make(name, **kwargs) for _ in range(3)])
    assert type(lanes) is VectorLanes and type(lanes.env) is CliffWalkVector and lanes.spec == singles.spec
    assert np.array_equal(lanes.reset([1, 2, 3])["obs"], singles.reset([1, 2, 3])["obs"])
    rng, ends, paid = np.random.default_rng(0), 0, 0
    for t in range(200):
        action = rng.integers(2, size=3)
        action[0] = right(lanes.env.state[0])  # one lane knows the way
        (a, *b), (x, *y) = lanes.step(action), singles.step(action)
        assert np.array_equal(a["obs"], x["obs"]) and all(np.array_equal(p, q) for p, q in zip(b, y)), t
        ends, paid = ends + int(b[1].sum()), paid + int(b[0][0])
    n = kwargs.get("n", 8)
    assert ends > 60 and paid == (200 + 1) // (n + 1)


def test_it_is_ready_to_train_on():
    report = check(Config("rookery/CliffWalk-v0"), 400)
    assert report.ok and not report.warnings
    assert report.deterministic and report.convention and report.in_space and report.restorable


def test_a_walk_of_no_states_is_refused():
    for build in (lambda: CliffWalk(n=0), lambda: CliffWalkVector(2, n=0)):
        with pytest.raises(ValueError, match="n=0"):
            build()
