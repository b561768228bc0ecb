"""The last action and reward as observations: right in every row of the reset convention, and nothing else changes."""

import gymnasium
import numpy as np
import pytest
from support_lanes import BOX, DISCRETE, MULTI, ScriptedLanes

from rookery.core.config import AtariConfig, NetConfig
from rookery.core.errors import UsageError
from rookery.core.types import Leaf
from rookery.envs.atari import AtariLanes
from rookery.envs.check import check
from rookery.envs.gate import find_nonfinite
from rookery.envs.lanes import LaneFault, SyncLanes
from rookery.envs.last import LastLanes
from rookery.envs.make import make

STEPS = 40


class Config:
    def __init__(self, env, atari=AtariConfig(), feed_last=True, **kwargs):  # noqa: B008 - frozen
        self.env, self.env_kwargs, self.atari, self.net = env, kwargs, atari, NetConfig(feed_last=feed_last)


def draw(rng, spec, lanes):
    if spec.kind == "box":
        return rng.uniform(-1.5, 1.5, (lanes, spec.size)).astype(np.float32)
    return rng.integers(np.array(spec.choices).reshape(spec.shape), size=(lanes, *spec.shape))


def play(lanes, steps=STEPS, seed=0):
    """Columns of random play: observations [T+1, B, ...] by name, action, reward, terminated, truncated [T, B, ...]."""
    rng = np.random.default_rng(seed)
    obs, rest = [{name: x.copy() for name, x in lanes.reset(range(lanes.count)).items()}], []
    for _ in range(steps):
        action = draw(rng, lanes.spec.action, lanes.count)
        seen, *row = lanes.step(action)
        obs.append({name: x.copy() for name, x in seen.items()})
        rest.append([action, *(column.copy() for column in row)])
    return {name: np.array([row[name] for row in obs]) for name in obs[0]}, *(np.array(x) for x in zip(*rest))


def shown(spec, action):
    """One action as it should be seen, written out."""
    if spec.kind == "box":
        return np.array(action, np.float32)
    return np.concatenate([np.eye(n, dtype=np.float32)[a] for n, a in zip(spec.choices, np.atleast_1d(action))])


@pytest.mark.parametrize("spec, width", [(DISCRETE, 3), (MULTI, 5), (BOX, 2)])
def test_every_row_shows_the_one_before_it_and_first_rows_show_nothing(spec, width):
    lanes = LastLanes(ScriptedLanes(action=spec))
    assert lanes.spec.obs["last_action"] == Leaf((width,), "float32", "vector")
    assert lanes.spec.obs["last_reward"] == Leaf((1,), "float32", "vector")
    obs, action, reward, terminated, truncated = play(lanes)
    assert obs["last_action"].shape == (STEPS + 1, 4, width) and obs["last_reward"].shape == (STEPS + 1, 4, 1)
    ends, finals = terminated | truncated, 0
    for lane in range(4):
        for t in range(STEPS + 1):
            first = obs["obs"][t, lane, 2] == 0  # the script's own count: step 0 of an episode
            assert first == (t == 0 or (t > 1 and ends[t - 2, lane])), (t, lane)
            expected = np.zeros(width) if first else shown(spec, action[t - 1, lane])
            assert np.array_equal(obs["last_action"][t, lane], expected), (t, lane)
            assert obs["last_reward"][t, lane, 0] == (0 if first else reward[t - 1, lane]), (t, lane)
            finals += t > 0 and bool(ends[t - 1, lane])  # a final observation, which shows how it came about
    assert finals > 20


def test_nothing_else_is_changed():
    plain, fed = ScriptedLanes(scored=True), LastLanes(ScriptedLanes(scored=True))
    (obs, *rest), (seen, *same) = play(plain), play(fed)
    assert set(seen) == {"obs", "last_action", "last_reward"} and np.array_equal(seen["obs"], obs["obs"])
    assert all(np.array_equal(a, b) for a, b in zip(rest, same))
    assert np.array_equal(fed.score, plain.score) and fed.count == plain.count and fed.spec.action == plain.spec.action
    assert fed.taken == plain.taken and fed.finished == plain.finished  # attributes of the inner lanes
    assert LastLanes(ScriptedLanes()).score is None
    with pytest.raises(AttributeError, match="wheels"):
        _ = fed.wheels


def test_a_reset_forgets():
    lanes = LastLanes(ScriptedLanes(lengths=[[1]] * 4))
    play(lanes, 1)
    obs = lanes.reset(range(4))
    assert not obs["last_action"].any() and not obs["last_reward"].any()
    obs, *_ = lanes.step(np.full(4, 2))  # the end before the reset is forgotten, too
    assert obs["last_action"].tolist() == [[0, 0, 1]] * 4


