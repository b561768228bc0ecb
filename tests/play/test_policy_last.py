"""A policy that is fed its last action and reward acts for a user as it does in lanes, on film and in evaluation."""

from pathlib import Path

import numpy as np
import pytest
import torch

from rookery.algorithms.ppo import PPO, PPOConfig
from rookery.core import tree
from rookery.core.config import AtariConfig, NetConfig, RunConfig
from rookery.core.seeding import seed_of
from rookery.envs.make import make, make_single
from rookery.play.evaluate import evaluate
from rookery.play.policy import Policy
from rookery.play.record import record
from rookery.storage.checkpoint import Checkpoint

CASES = {
    "discrete, lstm": ("rookery/CartPoleMasked-v0", {"core": "lstm", "core_size": 8}, {}),
    "discrete": ("rookery/RepeatPrevious-v0", {}, {"length": 7}),
    "box, gru": ("Pendulum-v1", {"core": "gru", "core_size": 8}, {"max_episode_steps": 20}),
    "box": ("dmc/reacher-easy", {}, {"time_limit": 0.5, "flat": False}),
    "multi": ("test_policy_last:dials", {"core": "gru", "core_size": 8}, {}),
}


def dials(render_mode=None):
    """Two dials to turn; the reward tells the sum of both, the observation nothing."""
    import gymnasium

    class Dials(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float32)
        action_space = gymnasium.spaces.MultiDiscrete([2, 3])
        metadata = {"render_fps": 10}  # noqa: RUF012

        def reset(self, *, seed=None, options=None):
            self.t = 0
            return np.zeros(1, np.float32), {}

        def step(self, action):
            self.t += 1
            return np.zeros(1, np.float32), float(np.sum(action)), self.t == 6, False, {}

        def render(self):
            return np.full((64, 64, 3), 20 * self.t, np.uint8)

    return Dials()


def policy_for(env, net, env_kwargs, atari=AtariConfig()):  # noqa: B008 - frozen
    net = NetConfig(hidden=(8,), features=16, feed_last=True, **net)
    config = RunConfig("ppo", "rookery.algorithms.ppo:PPO", env, PPOConfig(), net, atari, env_kwargs)
    lanes = make(config, 1, training=False)
    spec = lanes.spec
    lanes.close()
    torch.manual_seed(3)
    nets = PPO(config.algo, net, spec, config.lanes).nets()
    noise = torch.Generator().manual_seed(4)
    tensors = {
        f"nets/{name}": x + 0.5 * torch.randn(x.shape, generator=noise) if x.is_floating_point() else x
        for name, x in nets.state_dict().items()
    }
    return Policy(config, spec, Checkpoint(Path("step-0"), 0, tensors, {}))


def through_lanes(policy, seed, steps, explore=None):
    """Rows (action as the environment takes it, reward) of one lane, dead rows left out."""
    lanes = make(policy.config, 1, training=False)
    obs, state, live, rows = lanes.reset([seed]), policy.initial_state(1), True, []
    for _ in range(steps):
        action, state = policy.act_batch(obs, state, explore)
        obs, reward, terminated, truncated = lanes.step(action)
        if live:
            rows.append((policy.spec.action.to_gym(action)[0], float(reward[0])))
        else:
            state = tree.map(torch.zeros_like, state)
        live = not (terminated | truncated)[0]
    lanes.close()
    return rows


def by_hand(policy, seed, steps, told=True, explore=None):
    env = make_single(policy.config)
    (obs, _), state, reward, rows = env.reset(seed=seed), None, 0.0, []
    for _ in range(steps):
        action, state = policy.predict(obs, state, explore is None, reward=reward if told else 0.0, generator=explore)
        obs, reward, terminated, truncated, _ = env.step(action)
        rows.append((action, float(np.float32(reward))))
        if terminated or truncated:
            (obs, _), state = env.reset(), None  # the reward may stay: an episode begins without one
    env.close()
    return rows


def same(left, right):
    return all(np.array_equal(a, b) and x == y for (a, x), (b, y) in zip(left, right))


@pytest.mark.parametrize("name", CASES)
def test_acting_by_hand_equals_acting_in_lanes(name):
    policy = policy_for(*CASES[name])
    lanes = through_lanes(policy, 5, 60)
    assert len(lanes) < 60  # several episodes
    assert same(lanes, by_hand(policy, 5, len(lanes)))


def test_the_reward_and_the_action_matter():
    policy = policy_for(*CASES["box, gru"])
    told = by_hand(policy, 5, 15)
    assert not same(told, by_hand(policy, 5, 15, told=False))
    obs = np.zeros(3, np.float32)
    _, state = policy.predict(obs)
    assert set(state) == {"core", "last_action"}
    other = state | {"last_action": -state["last_action"]}
    assert not np.array_equal(policy.predict(obs, state)[0], policy.predict(obs, other)[0])
    assert np.array_equal(policy.predict(obs)[0], policy.predict(obs, reward=7.0)[0])  # no state: an episode begins


def test_clipped_games_are_shown_clipped_rewards():
    """Space Invaders pays 5 to 30 points; what trained saw 1."""
    policy = policy_for("ALE/SpaceInvaders-v5", {"torso": "nips", "core": "gru", "core_size": 8}, {})
    assert policy.spec.clipped
    lanes = through_lanes(policy, 5, 200, torch.Generator().manual_seed(1))
    assert max(reward for _, reward in lanes) >= 5 and len(lanes) == 200
    assert same(lanes, by_hand(policy, 5, 200, explore=torch.Generator().manual_seed(1)))
    state = policy.predict(np.zeros((4, 84, 84), np.uint8))[1]
    seen = []
    act = policy.act_rows
    policy.act_rows = lambda rows, *rest: seen.append(rows["last_reward"].item()) or act(rows, *rest)
    for reward in (30.0, -9.0, 0.5):
        policy.predict(np.zeros((4, 84, 84), np.uint8), state, reward=reward)
    assert seen == [1.0, -1.0, 0.5]


@pytest.mark.parametrize("name", ["discrete, lstm", "multi"])
def test_evaluation_and_films_play_the_same(name, tmp_path):
    policy = policy_for(*CASES[name])
    lanes = make(policy.config, 2, training=False)
    judged = evaluate(policy, lanes, 4, seed=7)
    lanes.close()
    for lane in range(2):
        env = make_single(policy.config)
        (obs, _), state, reward, total, totals = (
            env.reset(seed=seed_of(7, "evaluate", lane) % 2**31),
            None,
            0.0,
            0.0,
            [],
        )
        while len(totals) < 2:
            action, state = policy.predict(obs, state, reward=reward)
            obs, reward, terminated, truncated, _ = env.step(action)
            total += reward
            if terminated or truncated:
                totals.append(total)
                (obs, _), state, total = env.reset(), None, 0.0
        assert totals == judged.returns[2 * lane : 2 * lane + 2]
    film = record(policy, policy.config, tmp_path / "film.mp4", episodes=1, seed=7)
    rows = by_hand(policy, seed_of(7, "record", 0) % 2**31, film.frames - 1)
    assert film.returns == [sum(reward for _, reward in rows)] and not film.note
