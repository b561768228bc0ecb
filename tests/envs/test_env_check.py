"""check-env: what a report says about good and bad environments."""

import gymnasium
import msgspec
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv, VectorWrapper

from rookery.core.config import AtariConfig, NetConfig
from rookery.envs.check import Report, check
from rookery.envs.scripted import Counter


class Config:
    def __init__(self, env, **kwargs):
        self.env, self.env_kwargs, self.atari, self.net = env, kwargs, AtariConfig(), NetConfig()


class Unseeded(Counter):
    def reset(self, **kwargs):
        super().reset(**kwargs)
        return np.random.default_rng().uniform(size=3).astype(np.float32), {}

    def get_state(self):
        return None


class Outside(Counter):
    observation_space = None

    def __init__(self):
        super().__init__()
        self.observation_space = gymnasium.spaces.Box(0, 1, (3,), np.float32)


class Forgetful(Counter):
    def set_state(self, state):
        self.episode = state["episode"]  # but not the step


class Large(Counter):
    def step(self, action):
        obs, reward, *rest = super().step(action)
        return obs, 1e6 * reward, *rest


def vector_only(num_envs):
    return VectorWrapper(SyncVectorEnv([Counter] * num_envs))


@pytest.mark.parametrize("env", ["CartPole-v1", "rookery/TMaze-v0", "rookery/CartPoleMasked-v0"])
def test_a_good_environment(env):
    report = check(Config(env), 400)
    assert report.ok and not report.warnings
    assert report.deterministic and report.convention and report.finite and report.in_space and report.restorable
    assert report.episodes > 5 and report.mean_length > 5 and report.steps + report.episodes >= 396
    assert report.vector_speed > 0 and report.single_speed > 0
    assert report.lines()[0] == f"{env}: ready to train on"


def test_a_report_travels_as_plain_data():
    report = check(Config("CartPole-v1"), 40)
    assert msgspec.convert(msgspec.to_builtins(report), Report) == report


@pytest.mark.parametrize(
    "env, kwargs, words",
    [
        ("rookery/Faulty-v0", {"at_step": 3}, "raised in step: RuntimeError: scripted fault"),
        ("rookery/Faulty-v0", {"fault": "raise_reset"}, "raised in reset: RuntimeError"),
        ("rookery/Faulty-v0", {"fault": "raise_init"}, "raised when it was made"),
        ("rookery/Faulty-v0", {"fault": "nan_obs", "at_step": 2}, "an observation of nan (lane 0, episode step 2)"),
        ("rookery/Faulty-v0", {"fault": "nan_reward"}, "returned a reward of nan"),
        ("rookery/Faulty-v0", {"fault": "bad_shape"}, "of shape (6,), expected (3,)"),
        ("CartPole", {}, "did you mean CartPole-v"),
        ("test_env_check:Forgetful", {}, "do not restore exactly"),
    ],
)
def test_errors(env, kwargs, words):
    report = check(Config(env, **kwargs), 80)
    assert not report.ok and any(words in error for error in report.errors), report.errors
    assert "not usable yet" in report.lines()[0] and any("error: " in line for line in report.lines())


@pytest.mark.parametrize(
    "env, kwargs, words",
    [
        ("test_env_check:Unseeded", {}, "the same seeds gave different rows"),
        ("test_env_check:Outside", {}, "observations lie outside the space"),
        ("test_env_check:Large", {}, "rewards reach 4.25e+06"),
        ("test_env_check:vector_only", {}, "no single environment"),
        ("rookery/Counter-v0", {"lengths": [10_000]}, "no episode ended"),
    ],
)
def test_warnings(env, kwargs, words):
    report = check(Config(env, **kwargs), 80)
    assert report.ok, report.errors
    assert any(words in warning for warning in report.warnings), report.warnings


def endless(limit=0, own=0):
    class Endless(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
        action_space = gymnasium.spaces.Discrete(2)

        def __init__(self):
            if own:
                self.max_steps = own

        def reset(self, *, seed=None, options=None):
            return np.zeros(1, np.float32), {}

        def step(self, action):
            return np.zeros(1, np.float32), 0.0, False, False, {}

    return gymnasium.wrappers.TimeLimit(Endless(), limit) if limit else Endless()


@pytest.mark.parametrize(
    "env, kwargs, limit",
    [
        ("Pendulum-v1", {}, 200),
        ("Pendulum-v1", {"max_episode_steps": 5000}, 5000),
        ("dmc/cartpole-swingup", {}, 1000),
        (f"{__name__}:endless", {"limit": 700}, 700),
        (f"{__name__}:endless", {"own": 400}, 400),
        (f"{__name__}:endless", {}, 0),
    ],
)
def test_only_an_environment_without_a_time_limit_is_warned_of(env, kwargs, limit):
    report = check(Config(env, **kwargs), 80)
    assert report.episodes == 0 and report.time_limit == limit
    assert any("set a time limit" in each for each in report.warnings) == (not limit)
    assert any(f"cut after {limit:,} steps" in line for line in report.lines()) == bool(limit)


def test_an_environment_that_cannot_be_restored_is_still_good():
    report = check(Config("Pendulum-v1"), 900)
    assert report.ok and not report.restorable and not report.warnings
    assert any("exact resume: no" in line for line in report.lines())
