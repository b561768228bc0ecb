"""DQN on sequences: the loss against a loop over single rows; burn-in, padding and priorities of recurrent replay."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from support_dqn import SMALL, built, minibatch, parcel_of, sequences
from support_lanes import GuessLanes, ScriptedLanes

from rookery.algorithms.dqn import DQN
from rookery.core import tree
from rookery.core.config import NetConfig, ReplayConfig
from rookery.core.types import Sequences
from rookery.ops.distributional import project
from rookery.ops.rescale import rescaled, unrescaled
from rookery.roles.learner import Learner

GRU = NetConfig(hidden=(6,), core="gru", core_size=5)
LSTM = NetConfig(hidden=(6,), core="lstm", core_size=5, core_layers=2)
BURN, ROWS = SMALL.burn_in, SMALL.sequence
S = BURN + ROWS
# Item 0 begins with an episode; 1 terminates in the middle, 2 is truncated there, 3 is truncated in its last row.
ENDS = {1: (S - 2, "terminated"), 2: (S - 3, "truncated"), 3: (S - 1, "truncated")}
MIXES = {
    "plain": {},
    "single": {"double": False, "loss": "square"},
    "rescale": {"rescale": True, "dueling": True, "stream": 4},
    "c51": {"atoms": 7},
    "rainbow": {"atoms": 7, "dueling": True, "noisy": True, "stream": 4},
}


def output_of(learner, items, seed=5):
    return learner.gradients(minibatch(learner, items, seed))


# Against a loop


def walk(nets, prefix: str, items: Sequences, item: int, noise) -> list[torch.Tensor]:
    """What the head says of every row that can be seen of one sequence, row by row from its first live one."""
    live = items.live[:, item].tolist()
    begin = live.index(True)
    state = {name: x[item : item + 1] for name, x in items.state.items()}
    if begin:
        state = tree.map(torch.zeros_like, state)
    rows: list[torch.Tensor] = [torch.empty(0)] * begin
    for t in range(begin, begin + sum(live) + 1):
        y, state = nets[f"{prefix}body"].step({"obs": items.obs["obs"][t, item : item + 1]}, state)
        rows.append(nets[f"{prefix}q"](y, noise)[0])
    return rows


def row_loss(learner, taken, reward, discount, behind_online, behind_target):
    """Loss and size of one row's error; behind: what both nets say of the state m steps later."""
    config, head = learner.algorithm.config, learner.nets["q"]
    best = head.means(behind_online if config.double else behind_target).argmax()
    if config.atoms:
        p = behind_target[best].softmax(-1)
        target = project(p[None], head.atoms, torch.tensor([reward]), torch.tensor([discount]))[0]
        loss = -(target * taken.log_softmax(-1)).sum()
        return float(loss), float(loss)
    value = behind_target[best]
    target = reward + discount * (float(unrescaled(value)) if config.rescale else float(value))
    target = float(rescaled(torch.tensor(target))) if config.rescale else target
    error = abs(target - float(taken))
    if config.loss == "square" or error <= config.huber:
        return 0.5 * error**2, error
    return config.huber * (error - 0.5 * config.huber), error


@torch.no_grad()
def naive(learner, items: Sequences, noise) -> tuple[float, list[float]]:
    config, nets = learner.algorithm.config, learner.nets
    total, priorities = 0.0, []
    for i in range(items.live.shape[1]):
        online, choice = (walk(nets, "", items, i, noise[k]) for k in (0, 1))
        target = walk(nets, "target_", items, i, noise[2])
        losses, sizes = [], []
        for t in range(BURN, S):
            if not items.live[t, i]:
                continue
            reward, m = 0.0, 0
            while True:
                row = t + m
                reward += config.gamma**m * float(items.reward[row, i])
                m += 1
                if items.terminated[row, i] or items.truncated[row, i] or m == config.n_step or row + 1 == S:
                    break
            discount = 0.0 if items.terminated[row, i] else config.gamma**m
            taken = online[t][items.action[t, i]]
            loss, size = row_loss(learner, taken, reward, discount, choice[t + m], target[t + m])
            losses.append(loss)
            sizes.append(size)
        total += float(items.weight[i]) * sum(losses)  # a sum over time, a mean over sequences
        priorities.append(config.eta * max(sizes) + (1 - config.eta) * sum(sizes) / len(sizes))
    return total / items.live.shape[1], priorities


