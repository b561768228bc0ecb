"""Probes of auxiliary losses: what their docstrings say is known, is so."""

import gymnasium
import numpy as np
import pytest

from rookery.core.config import AtariConfig, NetConfig
from rookery.envs.check import check
from rookery.envs.lanes import SyncLanes
from rookery.envs.make import make
from rookery.envs.probe import Cue, CueVector, PixelSwitch, PixelSwitchVector
from rookery.envs.vector import VectorLanes

SWITCH, CUE = "rookery/PixelSwitch-v0", "rookery/Cue-v0"
VECTORS = {SWITCH: PixelSwitchVector, CUE: CueVector}


class Config:
    def __init__(self, env, **kwargs):
        self.env, self.env_kwargs, self.atari, self.net = env, kwargs, AtariConfig(), NetConfig()


def episode(env, seed, actions):
    """Frames [T+1, 1, H, W], rewards [T], and the flags of the last step."""
    frames, rewards = [env.reset(seed=seed)[0]], []
    for action in actions:
        frame, reward, terminated, truncated, _ = env.step(action)
        assert env.observation_space.contains(frame)
        frames.append(frame)
        rewards.append(reward)
        if terminated or truncated:
            break
    return np.stack(frames), np.array(rewards), (terminated, truncated)


def random_actions(env, seed):
    rng = np.random.default_rng(seed)
    return rng.integers(env.action_space.n, size=1000)


def test_an_action_changes_its_quadrant_and_nothing_else():
    env, starts = PixelSwitch(), set()
    for seed in range(20):
        actions = random_actions(env, seed)
        frames, rewards, end = episode(env, seed, actions)
        assert len(rewards) == 20 and not rewards.any() and end == (True, False)
        change = np.abs(np.diff(frames.astype(int), axis=0))[:, 0]  # [T, 20, 20]
        for action, each in zip(actions, change):
            quadrants = each.reshape(2, 10, 2, 10).swapaxes(1, 2).reshape(4, 100)
            assert (quadrants[action] == 255).all() and not np.delete(quadrants, action, 0).any()
        starts.add(frames[0].tobytes())
    assert len(starts) > 5  # of 16


def test_the_best_value_of_a_quadrant_is_what_the_docstring_says():
    """Brute force over all action sequences of a short episode: discounted changes of quadrant 2."""
    env, g, n = PixelSwitch(length=4), 0.9, 4
    best = np.zeros(4)
    for code in range(4**n):
        actions = [code // 4**i % 4 for i in range(n)]
        frames, _, _ = episode(env, 0, actions)
        change = np.abs(np.diff(frames.astype(int), axis=0))[:, 0, 10:, :10].mean((1, 2)) / 255
        best[actions[0]] = max(best[actions[0]], (change * g ** np.arange(n)).sum())
    expected = (np.arange(4) == 2) + sum(g**i for i in range(1, n))
    np.testing.assert_allclose(best, expected)


def test_switches_end_by_truncation_if_asked_to():
    assert episode(PixelSwitch(length=5, truncate=True), 0, [0] * 9)[2] == (False, True)


def test_three_frames_decide_the_next_reward_and_two_do_not():
    env, three, two = Cue(), {}, {}
    for seed in range(100):
        frames, rewards, end = episode(env, seed, random_actions(env, seed))
        assert len(rewards) == 30 and end == (True, False) and not rewards[:2].any()
        for t in range(2, 30):
            three.setdefault(frames[t - 2 : t + 1].tobytes(), set()).add(rewards[t])
            two.setdefault(frames[t - 1 : t + 1].tobytes(), set()).add(rewards[t])
    assert all(len(rewards) == 1 for rewards in three.values()) and len(three) == 27
    assert all(rewards == {-1.0, 0.0, 1.0} for rewards in two.values()) and len(two) == 9


def test_left_is_good_right_is_bad_and_both_are_as_frequent_as_said():
    env, sides, count = Cue(rate=0.3), [], 200
    for seed in range(count):
        frames, rewards, _ = episode(env, seed, [0] * 30)
        bright = frames[:, 0, :, :4].mean((1, 2)), frames[:, 0, :, 4:].mean((1, 2))
        cues = (bright[0] - bright[1]) / 255
        assert np.array_equal(rewards[2:], cues[:-3]) and set(cues) <= {-1, 0, 1}
        sides += list(cues)
    for side in (-1, 1):
        assert abs(np.mean(np.equal(sides, side)) - 0.15) < 0.02  # 4 deviations are 0.018


def test_actions_do_nothing_to_cues():
    for seed in range(3):
        (a, x, _), (b, y, _) = (episode(Cue(), seed, [action] * 30) for action in (0, 1))
        assert np.array_equal(a, b) and np.array_equal(x, y)


@pytest.mark.parametrize(
    "name, kwargs",
    [(SWITCH, {}), (SWITCH, {"length": 3, "truncate": True}), (CUE, {}), (CUE, {"length": 1}), (CUE, {"rate": 1.0})],
)
def test_the_batch_plays_the_episodes_of_single_environments(name, kwargs):
    lanes = make(Config(name, **kwargs), 3)
    singles = SyncLanes(name, [gymnasium.make(name, **kwargs) for _ in range(3)])
    assert type(lanes) is VectorLanes and type(lanes.env) is VECTORS[name] and lanes.spec == singles.spec
    assert lanes.spec.obs["obs"].kind == "image"
    assert np.array_equal(lanes.reset([1, 2, 3])["obs"], singles.reset([1, 2, 3])["obs"])
    rng, ends = np.random.default_rng(0), 0
    for t in range(100):
        action = rng.integers(lanes.spec.action.choices[0], size=3)
        (a, *b), (x, *y) = lanes.step(action), singles.step(action)
        assert np.array_equal(a["obs"], x["obs"]) and all(np.array_equal(p, q) for p, q in zip(b, y)), t
        ends += int(b[1].sum() + b[2].sum())
    length = kwargs.get("length", 20 if name == SWITCH else 30)
    assert ends == 3 * ((100 + 1) // (length + 1))


@pytest.mark.parametrize("name", [SWITCH, CUE])
def test_they_are_ready_to_train_on(name):
    report = check(Config(name), 400)
    assert report.ok and not report.warnings
    assert report.deterministic and report.convention and report.in_space and report.restorable


@pytest.mark.parametrize(
    "build, words",
    [
        (lambda: PixelSwitch(length=0), "length=0"),
        (lambda: PixelSwitchVector(2, length=0), "length=0"),
        (lambda: Cue(rate=1.5), r"rate=1\.5"),
        (lambda: CueVector(2, rate=-0.1), r"rate=-0\.1"),
    ],
)
def test_impossible_arguments_are_refused(build, words):
    with pytest.raises(ValueError, match=words):
        build()