@pytest.mark.parametrize("steps", range(8))
def test_another_process_could_go_on_exactly(steps):
    lanes, fresh = LastLanes(ScriptedLanes()), LastLanes(ScriptedLanes())
    play(lanes, steps)
    state = lanes.get_state()
    play(fresh, 3)
    fresh.set_state(state)
    for t in range(20):
        action = np.random.default_rng(t).integers(3, size=4)
        (left, *a), (right, *b) = lanes.step(action), fresh.step(action)
        assert all(np.array_equal(left[name], right[name]) for name in left)
        assert all(np.array_equal(x, y) for x, y in zip(a, b))


def test_lanes_that_cannot_be_restored_stay_so_and_faults_keep_their_lane():
    assert LastLanes(ScriptedLanes(restorable=False)).get_state() is None
    lanes = LastLanes(ScriptedLanes(faults={(2, 0, 0): "raise"}))
    lanes.reset(range(4))
    with pytest.raises(LaneFault) as caught:
        lanes.step(np.zeros(4, int))
    assert caught.value.lane == 2


def test_a_bad_reward_is_named_as_the_reward_it_is():
    lanes = LastLanes(ScriptedLanes(faults={(1, 0, 2): "nan_reward"}))
    obs, _, reward, *_ = play(lanes, 5)
    assert find_nonfinite(obs, reward) == (2, 1, "a reward of nan")


@pytest.mark.parametrize("name", ["last_action", "last_reward"])
def test_an_environment_with_these_names_is_refused(name):
    inner = ScriptedLanes()
    inner.spec.obs[name] = Leaf((1,), "float32", "vector")
    with pytest.raises(UsageError, match=f"scripted has observations of its own named {name}.*feed_last off"):
        LastLanes(inner)


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1", "rookery/TMaze-v0"])
def test_make_wraps_when_asked_to(env):
    plain, fed = make(Config(env, feed_last=False), 2), make(Config(env), 2)
    assert type(fed) is LastLanes and type(fed.inner) is type(plain)
    assert list(fed.spec.obs) == ["obs", "last_action", "last_reward"]
    assert {name: leaf for name, leaf in fed.spec.obs.items() if "last" not in name} == plain.spec.obs
    assert fed.spec.action == plain.spec.action and fed.spec.id == env
    (obs, *rest), (seen, *same) = play(plain), play(fed)
    assert np.array_equal(seen["obs"], obs["obs"]) and all(np.array_equal(a, b) for a, b in zip(rest, same))
    fed.close()


class Named(gymnasium.Env):
    observation_space = gymnasium.spaces.Dict({"eye": gymnasium.spaces.Box(0, 1, (2,), np.float32)})
    action_space = gymnasium.spaces.Discrete(2, start=5)

    def reset(self, *, seed=None, options=None):
        return {"eye": np.zeros(2, np.float32)}, {}

    def step(self, action):
        return {"eye": np.ones(2, np.float32)}, float(action), False, False, {}


def test_named_observations_keep_their_names_and_actions_count_from_0():
    lanes = LastLanes(SyncLanes("named", [Named()]))
    lanes.reset([0])
    obs, reward, *_ = lanes.step(np.array([1]))
    assert list(obs) == ["eye", "last_action", "last_reward"] and reward.tolist() == [6.0]
    assert obs["last_action"].tolist() == [[0, 1]] and obs["last_reward"].tolist() == [[6.0]]


def test_atari_shows_the_clipped_reward_in_evaluation_too():
    game, rewards = "ALE/SpaceInvaders-v5", {}
    for training in (True, False):
        lanes = make(Config(game), 1, training=training)
        assert type(lanes.inner) is AtariLanes and lanes.spec.clipped
        obs, _, reward, terminated, truncated = play(lanes, 200)
        rewards[training] = reward.max()
        assert not (terminated | truncated).any()
        assert np.array_equal(obs["last_reward"][1:, :, 0], np.clip(reward, -1, 1)) and obs["last_reward"].max() == 1
        lanes.close()
    assert rewards[True] == 1 and rewards[False] >= 5
    raw = make(Config(game, AtariConfig(reward_clip=False)), 1)
    obs, _, reward, *_ = play(raw, 200)
    assert not raw.spec.clipped and np.array_equal(obs["last_reward"][1:, :, 0], reward) and reward.max() >= 5


def test_check_env_plays_such_lanes():
    report = check(Config("rookery/CartPoleMasked-v0"), 200)
    assert report.ok and report.restorable and report.deterministic and report.convention
    assert report.reset_mode.endswith("vector version") and set(report.obs) == {"obs", "last_action", "last_reward"}
