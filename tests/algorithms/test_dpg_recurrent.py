"""Recurrent deterministic policy gradients: sequences with stored states, burn-in, padding, n steps within them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from support_dpg import CRITICS, built, drawn, score

from rookery.core.config import NetConfig, ReplayConfig
from rookery.core.types import Explore, Sequences

NETS = {core: NetConfig(hidden=(8,), core=core, core_size=5) for core in ("gru", "lstm")}
ESTIMATE = ReplayConfig(batch=16, min_size=16, start="actor")
FRAME = {"sequence": 5, "burn_in": 3, "overlap": 2, "n_step": 2}
# Of each lane: rows it lacks before, live rows, and how it ends; S = 8 rows in all.
LANES = [(0, 8, ""), (0, 8, "terminated"), (0, 6, "terminated"), (0, 6, "truncated"), (2, 6, ""), (3, 4, "truncated"),
         (3, 5, "terminated"), (0, 4, "truncated")]  # fmt: skip
S = 8


def apart(core: str = "gru", normalize_obs: bool = False, **changes):
    """A learner whose target networks differ from the others."""
    net = dataclasses.replace(NETS[core], normalize_obs=normalize_obs)
    return built(net=net, replay=ESTIMATE, gamma=0.9, **(FRAME | changes))


def recurrent(core: str = "gru", **changes):
    learner = apart(core, **changes)
    for name in ("policy", "critic"):  # theta = theta-
        learner.nets[f"target_{name}"].load_state_dict(learner.nets[name].state_dict())
    return learner


def played(learner, seed: int = 0) -> tuple[Sequences, dict[str, np.ndarray]]:
    """Sequences as acting makes them, and the columns an actor would estimate priorities from."""
    alg, nets, rng, count = learner.algorithm, learner.nets, torch.Generator().manual_seed(seed), len(LANES)
    before, length = (torch.tensor([lane[i] for lane in LANES]) for i in (0, 1))
    row = torch.arange(S + 1).unsqueeze(1)
    live = (row[:-1] >= before) & (row[:-1] < before + length)
    shown = (row >= before) & (row <= before + length)  # the final observation, too
    obs = torch.randn(S + 1, count, 3, generator=rng) * shown.unsqueeze(2)
    ends = {kind: (row[:-1] == before + length - 1) & torch.tensor([lane[2] == kind for lane in LANES])
            for kind in ("terminated", "truncated")}  # fmt: skip
    # Lanes that do not begin with an episode come with a state from before.
    begun = 0.5 * (before == 0).view(-1, 1, 1)
    state = {
        name: {leaf: begun * torch.randn(x.shape, generator=rng) for leaf, x in part.items()}
        for name, part in alg.initial_state(nets, count).items()
    }
    first, look, rows = state, Explore(rng, np.zeros(count, np.int64)), []
    with torch.inference_mode():
        for t in range(S + 1):
            output = alg.act(nets, {"obs": obs[t]}, state, look)
            rows.append(output)
            alive = live[t] if t < S else live[-1]
            state = {name: {leaf: x * alive.view(-1, 1, 1) for leaf, x in output.state[name].items()} for name in state}
    action, q, best = (torch.stack([pick(row) for row in rows]).clone() for pick in
                       (lambda o: o.action, lambda o: o.extras["q"], lambda o: o.extras["q_max"]))  # fmt: skip
    reward = torch.randn(S, count, generator=rng) * live
    data = Sequences(
        {"obs": obs}, action[:-1] * live.unsqueeze(2), reward, ends["terminated"], ends["truncated"], live, first,
        torch.rand(count, generator=rng) + 0.1, torch.zeros(count, dtype=torch.int64),
    )  # fmt: skip
    columns = {"reward": reward, **ends, "live": live, "q": q[:-1], "q_max": best[:-1]}
    items = {name: x.T.numpy().copy() for name, x in columns.items()}
    return data, items | {"next_q": q[-1].numpy(), "next_q_max": best[-1].numpy()}


@pytest.mark.parametrize("core", NETS)
@pytest.mark.parametrize("critic, tolerance", [("scalar", 1e-5), ("categorical", 1e-3), ("mixture", 1e-4)])
@pytest.mark.parametrize("n_step", [1, 2, 9])
def test_replayed_sequences_give_the_values_that_acting_saw(core, critic, tolerance, n_step):
    """Stored states, burn-in, resets behind padding, n steps and their ends: all of it, or the priorities differ."""
    wide = {"v_min": -50.0, "v_max": 50.0, "atoms": 101}
    learner = recurrent(core, critic=critic, n_step=n_step, **wide)
    data, items = played(learner)
    start = learner.algorithm.start_priorities(items)
    assert start.shape == (len(LANES),) and start.dtype == np.float32 and start.min() > 0
    found = score(learner, data).priorities
    np.testing.assert_allclose(found.numpy(), start, rtol=0, atol=tolerance * max(1, np.abs(start).max()))


def errors_by_hand(reward, q, best, burn_in: int) -> list[np.ndarray]:
    """Of the live rows of each lane; reward and q are [N, S], best [N, S+1].

    Two steps, then the value; one less at a truncation and at the rows' end; none behind a termination.
    """
    errors = []
    for lane, (before, length, kind) in enumerate(LANES):
        errors.append([])
        for t in range(max(before, burn_in), before + length):
            m = min(2, before + length - t)
            total = sum(0.9**k * reward[lane, t + k] for k in range(m))
            if kind != "terminated" or t + m < before + length:
                total += 0.9**m * best[lane, t + m]
            errors[-1].append(abs(total - q[lane, t]))
    return [np.array(each) for each in errors]


def test_targets_by_hand():
    learner = recurrent(n_step=2, burn_in=0, sequence=S, overlap=2, eta=0.0)
    data, items = played(learner)
    best = np.concatenate([items["q_max"], items["next_q_max"][:, None]], 1)
    errors = errors_by_hand(items["reward"], items["q"], best, burn_in=0)
    found = score(learner, data).priorities
    np.testing.assert_allclose(found.numpy(), [each.mean() for each in errors], atol=1e-5)


def walk(body, data: Sequences, name: str) -> torch.Tensor:
    """Features of all rows [S+1, N, F], one after the other, from the stored state or from behind the rows it lacks."""
    state, rows = data.state[name], []
    for obs, alive in zip(data.obs["obs"], [*data.live, data.live[-1]]):
        row, state = body.step({"obs": obs}, state)
        state = {leaf: x * alive.view(-1, 1, 1) for leaf, x in state.items()}
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("core", NETS)
def test_the_loss_is_that_of_a_loop_in_which_both_target_networks_say_what_follows(core):
    """P78, P89: each network with a state of its own, and an error's weight is that of its sequence."""
    learner = apart(core, eta=0.0)
    data, items = played(learner)
    output, nets = score(learner, data), learner.nets
    with torch.no_grad():
        best = nets["target_policy"].action(walk(nets["target_policy"], data, "policy"))
        later = nets["target_critic"].value(walk(nets["target_critic"], data, "critic"), best)
        q = nets["critic"].value(walk(nets["critic"], data, "critic")[:-1], data.action)
    errors = errors_by_hand(items["reward"], q.T.numpy(), later.T.numpy(), burn_in=FRAME["burn_in"])
    np.testing.assert_allclose(output.priorities.numpy(), [each.mean() for each in errors], atol=1e-5)
    squares = sum(weight * (each**2).sum() / 2 for weight, each in zip(data.weight.tolist(), errors))
    assert output.losses["critic"].item() == pytest.approx(squares / sum(map(len, errors)), rel=1e-5)


