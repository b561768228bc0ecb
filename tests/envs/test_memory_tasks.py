"""Memory tasks: perfect memory earns 1, none earns chance, and the batch plays what the single environment plays."""

import gymnasium
import numpy as np
import pytest

import rookery.envs  # noqa: F401
from rookery.envs.lanes import SyncLanes
from rookery.envs.memory import RepeatPreviousVector, TMazeVector
from rookery.envs.vector import VectorLanes

SEEDS = [1, 2, 3]


def episode(env, policy, seed):
    obs, _ = env.reset(seed=seed)
    seen, total = [obs], 0.0
    while True:
        obs, reward, terminated, truncated, _ = env.step(policy(seen))
        assert env.observation_space.contains(obs) and not truncated
        total += reward
        if terminated:
            return total, len(seen)
        seen.append(obs)


def turn(seen):
    """Right at the junction, whatever is said in the corridor."""
    return int(np.argmax(seen[0][:2]))


def test_the_t_maze_pays_memory():
    env = gymnasium.make("rookery/TMaze-v0")
    results = [episode(env, turn, seed) for seed in range(20)]
    assert results == [(1.0, 11)] * 20
    wrong = [episode(env, lambda seen: 1 - turn(seen), seed)[0] for seed in range(20)]
    assert wrong == [0.0] * 20


def test_the_t_maze_shows_the_lamp_once_and_is_a_fair_coin():
    env = gymnasium.make("rookery/TMaze-v0", length=3)
    obs, _ = env.reset(seed=0)
    assert obs[:2].sum() == 1
    rows = [env.step(0) for _ in range(4)]
    assert [row[0].tolist() for row in rows[:3]] == [[0, 0, 1, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    assert [row[2] for row in rows] == [False, False, False, True]
    arms = [episode(env, lambda seen: 0, seed)[0] for seed in range(400)]
    assert 0.4 < np.mean(arms) < 0.6  # what a policy without memory gets


@pytest.mark.parametrize("k, one_hot", [(2, True), (1, False), (0, True)])
def test_repeat_previous_pays_memory(k, one_hot):
    env = gymnasium.make("rookery/RepeatPrevious-v0", k=k, one_hot=one_hot, length=12)

    def remember(seen):
        symbol = seen[max(len(seen) - 1 - k, 0)]
        return int(np.argmax(symbol)) if one_hot else int(symbol)

    for seed in range(10):
        total, length = episode(env, remember, seed)
        assert total == pytest.approx(1.0) and length == 12
    guess = [episode(env, lambda seen: 0, seed)[0] for seed in range(200)]
    assert 0.2 < np.mean(guess) < 0.3


@pytest.mark.parametrize(
    "env_id, batch, kwargs",
    [
        ("rookery/TMaze-v0", TMazeVector, {}),
        ("rookery/TMaze-v0", TMazeVector, {"length": 1}),
        ("rookery/RepeatPrevious-v0", RepeatPreviousVector, {}),
        ("rookery/RepeatPrevious-v0", RepeatPreviousVector, {"k": 3, "symbols": 2, "length": 5, "one_hot": False}),
    ],
)
def test_the_batch_plays_the_episodes_of_single_environments(env_id, batch, kwargs):
    lanes = VectorLanes(env_id, batch(len(SEEDS), **kwargs))
    singles = SyncLanes(env_id, [gymnasium.make(env_id, **kwargs) for _ in SEEDS])
    assert lanes.spec == singles.spec
    assert np.array_equal(lanes.reset(SEEDS)["obs"], singles.reset(SEEDS)["obs"])
    rng, ends = np.random.default_rng(0), 0
    for _ in range(120):
        action = rng.integers(lanes.spec.action.choices[0], size=len(SEEDS))
        (a, *b), (x, *y) = lanes.step(action), singles.step(action)
        assert np.array_equal(a["obs"], x["obs"]) and all(np.array_equal(p, q) for p, q in zip(b, y))
        ends += int(b[1].sum())
    assert ends >= 3 * len(SEEDS)


@pytest.mark.parametrize("kwargs", [{"k": 5, "length": 5}, {"k": -1}])
def test_impossible_tasks_are_refused(kwargs):
    with pytest.raises(ValueError, match="k="):
        gymnasium.make("rookery/RepeatPrevious-v0", **kwargs)
    with pytest.raises(ValueError, match="k="):
        RepeatPreviousVector(2, **kwargs)
    with pytest.raises(ValueError, match="length=0"):
        gymnasium.make("rookery/TMaze-v0", length=0)
