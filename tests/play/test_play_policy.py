"""A loaded policy: which checkpoint, and observations in every form a user may have them in."""

import numpy as np
import pytest

import rookery
from rookery.core.errors import UsageError

NESTED = """
import gymnasium
import numpy as np

class Nested(gymnasium.Env):
    observation_space = gymnasium.spaces.Dict({
        "arm": gymnasium.spaces.Dict({"angle": gymnasium.spaces.Box(-1, 1, (2,), np.float32)}),
        "goal": gymnasium.spaces.Discrete(3),
    })
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        self.t += 1
        return self.observation_space.sample(), 1.0, self.t == 5, False, {}
"""


def trained(env, out, **fields):
    return rookery.train("ppo", env=env, env_steps=256, quiet=True, out=str(out), envs_per_actor=2, **fields).path


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained("CartPole-v1", tmp_path_factory.mktemp("policy") / "run")


def test_a_choice_that_does_not_exist_is_refused_with_the_choices(run):
    with pytest.raises(UsageError, match=r"which='bset' is not a choice; which is 'newest' or 'best'"):
        rookery.load(run, which="bset")


def test_a_batch_is_an_array_or_a_dict_of_arrays(run):
    policy = rookery.load(run)
    obs = np.random.default_rng(0).normal(size=(3, 4))
    alone = [policy.act(each)[0] for each in obs]
    for batch in (obs, obs.tolist(), {"obs": obs}, {"obs": obs.astype(np.float32)}):
        action, _ = policy.act_batch(batch, policy.initial_state(3))
        assert [policy.spec_action(each) for each in action] == alone


@pytest.mark.parametrize("obs, message", [
    (np.zeros(4), r"shape \(4,\), expected \(B, 4\): a batch of observations; `act` takes a single one"),
    (np.zeros((2, 5)), r"shape \(2, 5\), expected \(B, 4\)"),
    ({"speed": np.zeros((2, 4))}, r"reads 'obs' of an observation, and was given a dict of speed"),
])  # fmt: skip
def test_a_batch_of_another_form_is_refused(run, obs, message):
    policy = rookery.load(run)
    with pytest.raises(UsageError, match=message):
        policy.act_batch(obs, policy.initial_state(2))


def test_a_batch_of_nested_dicts(tmp_path, monkeypatch):
    (tmp_path / "nested_env.py").write_text(NESTED)
    monkeypatch.syspath_prepend(tmp_path)
    policy = rookery.load(trained("nested_env:Nested", tmp_path / "run"), trust=("nested_env",))
    angle, goal = np.linspace(-1, 1, 6, dtype=np.float32).reshape(3, 2), np.array([0, 1, 2])
    nested, _ = policy.act_batch({"arm": {"angle": angle}, "goal": goal}, policy.initial_state(3))
    flat, _ = policy.act_batch({"arm.angle": angle, "goal": goal}, policy.initial_state(3))
    alone = [policy.act({"arm": {"angle": a}, "goal": g})[0] for a, g in zip(angle, goal)]
    assert nested.tolist() == flat.tolist() == alone
    with pytest.raises(UsageError, match=r"'goal' has shape \(2,\), expected \(3\)"):
        policy.act_batch({"arm": {"angle": angle}, "goal": goal[:2]}, policy.initial_state(3))