@pytest.mark.parametrize("critic", CRITICS)
def test_importance_weights_scale_the_critics_loss_alone(critic):
    learner = apart(critic=critic)
    data, _ = played(learner)
    output, heavy = (score(learner, each) for each in (data, dataclasses.replace(data, weight=7 * data.weight)))
    torch.testing.assert_close(heavy.losses["critic"], 7 * output.losses["critic"])
    assert torch.equal(heavy.losses["actor"], output.losses["actor"])
    assert torch.equal(heavy.priorities, output.priorities)


@pytest.mark.parametrize("critic", CRITICS)
def test_burn_in_passes_no_gradient_and_changes_the_values(critic):
    learner = recurrent(critic=critic)
    data, _ = played(learner)
    obs = data.obs["obs"].clone().requires_grad_()
    output = score(learner, dataclasses.replace(data, obs={"obs": obs}))
    for loss in output.losses.values():
        gradient = torch.autograd.grad(loss, obs, retain_graph=True)[0].abs().sum(2)
        assert gradient[:3].sum() == 0 and gradient[3:8].sum() > 0
    with torch.no_grad():
        obs[1] += 1
    moved = score(learner, dataclasses.replace(data, obs={"obs": obs.detach()}))
    assert not torch.equal(moved.losses["critic"], output.losses["critic"])


def test_errors_within_the_burn_in_do_not_count():
    learner = recurrent()
    data, items = played(learner)
    reward = data.reward.clone()
    reward[:3] = 1e6
    loud = dataclasses.replace(data, reward=reward)
    one, two = (score(learner, each) for each in (data, loud))
    assert torch.equal(one.priorities, two.priorities) and torch.equal(one.losses["critic"], two.losses["critic"])
    start = learner.algorithm.start_priorities(items | {"reward": reward.T.numpy().copy()})
    assert np.array_equal(start, learner.algorithm.start_priorities(items))


