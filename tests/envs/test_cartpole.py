"""CartPole as a batch plays gymnasium's CartPole, bit for bit, limits and resets included."""

import gymnasium
import numpy as np
import pytest

from rookery.envs.cartpole import CartPoleVector, MaskedCartPoleVector
from rookery.envs.lanes import SyncLanes
from rookery.envs.vector import VectorLanes

SEEDS = [3, 14, 159, 2653]


def columns(lanes, policy, steps):
    obs = lanes.reset(SEEDS)["obs"].copy()
    rows = []
    for t in range(steps):
        obs, reward, terminated, truncated = lanes.step(policy(obs, t))
        obs = obs["obs"].copy()
        rows.append((obs, reward.copy(), terminated.copy(), truncated.copy()))
    return [np.array(column) for column in zip(*rows)]


def wild(obs, t):
    return np.random.default_rng(t).integers(0, 2, len(obs))


def balance(obs, t):
    """Keeps the pole up for hundreds of steps; velocities come third and last where they are shown."""
    angle, spin = obs[:, 2], obs[:, 3]
    return (angle + 0.3 * spin + 0.05 * obs[:, 0] + 0.1 * obs[:, 1] > 0).astype(np.int64)


@pytest.mark.parametrize("policy, steps, limit", [(wild, 300, 500), (balance, 1100, 500), (wild, 60, 7)])
def test_the_batch_plays_the_episodes_of_single_environments(policy, steps, limit):
    batch = VectorLanes("CartPole-v1", CartPoleVector(4, max_episode_steps=limit))
    singles = SyncLanes("CartPole-v1", [gymnasium.make("CartPole-v1", max_episode_steps=limit) for _ in SEEDS])
    found, expected = columns(batch, policy, steps), columns(singles, policy, steps)
    for name, a, b in zip(("obs", "reward", "terminated", "truncated"), found, expected):
        assert np.array_equal(a, b), name
    assert (found[3] if policy is balance or limit == 7 else found[2]).any()  # the ends in question were met


def test_the_limit_is_500_steps_and_then_a_reset_row():
    obs, reward, terminated, truncated = columns(VectorLanes("c", CartPoleVector(4)), balance, 503)
    assert truncated[499].all() and not truncated[:499].any() and not terminated.any()
    assert reward[:500].all() and not reward[500].any() and reward[501:].all()
    assert (np.abs(obs[500]) <= 0.05).all() and not truncated[500].any()


def test_the_other_reward():
    batch = VectorLanes("c", CartPoleVector(4, sutton_barto_reward=True))
    singles = SyncLanes("c", [gymnasium.make("CartPole-v1", sutton_barto_reward=True) for _ in SEEDS])
    assert np.array_equal(columns(batch, wild, 100)[1], columns(singles, wild, 100)[1])


def test_a_lane_does_not_depend_on_its_neighbours():
    four, one = CartPoleVector(4), CartPoleVector(1)
    start, _ = four.reset(seed=SEEDS)
    alone, _ = one.reset(seed=SEEDS[2:3])
    assert np.array_equal(start[2], alone[0])
    for t in range(100):
        actions = wild(start, t)
        left, right = four.step(actions), one.step(actions[2:3])
        assert all(np.array_equal(a[2], b[0]) for a, b in zip(left[:4], right[:4]))


def test_masked_shows_position_and_angle_of_the_same_episodes():
    whole, masked = CartPoleVector(4), MaskedCartPoleVector(4)
    single = SyncLanes("m", [gymnasium.make("rookery/CartPoleMasked-v0") for _ in SEEDS])
    a, b, c = (columns(lanes, wild, 120) for lanes in (VectorLanes("w", whole), VectorLanes("m", masked), single))
    assert b[0].shape[-1] == 2 and np.array_equal(a[0][..., [0, 2]], b[0])
    assert all(np.array_equal(x, y) for x, y in zip(b, c))
    assert masked.single_observation_space == single.envs[0].observation_space


def test_gymnasiums_own_vector_version_keeps_the_convention_too():
    """It may be met through a factory: rewards and flags of its reset rows, and its limit, are right."""
    env = gymnasium.make_vec("CartPole-v1", num_envs=4, vectorization_mode="vector_entry_point", max_episode_steps=9)
    _, reward, terminated, truncated = columns(VectorLanes("g", env), wild, 80)
    ends = terminated | truncated
    assert truncated.any() and not reward[1:][ends[:-1]].any() and reward[1:][~ends[:-1]].all()