@pytest.mark.parametrize("net", [GRU, LSTM], ids=["gru", "lstm"])
@pytest.mark.parametrize("n_step", [1, 3, 10])
@pytest.mark.parametrize("mix", MIXES)
def test_loss_and_priorities_are_those_of_a_loop_over_single_rows(mix, n_step, net):
    """P76, P78, P79, P83, P84, P85 in one: states, burn-in of both nets, padding, short sums at ends."""
    learner = built(net, n_step=n_step, **MIXES[mix])
    items = sequences(learner, ENDS)
    made = minibatch(learner, items)
    output = learner.gradients(made)
    noise = (None,) * 3 if made.noise is None else made.noise
    loss, priorities = naive(learner, items, noise)
    assert float(output.losses["all"].detach()) == pytest.approx(loss, rel=1e-4)
    np.testing.assert_allclose(output.priorities.numpy(), priorities, rtol=1e-4)


# Burn-in


def test_no_gradient_passes_through_the_burn_in():
    """P78."""
    learner = built(LSTM)
    items = sequences(learner)
    obs = items.obs["obs"].clone().requires_grad_()
    state = tree.map(lambda x: x.clone().requires_grad_(), items.state)
    learner.gradients(minibatch(learner, dataclasses.replace(items, obs={"obs": obs}, state=state)))
    assert obs.grad[:BURN].abs().max() == 0 and all(x.grad is None for x in state.values())
    assert bool((obs.grad[BURN:-1].abs().amax((1, 2)) > 0).all())


def test_each_net_warms_up_by_itself():
    """P78: changed in the target net alone, the burn-in's state changes the targets; and in the online net its own."""
    learner = built(GRU)
    items = dataclasses.replace(sequences(learner, count=6), reward=torch.zeros(S, 6))

    def parts():
        rows = learner.algorithm._sequences(learner.nets, items, (None,) * 3)
        return rows.online.detach(), rows.bootstrap

    online, bootstrap = parts()
    with torch.no_grad():
        learner.nets["target_body"].core.rnn.weight_hh_l0.add_(0.5)
    same, moved = parts()
    assert torch.equal(same, online) and not torch.isclose(moved[0], bootstrap[0]).any()
    early = items.obs["obs"].clone()
    early[: BURN - 1, 1:] += 1.0
    items = dataclasses.replace(items, obs={"obs": early})
    changed, shifted = parts()
    assert not torch.isclose(changed[0, 1:], online[0, 1:]).any()
    assert not torch.isclose(shifted[0, 1:], moved[0, 1:]).any()
    assert torch.equal(changed[:, 0], online[:, 0]), "item 0 has no rows there"


def test_an_error_in_the_burn_in_counts_for_nothing():
    """P79."""
    learner = built(GRU, n_step=3)
    items = sequences(learner, ENDS)
    first = output_of(learner, items)
    reward = items.reward.clone()
    reward[:BURN] += 1e4
    second = output_of(learner, dataclasses.replace(items, reward=reward))
    assert torch.equal(first.priorities, second.priorities)
    assert torch.equal(first.losses["all"], second.losses["all"])


def test_without_burn_in_the_stored_state_is_where_training_begins():
    learner = built(GRU, burn_in=0)
    items = sequences(learner, count=3)
    first = output_of(learner, items).priorities
    state = {"h": items.state["h"] + 1.0}
    assert not torch.isclose(output_of(learner, dataclasses.replace(items, state=state)).priorities, first).any()


# Padding


@pytest.mark.parametrize("mix", ["plain", "c51"])
def test_rows_behind_an_end_neither_count_nor_leak(mix):
    """P83, P85: whatever stands there."""
    learner = built(GRU, n_step=3, **MIXES[mix])
    items = sequences(learner, {1: (S - 3, "terminated"), 2: (S - 4, "truncated")})
    first = output_of(learner, items)
    gradient = learner.flat["all"].grad.clone()
    obs, reward, action = items.obs["obs"].clone(), items.reward.clone(), items.action.clone()
    for item, last in ((1, S - 3), (2, S - 4)):
        obs[last + 2 :, item], reward[last + 1 :, item], action[last + 1 :, item] = 7.0, -9.0, 2
    second = output_of(learner, dataclasses.replace(items, obs={"obs": obs}, reward=reward, action=action))
    assert torch.equal(first.priorities, second.priorities)
    torch.testing.assert_close(first.losses, second.losses)
    torch.testing.assert_close(learner.flat["all"].grad, gradient)
    for name in ("q", "error"):
        torch.testing.assert_close(first.metrics[name], second.metrics[name])


