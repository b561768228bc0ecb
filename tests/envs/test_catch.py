"""Catch: the ball can always be caught, frames show what is there, and the batch plays what the single one plays."""

import gymnasium
import numpy as np
import pytest

from rookery.core.config import AtariConfig, NetConfig
from rookery.envs.catch import Catch, CatchVector
from rookery.envs.check import check
from rookery.envs.lanes import SyncLanes
from rookery.envs.make import make
from rookery.envs.vector import VectorLanes

NAME = "rookery/Catch-v0"
SHAPES = [{}, {"rows": 3, "columns": 5}, {"rows": 2, "columns": 1}, {"rows": 4, "columns": 4, "scale": 3}]


class Config:
    def __init__(self, env, **kwargs):
        self.env, self.env_kwargs, self.atari, self.net = env, kwargs, AtariConfig(), NetConfig()


def chase(frame):
    """Towards the ball, from the frame alone. In the row of the paddle the ball cannot be told apart."""
    frame = frame[0]
    ball, paddle = int(frame[:-1].max(0).argmax()), int(frame[-1].argmax())
    return 1 + int(np.sign(ball - paddle))


def episode(env, policy, seed=None):
    frames, total = [env.reset(seed=seed)[0]], 0.0
    while True:
        frame, reward, terminated, truncated, _ = env.step(policy(frames[-1]))
        assert env.observation_space.contains(frame) and not truncated and (terminated or reward == 0)
        frames.append(frame)
        total += reward
        if terminated:
            return total, frames


@pytest.mark.parametrize("kwargs", SHAPES)
def test_who_follows_the_ball_catches_it_always(kwargs):
    env = gymnasium.make(NAME, **kwargs)
    rows, columns, scale = (kwargs.get(name, start) for name, start in [("rows", 10), ("columns", 5), ("scale", 1)])
    starts = set()
    for seed in range(40):
        total, frames = episode(env, lambda frame: chase(frame[:, ::scale, ::scale]), seed)
        assert total == 1.0 and len(frames) == rows
        starts.add(int(frames[0][0, 0].argmax()) // scale)
    assert starts == set(range(columns))  # the ball falls from every column


def test_other_policies_earn_what_chance_gives():
    env, rng = Catch(), np.random.default_rng(0)
    returns = [episode(env, lambda _: rng.integers(3), seed)[0] for seed in range(2000)]
    assert set(returns) == {-1.0, 1.0} and -0.68 < np.mean(returns) < -0.52  # 4 deviations of the mean around -0.6
    away = [2, 0, 0]  # by the action that would follow the ball
    assert all(episode(env, lambda frame: away[chase(frame)], seed)[0] == -1.0 for seed in range(20))


def test_the_ball_falls_straight_and_the_paddle_moves_by_one():
    env = Catch(rows=4, columns=5)
    frame, _ = env.reset(seed=3)
    ball, paddle = int(frame[0, 0].argmax()), 2
    for row, (action, paddle) in enumerate([(0, 1), (0, 0), (0, 0)], 1):  # left, left, and against the wall
        frame, _, terminated, _, _ = env.step(action)
        expected = np.zeros((1, 4, 5), np.uint8)
        expected[0, row, ball] = expected[0, 3, paddle] = 255
        assert np.array_equal(frame, expected) and terminated == (row == 3)


def test_a_larger_scale_shows_the_same_game():
    plain, large = Catch(), Catch(scale=4)
    for seed in range(5):
        (_, a), (_, b) = episode(plain, lambda _: 1, seed), episode(large, lambda _: 1, seed)
        assert all(np.array_equal(np.kron(x, np.ones((1, 4, 4), np.uint8)), y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("kwargs", SHAPES)
def test_the_batch_plays_the_episodes_of_single_environments(kwargs):
    lanes = make(Config(NAME, **kwargs), 3)
    singles = SyncLanes(NAME, [gymnasium.make(NAME, **kwargs) for _ in range(3)])
    assert type(lanes) is VectorLanes and type(lanes.env) is CatchVector and lanes.spec == singles.spec
    assert lanes.spec.obs["obs"].kind == "image"
    assert np.array_equal(lanes.reset([1, 2, 3])["obs"], singles.reset([1, 2, 3])["obs"])
    rng, ends = np.random.default_rng(0), 0
    for t in range(100):
        action = rng.integers(3, size=3)
        (a, *b), (x, *y) = lanes.step(action), singles.step(action)
        assert np.array_equal(a["obs"], x["obs"]) and all(np.array_equal(p, q) for p, q in zip(b, y)), t
        ends += int(b[1].sum())
    assert ends == 3 * (100 // kwargs.get("rows", 10))  # rows - 1 steps, and one to reset


def test_it_is_ready_to_train_on():
    report = check(Config(NAME), 400)
    assert report.ok and not report.warnings and report.mean_length == 9
    assert report.deterministic and report.convention and report.in_space and report.restorable


@pytest.mark.parametrize(
    "kwargs, words",
    [({"rows": 1}, "rows=1"), ({"scale": 0}, "scale=0"), ({"rows": 3, "columns": 6}, "use 5 columns or fewer")],
)
def test_games_that_cannot_be_won_are_refused(kwargs, words):
    for build in (Catch, lambda **kwargs: CatchVector(2, **kwargs)):
        with pytest.raises(ValueError, match=words):
            build(**kwargs)
