"""DQN learns values that are known: of a chain of states from all its transitions, of a cue from sequences."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from rookery.algorithms.dqn import DQN, DQNConfig
from rookery.core.config import NetConfig, ReplayConfig
from rookery.core.types import ActionSpec, EnvSpec, Leaf, Sequences, Transitions
from rookery.ops.rescale import unrescaled
from rookery.roles.learner import Learner

STATES, GAMMA = 4, 0.8
CHOICE = ActionSpec("discrete", choices=(2,), starts=(0,))


# A chain: left and right; a step right from the last state is worth 1 and ends it, a step left from the first is
# worth 0.3 and leads nowhere.


def moved(state: int, action: int) -> tuple[float, bool, int]:
    """Reward, whether the episode ends, next state."""
    if action == 1:
        return (1.0, True, state) if state == STATES - 1 else (0.0, False, state + 1)
    return (0.3, False, state) if state == 0 else (0.0, False, state - 1)


def chain(n_step: int) -> Transitions:
    """Every state and action once, followed by the best actions for n-step sums."""
    best = exact().argmax(1).tolist()
    rows = []
    for start, first in itertools.product(range(STATES), range(2)):
        state, action, total, discount = start, first, 0.0, 1.0
        for _ in range(n_step):
            reward, ends, state = moved(state, action)
            total, discount, action = total + discount * reward, discount * (0.0 if ends else GAMMA), best[state]
            if ends:
                break
        rows.append((start, first, total, discount, state))
    start, action, total, discount, state = zip(*rows)
    hot = torch.eye(STATES)
    return Transitions(
        obs={"obs": hot[list(start)]}, action=torch.tensor(action), reward=torch.tensor(total),
        discount=torch.tensor(discount), next_obs={"obs": hot[list(state)]}, weight=torch.ones(len(rows)),
        version=torch.zeros(len(rows), dtype=torch.int64),
    )  # fmt: skip


def exact() -> torch.Tensor:
    """Q* by value iteration, [states, actions]."""
    q = torch.zeros(STATES, 2, dtype=torch.float64)
    for _ in range(200):
        old = q.clone()
        for state, action in itertools.product(range(STATES), range(2)):
            reward, ends, after = moved(state, action)
            q[state, action] = reward + (0.0 if ends else GAMMA * old[after].max())
    return q


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"double": False, "optimizer": "rmsprop", "lr": 0.02, "optimizer_eps": 1e-4},
        {"dueling": True, "stream": 16, "n_step": 3, "loss": "square"},
        {"rescale": True},
        {"atoms": 21, "v_min": -0.5, "v_max": 2.0},
        {"atoms": 21, "v_min": -0.5, "v_max": 2.0, "dueling": True, "noisy": True, "n_step": 2, "noisy_sigma": 0.1},
    ],
    ids=["double", "rmsprop", "dueling", "rescale", "c51", "rainbow"],
)
def test_the_values_of_a_chain_are_learnt(changes):
    config = DQNConfig(
        **{"lr": 0.03, "optimizer_eps": 1e-5, "gamma": GAMMA, "target_period": 10} | changes,
        replay=ReplayConfig(batch=2 * STATES),
    )
    spec = EnvSpec("chain", {"obs": Leaf((STATES,), "float32", "vector")}, CHOICE)
    learner = Learner(DQN(config, NetConfig(hidden=()), spec, 1), seed=1)
    items = chain(config.n_step)
    for _ in range(300):
        report = learner.step(items, 0.0)
    head = learner.nets["q"]
    with torch.no_grad():
        values = head.means(head(torch.eye(STATES)))
        if config.rescale:
            values = unrescaled(values)
    torch.testing.assert_close(values.double(), exact(), rtol=0, atol=0.05)
    if not config.atoms:
        assert float(report.priorities.max()) < 0.05
    else:
        assert report.metrics["mass_at_ends"] < 0.01


# A cue is shown in the first row; in the last, its name is worth 1. Nothing else is ever seen.

LENGTH = 3


def cues() -> Sequences:
    """Both cues with every course of actions; the rows before an episode (burn-in) and one behind it are missing."""
    courses = list(itertools.product(range(2), repeat=1 + LENGTH))
    count, burn_in, rows = len(courses), 1, LENGTH + 1
    shape = (burn_in + rows, count)
    obs, reward = torch.zeros(burn_in + rows + 1, count, 2), torch.zeros(shape)
    action = torch.zeros(shape, dtype=torch.int64)
    terminated, live = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
    live[burn_in : burn_in + LENGTH] = True
    terminated[burn_in + LENGTH - 1] = True
    for i, (cue, *course) in enumerate(courses):
        obs[burn_in, i, cue] = 1.0
        action[burn_in : burn_in + LENGTH, i] = torch.tensor(course)
        reward[burn_in + LENGTH - 1, i] = float(course[-1] == cue)
    return Sequences(
        obs={"obs": obs}, action=action, reward=reward, terminated=terminated,
        truncated=torch.zeros(shape, dtype=torch.bool), live=live, state={}, weight=torch.ones(count),
        version=torch.zeros(count, dtype=torch.int64),
    )  # fmt: skip


@pytest.mark.parametrize(
    "core, changes",
    [
        ("gru", {}),
        ("lstm", {"dueling": True, "rescale": True}),
        ("gru", {"atoms": 11, "v_min": -0.5, "v_max": 1.5}),
    ],
    ids=["gru", "lstm", "c51"],
)
def test_a_cue_is_remembered_and_valued(core, changes):
    config = DQNConfig(
        **changes, lr=0.02, optimizer_eps=1e-5, gamma=GAMMA, target_period=5, sequence=LENGTH + 1, burn_in=1, overlap=0,
        replay=ReplayConfig(batch=2 ** (1 + LENGTH), start="actor"),
    )  # fmt: skip
    spec = EnvSpec("cue", {"obs": Leaf((2,), "float32", "vector")}, CHOICE)
    learner = Learner(DQN(config, NetConfig(hidden=(), core=core, core_size=12), spec, 1), seed=1)
    algorithm, items = learner.algorithm, cues()
    items = dataclasses.replace(items, state=algorithm.initial_state(learner.nets, len(items.weight)))
    for _ in range(150):
        learner.step(items, 0.0)
    state, head = algorithm.initial_state(learner.nets, 2), learner.nets["q"]
    for row in range(LENGTH):
        with torch.no_grad():
            seen = torch.eye(2) if row == 0 else torch.zeros(2, 2)
            x, state = learner.nets["body"].step({"obs": seen}, state)
            values = head.means(head(x))
            if config.rescale:
                values = unrescaled(values)
        known = torch.eye(2) if row == LENGTH - 1 else torch.full((2, 2), GAMMA ** (LENGTH - 1 - row))
        torch.testing.assert_close(values, known, rtol=0, atol=0.05)
