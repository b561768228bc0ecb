"""What a step costs: exact on a clock that only the environment moves."""

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from rookery.envs import cost
from rookery.envs.lanes import SyncLanes


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Priced(gymnasium.Env):
    """Steps and resets that take so many seconds, and every tenth step ten times as long."""

    observation_space, action_space = spaces.Box(-1, 1, (1,), np.float32), spaces.Discrete(2)

    def __init__(self, clock: Clock, step: float, reset: float = 0.0, length: int = 10**9, first: float = 0.0):
        self.clock, self.price, self.again, self.length, self.first = clock, step, reset, length, first
        self.t = self.taken = 0

    def reset(self, *, seed=None, options=None):
        self.clock.now += self.again
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.clock.now += (self.first if not self.taken else 0.0) + self.price * (10 if self.taken % 10 == 3 else 1)
        self.t, self.taken = self.t + 1, self.taken + 1
        return np.zeros(1, np.float32), 0.0, self.t == self.length, False, {}


def measured(monkeypatch, **how) -> tuple[float | None, Priced]:
    clock = Clock()
    monkeypatch.setattr(cost, "perf_counter", clock)
    env = Priced(clock, **how)
    return cost.step_seconds(SyncLanes("Priced", [env])), env


def test_a_few_long_steps_do_not_count(monkeypatch):
    seconds, env = measured(monkeypatch, step=1e-4)
    assert seconds == pytest.approx(1e-4) and env.taken == cost.STEPS


def test_resets_count_by_how_often_they_come(monkeypatch):
    seconds, _ = measured(monkeypatch, step=1e-4, reset=0.01, length=5)
    assert seconds == pytest.approx(1e-4 + 0.01 / 5, rel=0.1)


def test_it_ends_when_the_time_is_over(monkeypatch):
    seconds, env = measured(monkeypatch, step=0.05)
    assert seconds == pytest.approx(0.05) and env.taken == cost.LEAST
    seconds, env = measured(monkeypatch, step=20.0)
    assert seconds == pytest.approx(20.0) and env.taken == 1


def test_what_the_first_step_loads_does_not_count(monkeypatch):
    assert measured(monkeypatch, step=1e-5, first=2.0)[0] == pytest.approx(1e-5)


def test_an_environment_that_raises_has_no_cost():
    class Raises(Priced):
        def step(self, action):
            raise SystemExit("no")

    assert cost.step_seconds(SyncLanes("Raises", [Raises(Clock(), 0.0)])) is None
