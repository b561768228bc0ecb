"""Acting with deterministic policies: noise and its memory, bounds, greedy acting, publishing, start priorities."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from support_dpg import CRITICS, DICT, SPEC, algorithm, batch, built, policy_of, q_of, score
from support_lanes import BOX, ScriptedLanes

from rookery.algorithms.dpg import DPG
from rookery.core.config import NetConfig, ReplayConfig
from rookery.core.types import Explore, Replay
from rookery.core.unroll import Unroll, empty_unroll, unroll_shapes
from rookery.ops.noise import LOWEST
from rookery.roles.actor import Actor
from rookery.roles.weights import Published

ESTIMATE = ReplayConfig(batch=16, min_size=16, start="actor")
CORE = NetConfig(hidden=(8,), core="gru", core_size=5)


def explore(lanes: int = 4, seed: int = 0) -> Explore:
    return Explore(torch.Generator().manual_seed(seed), np.arange(lanes))


def observe(lanes: int = 4, seed: int = 0) -> dict[str, torch.Tensor]:
    return {"obs": torch.randn(lanes, 3, generator=torch.Generator().manual_seed(seed))}


def acts(learner, times: int, obs: dict, lanes: int) -> np.ndarray:
    """Noise actually added, [times, lanes, 2]."""
    alg, nets, look = learner.algorithm, learner.nets, explore(lanes)
    state, found = alg.initial_state(nets, lanes), []
    with torch.inference_mode():
        for _ in range(times):
            output = alg.act(nets, obs, state, look)
            state = output.state
            found.append(np.asarray(output.action))
        return np.stack(found) - policy_of(nets, "policy", obs).numpy()


@pytest.mark.parametrize("noise", ["gaussian", "ou"])
def test_noisy_actions_stay_in_the_box_and_touch_its_walls(noise):
    learner = built(noise=noise, noise_scale=2.0)
    alg, state, look = learner.algorithm, learner.algorithm.initial_state(learner.nets, 4), explore()
    for seed in range(20):
        output = alg.act(learner.nets, observe(seed=seed), state, look)
        state = output.state
        assert output.action.abs().max() <= 1
    assert output.action.shape == (4, 2) and output.action.abs().max() == 1
    assert np.array_equal(output.logp, np.zeros(4, np.float32)) and output.extras == {}


@pytest.mark.parametrize("noise", ["gaussian", "ou"])
@pytest.mark.parametrize("core", ["none", "gru", "lstm"])
def test_greedy_acting_has_no_noise_and_carries_the_state_on(noise, core):
    learner = built(noise=noise, random_start=True, net=NetConfig(hidden=(8,), core=core, core_size=5))
    alg, nets = learner.algorithm, learner.nets
    state = alg.initial_state(nets, 4)
    one, two = (alg.act(nets, observe(), state, None) for _ in range(2))
    assert torch.equal(one.action, two.action) and one.action.abs().max() <= 1
    assert one.state.keys() == state.keys()
    if noise == "ou":
        assert torch.equal(one.state["noise"], torch.zeros(4, 2))
    if core == "none":
        assert torch.equal(one.action, policy_of(nets, "policy", observe()))
    else:
        again = alg.act(nets, observe(), one.state, None)
        assert not torch.equal(again.action, one.action)


def test_gaussian_noise_has_its_scale_and_is_independent():
    noise = acts(built(noise_scale=0.05), 2000, observe(), 4)
    assert noise.std((0, 1)) == pytest.approx([0.05, 0.05], rel=0.05)
    flat = noise.reshape(2000, -1)
    correlation = np.corrcoef(np.concatenate([flat, np.roll(flat, 1, 0)], 1).T)
    assert np.abs(correlation - np.eye(16)).max() < 0.1  # not over time, lanes or dimensions


def test_ou_noise_drifts():
    learner = built(noise="ou", noise_scale=0.01, ou_theta=0.15)
    noise = acts(learner, 3000, observe(), 4)[50:]
    assert noise.std() == pytest.approx(0.01 / np.sqrt(0.15 * 1.85), rel=0.1)
    assert np.corrcoef(noise[1:, 0, 0], noise[:-1, 0, 0])[0, 1] == pytest.approx(0.85, abs=0.04)


def test_the_ladder_runs_over_the_lanes_of_the_whole_run():
    learner = built(noise_ladder=True, noise_scale=0.1, lanes=8)
    alg, nets, greedy = learner.algorithm, learner.nets, policy_of(learner.nets, "policy", observe())
    look = Explore(torch.Generator().manual_seed(3), np.arange(4, 8))  # the second actor of two
    noise = torch.stack([alg.act(nets, observe(), {}, look).action - greedy for _ in range(1000)]).detach()
    expected = 0.1 * LOWEST ** (torch.arange(4, 8) / 7)
    torch.testing.assert_close(noise.std((0, 2)), expected, rtol=0.09, atol=0)


def test_a_single_lane_on_the_ladder_has_the_full_scale():
    noise = acts(built(noise_ladder=True, noise_scale=0.05, lanes=1), 1000, observe(1), 1)
    assert noise.std() == pytest.approx(0.05, rel=0.08)


def test_two_actors_draw_different_noise_and_the_same_seed_the_same():
    learner = built()
    one, same, other = (learner.algorithm.act(learner.nets, observe(), {}, explore(seed=s)).action for s in (1, 1, 2))
    assert torch.equal(one, same) and not torch.equal(one, other)


def test_a_random_start_is_uniform_until_the_first_update():
    learner = built(random_start=True, noise_scale=0.0)
    alg, look = learner.algorithm, explore()
    actions = torch.cat([alg.act(learner.nets, observe(), {}, look).action for _ in range(1000)])
    histogram = torch.histc(actions, 10, -1, 1) / actions.numel()
    assert (histogram - 0.1).abs().max() < 0.02 and actions.abs().max() <= 1
    nets = alg.nets()
    far = Published(alg, nets)
    far.load(learner.published.read())
    assert nets["random_start"].on
    learner.step(batch(), 0.0)
    far.load(learner.published.read())
    assert not nets["random_start"].on
    assert torch.equal(alg.act(nets, observe(), {}, look).action, policy_of(learner.nets, "policy", observe()))


def actor_of(learner) -> tuple[Actor, Unroll]:
    lanes = ScriptedLanes(action=BOX)
    actor = Actor(learner.algorithm, learner.nets, lanes, seed=7)
    actor.reset()
    state = learner.algorithm.initial_state(learner.nets, 1)
    return actor, empty_unroll(unroll_shapes(lanes.spec, learner.algorithm.plan(), 4, state))


def test_noise_is_forgotten_where_an_episode_begins_and_only_there():
    learner = built(noise="ou", unroll=6)
    fed = []
    act = learner.algorithm.act

    def spy(nets, obs, state, look):
        fed.append(state["noise"].clone())
        return act(nets, obs, state, look)

    learner.algorithm.act = spy
    actor, out = actor_of(learner)
    live = [np.ones(4, bool)]
    for _ in range(4):
        actor.unroll(out, 0)
        live += list(~(out.terminated | out.truncated))
    starts = np.stack([np.ones(4, bool), *(~np.stack(live)[:-1])])[: len(fed)]  # rows behind a dead one
    silent = (torch.stack(fed) == 0).all(2).numpy()
    assert np.array_equal(silent, starts) and 0 < starts[1:].sum() < starts.size


# Publishing


@pytest.mark.parametrize("critic", CRITICS)
@pytest.mark.parametrize("net", [NetConfig(normalize_obs=True), CORE], ids=["normalized", "core"])
@pytest.mark.parametrize("memory", [ReplayConfig(batch=16, min_size=16), ESTIMATE], ids=["max", "actor"])
def test_an_actor_with_pulled_weights_does_exactly_what_the_learners_own_would(critic, net, memory):
    learner = built(critic=critic, net=net, replay=memory, noise="ou", unroll=6)
    if net.core == "none":
        learner.step(batch(), 0.0)  # statistics, too
    torch.manual_seed(1234)
    nets = learner.algorithm.nets()
    far = Published(learner.algorithm, nets)
    assert far.size == learner.published.size
    far.load(learner.published.read())
    outs = []
    for mine in (learner.nets, nets):
        actor = Actor(learner.algorithm, mine, ScriptedLanes(action=BOX), seed=7)
        actor.reset()
        state = learner.algorithm.initial_state(mine, 1)
        outs.append(empty_unroll(unroll_shapes(SPEC, learner.algorithm.plan(), 4, state)))
        for _ in range(2):
            actor.unroll(outs[-1], 0)
    here, there = outs
    assert np.array_equal(here.action, there.action) and np.ptp(here.action) > 0
    assert set(here.extras) == ({"q", "q_max"} if memory is ESTIMATE else set())
    for name in here.extras:
        assert np.array_equal(here.extras[name], there.extras[name]) and np.ptp(here.extras[name]) > 0


def test_the_critic_travels_only_where_acting_needs_it():
    alone, both = built(), built(replay=ESTIMATE)
    assert alone.published.size == alone.flat["actor"].data.numel()
    assert both.published.size == sum(flat.data.numel() for flat in both.flat.values())


def test_a_module_that_no_group_trains_cannot_be_published():
    class Wrong(DPG):
        def __init__(self, *args):
            super().__init__(*args)
            self.published = ("policy", "target_critic")

    learner = built()
    alg = Wrong(learner.algorithm.config, learner.algorithm.net, SPEC, 4)
    with pytest.raises(ValueError, match="belong to no group"):
        Published(alg, learner.nets, list(learner.flat.values()))
    alg.published = ("critic", "policy")
    with pytest.raises(ValueError, match="another order"):
        Published(alg, learner.nets, list(learner.flat.values()))


# The plan, and priorities of the actor's own


def test_the_plan_says_what_the_config_says():
    alg = algorithm(unroll=7, n_step=3, gamma=0.9, refresh=50, replay=ESTIMATE)
    plan = alg.plan()
    assert plan.table == Replay(ESTIMATE, 0.9, 3, refresh=50) and (plan.unroll, plan.chunk) == (7, 7)
    assert plan.extras == {"q": ((), "float32"), "q_max": ((), "float32")}
    assert algorithm().plan().extras == {}
    recurrent = algorithm(net=CORE, unroll=7, sequence=8, burn_in=4, overlap=5).plan()
    assert recurrent.chunk == 1
    assert (recurrent.table.sequence, recurrent.table.burn_in, recurrent.table.overlap) == (8, 4, 5)


def test_extras_are_the_values_of_the_action_taken_and_of_the_policys():
    learner = built(replay=ESTIMATE)
    output = learner.algorithm.act(learner.nets, observe(), {}, explore())
    greedy = policy_of(learner.nets, "policy", observe())
    q, best = (q_of(learner.nets, "critic", observe(), action) for action in (output.action, greedy))
    torch.testing.assert_close(output.extras["q"], q, atol=1e-6, rtol=0)
    torch.testing.assert_close(output.extras["q_max"], best, atol=1e-6, rtol=0)
    assert learner.algorithm.act(learner.nets, observe(), {}, None).extras == {}


@pytest.mark.parametrize("spec", [SPEC, DICT], ids=lambda spec: spec.id)
@pytest.mark.parametrize("critic, tolerance", [("scalar", 1e-6), ("categorical", 2e-5), ("mixture", 2e-5)])
def test_an_actors_priority_is_the_learners_while_the_targets_are_equal(critic, tolerance, spec):
    learner = built(critic=critic, spec=spec, replay=ESTIMATE, v_min=-40.0, v_max=40.0, atoms=41)
    alg, nets = learner.algorithm, learner.nets
    for name in ("policy", "critic"):
        nets[f"target_{name}"].load_state_dict(nets[name].state_dict())
    data = batch(64, spec)
    data = dataclasses.replace(data, reward=data.reward / 4)  # nothing is moved beyond the ends
    look = Explore(torch.Generator().manual_seed(0), np.zeros(64, np.int64))
    with torch.inference_mode():
        now, later = alg.act(nets, data.obs, {}, look), alg.act(nets, data.next_obs, {}, look)
    items = {
        "reward": data.reward.numpy(), "discount": data.discount.numpy(), "q": now.extras["q"].numpy(),
        "q_max": now.extras["q_max"].numpy(), "next_q": later.extras["q"].numpy(),
        "next_q_max": later.extras["q_max"].numpy(),
    }  # fmt: skip
    start = alg.start_priorities(items)
    learners = score(learner, dataclasses.replace(data, action=now.action.clone())).priorities
    assert start.shape == (64,) and start.dtype == np.float32
    np.testing.assert_allclose(start, learners.numpy(), atol=tolerance * max(1.0, start.max()), rtol=0)


def test_returns_beyond_the_atoms_are_no_surprise_for_ever():
    """A target that a categorical critic cannot reach has the priority of what it can."""
    alg = algorithm(critic="categorical", replay=ESTIMATE)
    items = {name: np.array([x], np.float32) for name, x in
             {"reward": 100.0, "discount": 0.9, "next_q_max": 4.0, "q": 5.0}.items()}  # fmt: skip
    assert alg.start_priorities(items).tolist() == [0.0]


def test_without_estimates_new_items_have_the_largest_priority():
    assert algorithm().start_priorities({}) is None
