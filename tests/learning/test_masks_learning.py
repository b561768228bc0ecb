"""Runs with masks of legal actions: a million steps without an illegal one, and a task that only masks make learnable.

The reward is the number of the action, as a share; the best action is the highest legal one, and only the mask says
which that is. A policy that takes the same action whatever the mask gets half of that.
"""

from __future__ import annotations

import pytest
from support_masks import ManyMaskable, share_of_best

import rookery

PPO = {"unroll": 32, "epochs": 1, "minibatches": 8, "lr": 3e-3}
REPLAY = {"capacity": 50_000, "min_size": 5_000, "batch": 256, "samples_per_insert": 0.5, "save": False}
DQN = {"unroll": 8, "lr": 2e-3, "target_period": 50, "epsilon_share": 0.5, "gamma": 0.5, "replay": REPLAY}
MEMORY = {"core": "gru", "core_size": 8}
CASES = {
    "ppo": ("ppo", 400_000, PPO, {}, False),
    "ppo, branches, memory": ("ppo", 300_000, PPO | {"chunk": 32}, MEMORY, True),
    "dqn": ("dqn", 290_000, DQN, {}, False),
    "c51": ("c51", 60_000, DQN | {"atoms": 11, "v_min": 0.0, "v_max": 2.0}, {}, False),
}


def played(tmp_path, recipe: str, env_steps: int, algo: dict, net: dict, multi: bool) -> float:
    """Train, and play greedily: the mean reward as a share of the best one."""
    run = rookery.train(
        recipe, env=ManyMaskable, env_kwargs={"multi": multi}, env_steps=env_steps, algo=algo, topology="serial",
        net={"hidden": (16,)} | net, actors=1, envs_per_actor=512, out=str(tmp_path / recipe), quiet=True, seed=1,
    )  # fmt: skip
    result = rookery.evaluate(run, episodes=64, envs=64)
    return share_of_best(result.return_mean / result.length_mean, multi)


@pytest.fixture(autouse=True)
def nothing_counted(monkeypatch):
    monkeypatch.setattr(ManyMaskable, "steps", 0)
    monkeypatch.setattr(ManyMaskable, "illegal", 0)


def test_a_million_steps_are_legal_and_the_best_actions_are_learnt(tmp_path):
    for name, case in CASES.items():
        share = played(tmp_path / name, *case)
        assert ManyMaskable.illegal == 0, name
        assert share >= 0.97, (name, share)
    assert ManyMaskable.steps >= 1_000_000


@pytest.mark.parametrize("name", ["ppo", "dqn"])
def test_without_masks_it_is_not_learnt(tmp_path, name):
    recipe, _, algo, net, multi = CASES[name]
    share = played(tmp_path, recipe, 100_000, algo, net | {"action_mask": "off"}, multi)
    assert share <= 0.6
    assert ManyMaskable.illegal > 0.3 * ManyMaskable.steps
