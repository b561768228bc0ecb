"""A loaded policy: which checkpoint, and observations in every form a user may have them in."""

import numpy as np
import pytest
import torch

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


def test_a_batch_is_an_array_a_tensor_a_list_or_a_dict_of_these(run):
    policy = rookery.load(run)
    obs = np.random.default_rng(0).normal(size=(3, 4))
    alone = [policy.predict(each)[0] for each in obs]
    assert [type(each) for each in alone] == [int] * 3
    tensor = torch.tensor(obs, requires_grad=True)
    for batch in (obs, obs.tolist(), tensor, {"obs": obs}, {"obs": obs.astype(np.float32)}, list(tensor.detach())):
        action, state = policy.predict(batch)
        assert action.tolist() == alone and state is None
    assert [policy.predict(tensor[0])[0], policy.predict({"obs": obs[0].tolist()})[0]] == [alone[0]] * 2


@pytest.mark.parametrize("obs, given, message", [
    (np.zeros(5), {}, r"shape \(5,\); one observation has \(4,\), a batch of B has \(B, 4\)"),
    (np.zeros((2, 5)), {}, r"shape \(2, 5\); one observation has"),
    (np.zeros((1, 1, 4)), {}, r"shape \(1, 1, 4\); one observation has"),
    (np.zeros((0, 4)), {}, "the batch of observations is empty"),
    ([[0.0], [1.0, 2.0]], {}, "'obs' cannot be read as an array"),
    ((np.zeros(4), {}), {}, r"a tuple of an observation and an info: `obs, info = env.reset\(\)`"),
    ("left", {}, "'obs' cannot be read as an array of numbers"),
    ({"speed": np.zeros((2, 4))}, {}, r"reads 'obs' of an observation, and was given a dict of speed"),
    (np.zeros(4), {"state": {"h": torch.zeros(1, 8)}}, "the state is not one that this policy has returned"),
    (np.zeros((2, 4)), {"episode_start": [True] * 3}, r"episode_start has shape \(3,\); give one number, or \(2,\)"),
    (np.zeros(4), {"action_mask": [True, False]}, "this policy has learnt without masks"),
])  # fmt: skip
def test_what_is_neither_one_observation_nor_a_batch_is_refused(run, obs, given, message):
    with pytest.raises(UsageError, match=message):
        rookery.load(run).predict(obs, **given)


def test_a_batch_of_nested_dicts(tmp_path, monkeypatch):
    (tmp_path / "nested_env.py").write_text(NESTED)
    monkeypatch.syspath_prepend(tmp_path)
    policy = rookery.load(trained("nested_env:Nested", tmp_path / "run"), trust=("nested_env",))
    angle, goal = np.linspace(-1, 1, 6, dtype=np.float32).reshape(3, 2), np.array([0, 1, 2])
    nested, _ = policy.predict({"arm": {"angle": angle}, "goal": goal})
    flat, _ = policy.predict({"arm.angle": angle, "goal": goal})
    alone = [policy.predict({"arm": {"angle": a}, "goal": g})[0] for a, g in zip(angle, goal)]
    assert nested.tolist() == flat.tolist() == alone
    with pytest.raises(UsageError, match=r"batches of different sizes: 'arm.angle' of 3, 'goal' of 2"):
        policy.predict({"arm": {"angle": angle}, "goal": goal[:2]})
    with pytest.raises(UsageError, match=r"batches of different sizes: 'arm.angle' of 3, 'goal' of none"):
        policy.predict({"arm": {"angle": angle}, "goal": 1})
    with pytest.raises(UsageError, match="'goal' has fractions"):
        policy.predict({"arm": {"angle": angle}, "goal": goal + 0.5})