def test_rows_that_are_not_live_weigh_nothing():
    learner = recurrent()
    data, _ = played(learner)
    one = learner.gradients(drawn(learner.algorithm, data))
    gradients = {group: flat.grad.clone() for group, flat in learner.flat.items()}
    obs, action, reward = data.obs["obs"].clone(), data.action.clone(), data.reward.clone()
    dead = ~data.live
    action[dead], reward[dead] = 0.7, 55.0
    final = torch.cat([torch.zeros_like(dead[:1]), data.live])  # an observation behind a live row counts
    obs[~final & torch.cat([dead, dead[-1:]])] = 9.0
    other = dataclasses.replace(data, obs={"obs": obs}, action=action, reward=reward)
    two = learner.gradients(drawn(learner.algorithm, other))
    torch.testing.assert_close(one.priorities, two.priorities)
    for group, flat in learner.flat.items():
        torch.testing.assert_close(flat.grad, gradients[group])


def test_losses_are_means_over_live_rows():
    learner = recurrent(eta=0.0)
    data, _ = played(learner)
    data = dataclasses.replace(data, weight=torch.ones(len(LANES)))
    once = score(learner, data)
    twice = Sequences(*[
        {"obs": torch.cat([x["obs"]] * 2, 1)} if name == "obs"
        else {k: {leaf: torch.cat([y] * 2) for leaf, y in part.items()} for k, part in x.items()} if name == "state"
        else torch.cat([x] * 2, 0 if name in ("weight", "version") else 1)
        for name, x in ((f.name, getattr(data, f.name)) for f in dataclasses.fields(data))
    ])  # fmt: skip
    doubled = score(learner, twice)
    for group in once.losses:
        torch.testing.assert_close(once.losses[group], doubled.losses[group])


def test_target_networks_warm_up_their_own_states():
    learner = recurrent()
    data, _ = played(learner)
    before = score(learner, data).priorities
    with torch.no_grad():
        for parameter in learner.nets["target_critic"].core.parameters():
            parameter.mul_(0.5)
    assert not torch.allclose(score(learner, data).priorities, before)


def test_statistics_of_observations_are_those_of_live_rows():
    learner = apart(normalize_obs=True)
    data, _ = played(learner)
    learner.step(data, 0.0)
    obs, live = data.obs["obs"], data.obs["obs"][:-1][data.live]
    expected = (obs - live.mean(0)) / live.std(0, correction=0)
    torch.testing.assert_close(learner.nets["normalizer"](data.obs)["obs"], expected, atol=1e-4, rtol=1e-4)


def test_a_recurrent_policy_learns_to_remember():
    """The cue is shown in the first of three rows and is the right action in the last."""
    learner = built(
        net=NetConfig(hidden=(8,), core="gru", core_size=16), sequence=3, burn_in=0, overlap=0, n_step=1, gamma=0.9,
        actor_hidden=(16,), critic_hidden=(32,), actor_lr=5e-3, critic_lr=1e-2, target_period=20,
    )  # fmt: skip
    rng, count, nets = torch.Generator().manual_seed(5), 48, learner.nets
    live = torch.ones(3, count, dtype=torch.bool)
    end = torch.zeros_like(live)
    end[-1] = True

    def cues() -> tuple[torch.Tensor, torch.Tensor]:
        cue = torch.randint(2, (count,), generator=rng) * 1.4 - 0.7
        obs = torch.zeros(4, count, 3)
        obs[0, :, 0] = cue
        return cue, obs

    for _ in range(250):
        cue, obs = cues()
        action = torch.rand(3, count, 2, generator=rng) * 2 - 1
        reward = torch.zeros(3, count)
        reward[-1] = -(action[-1] - cue.unsqueeze(1)).square().sum(1)
        learner.step(Sequences({"obs": obs}, action, reward, end, torch.zeros_like(end), live,
                               learner.algorithm.initial_state(nets, count), torch.ones(count),
                               torch.zeros(count, dtype=torch.int64)), 0.0, tell=False)  # fmt: skip
    cue, obs = cues()
    state = learner.algorithm.initial_state(nets, count)
    for t in range(3):
        output = learner.algorithm.act(nets, {"obs": obs[t]}, state, None)
        state = output.state
    error = (output.action - cue.unsqueeze(1)).abs().mean().item()
    assert error < 0.4, error  # 0.7 without memory