def test_rows_before_an_episode_do_not_reach_its_state():
    """P84: the state is zero before the episode's first row, whatever the rows before it did to it."""
    learner = built(LSTM)
    items = sequences(learner)
    first = output_of(learner, items).priorities
    obs, state = items.obs["obs"].clone(), tree.map(torch.clone, items.state)
    obs[:BURN, 0] = 5.0
    for leaf in state.values():
        leaf[0] = 3.0
    second = output_of(learner, dataclasses.replace(items, obs={"obs": obs}, state=state)).priorities
    assert torch.equal(first, second)


def test_a_truncated_episode_s_final_observation_is_the_bootstrap():
    learner = built(GRU)
    items = sequences(learner, ENDS)
    first = output_of(learner, items).priorities
    for item, row, matters in ((1, S - 1, False), (2, S - 2, True), (3, S, True)):  # behind the last live row
        obs = items.obs["obs"].clone()
        obs[row, item] += 3.0
        moved = output_of(learner, dataclasses.replace(items, obs={"obs": obs})).priorities
        assert (moved != first).nonzero().flatten().tolist() == ([item] if matters else [])


# The way of the data


def as_sequences(parcel: dict[str, np.ndarray]) -> Sequences:
    t = {name: torch.from_numpy(x) for name, x in parcel.items()}
    rows = {name: t[name].transpose(0, 1) for name in ("action", "reward", "terminated", "truncated", "live")}
    return Sequences(
        obs={"obs": t["obs/obs"].transpose(0, 1)}, **rows, weight=torch.ones(len(t["version"])), version=t["version"],
        state={name.removeprefix("state/"): x for name, x in t.items() if name.startswith("state/")},
    )  # fmt: skip


@pytest.mark.parametrize("burn_in", [0, 3])
@pytest.mark.parametrize("rescale", [False, True])
@pytest.mark.parametrize("task", ["symbol", "scripted"])
def test_an_actor_s_priorities_are_the_learner_s(task, rescale, burn_in):
    """P72, P76: from stored states the learner's values are those that were seen when acting."""
    lanes = ScriptedLanes() if task == "scripted" else GuessLanes("symbol", count=4, length=7)
    memory = ReplayConfig(batch=8, min_size=8, start="actor")
    config = dataclasses.replace(SMALL, unroll=5, burn_in=burn_in, replay=memory, n_step=3, rescale=rescale)
    learner = Learner(DQN(config, LSTM, lanes.spec, 4), seed=1)  # targets start equal
    parcel = parcel_of(learner, lanes, unrolls=10)
    output = output_of(learner, as_sequences(parcel))
    assert len(parcel["priority"]) > 20 and not parcel["live"].all()
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if task == "scripted" else {"rtol": 0, "atol": 1e-6}
    np.testing.assert_allclose(parcel["priority"], output.priorities.numpy(), **tolerance)


@pytest.mark.parametrize("mix", MIXES)
def test_updates_on_sequences_lower_their_loss(mix):
    learner = built(GRU, shake=0.1, target_period=1000, lr=2e-2, n_step=3, **MIXES[mix])
    items = sequences(learner, ENDS)
    losses = [learner.step(items, 0.0).metrics["loss"] for _ in range(60)]
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5])
    assert learner.algorithm.work(learner.nets) == 8 * S * learner_size(learner)


def learner_size(learner) -> int:
    return sum(p.numel() for name in ("body", "q") for p in learner.nets[name].parameters())


def test_statistics_of_observations_are_those_of_live_rows():
    learner = built(dataclasses.replace(GRU, normalize_obs=True))
    items = sequences(learner, ENDS)
    learner.step(items, 0.0)
    running = learner.nets["normalizer"].leaves[0].running
    assert running.count == items.live.sum()
    torch.testing.assert_close(running.mean.float(), items.obs["obs"][:-1][items.live].mean(0))
