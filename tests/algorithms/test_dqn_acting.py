"""DQN around the loss: acting and exploring, schedules, target nets, start priorities, what is refused."""

from __future__ import annotations

import dataclasses
import warnings
from itertools import pairwise

import numpy as np
import pytest
import torch
from support_dqn import SMALL, SPEC, algorithm, built, minibatch, parcel_of, shaken, transitions
from support_lanes import BOX, MULTI, GuessLanes, ScriptedLanes

from rookery.algorithms.dqn import DQN, DQNConfig
from rookery.cli.flags import comments_of
from rookery.core.config import NetConfig, ReplayConfig
from rookery.core.errors import UsageError
from rookery.core.types import EnvSpec, Explore, Transitions
from rookery.roles.learner import Learner
from rookery.roles.weights import Published

ACTOR = ReplayConfig(batch=8, min_size=8, start="actor")
NETS = {"numpy": NetConfig(hidden=(8,)), "modules": NetConfig(hidden=()), "lstm": NetConfig(core="lstm", core_size=5)}


def act(learner, obs, explore=None, state=None):
    with torch.inference_mode():
        state = learner.algorithm.initial_state(learner.nets, len(obs)) if state is None else state
        return learner.algorithm.act(learner.nets, {"obs": obs}, state, explore)


def explore(seed: int = 1, lanes: int = 4) -> Explore:
    return Explore(torch.Generator().manual_seed(seed), np.arange(lanes))


# Acting


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("changes", [{}, {"atoms": 7, "dueling": True}, {"noisy": True}], ids=["plain", "c51", "noisy"])
def test_greedy_is_the_best_mean_and_does_not_vary(net, changes):
    """P71: no noise, no coin."""
    learner = built(NETS[net], replay=ACTOR, **changes)
    obs = torch.randn(64, 3)
    output = act(learner, obs)
    head = learner.nets["q"]
    with torch.inference_mode():
        x, _ = learner.nets["body"].step({"obs": obs}, learner.nets["body"].initial(64))
        values = head.means(head(x))
    assert output.action.tolist() == values.argmax(1).tolist()
    torch.testing.assert_close(output.extras["q"], values.amax(1), rtol=0, atol=2e-6)
    torch.testing.assert_close(output.extras["q_max"], values.amax(1), rtol=0, atol=2e-6)
    assert output.action.dtype == np.int64 and output.logp.tolist() == [0.0] * 64
    assert act(learner, obs).action.tolist() == output.action.tolist()


@pytest.mark.parametrize("net", NETS)
def test_exploring_draws_from_the_given_generator_only(net):
    learner, obs = built(NETS[net], noisy=True), torch.randn(4, 3)
    first = act(learner, obs, explore(1)).action.tolist()
    torch.manual_seed(99)
    assert act(learner, obs, explore(1)).action.tolist() == first
    draws = {tuple(act(learner, obs, explore(seed)).action.tolist()) for seed in range(30)}
    assert len(draws) > 10


def test_values_of_the_action_taken_and_of_the_best():
    learner = built(NETS["numpy"], replay=ACTOR)  # epsilon starts at 1
    obs = torch.randn(512, 3)
    output, greedy = act(learner, obs, explore(lanes=512)), act(learner, obs)
    assert output.extras["q_max"].tolist() == greedy.extras["q_max"].tolist()
    same = torch.from_numpy(output.action == greedy.action)
    assert 0.2 < float(same.float().mean()) < 0.5, "random actions are uniform over three"
    assert torch.equal(output.extras["q"] == output.extras["q_max"], same)
    assert act(built(NETS["numpy"]), obs).extras == {}


@pytest.mark.parametrize("net", ["numpy", "modules"])
def test_every_environment_has_a_noise_of_its_own_and_a_new_one_each_step(net):
    learner = built(NETS[net], noisy=True, epsilon_start=0.0, replay=ACTOR)
    obs, same = torch.randn(1, 3).expand(64, 3).contiguous(), explore(lanes=64)
    first, second = act(learner, obs, same), act(learner, obs, same)
    assert len(set(first.extras["q_max"].tolist())) == 64
    assert not set(first.extras["q_max"].tolist()) & set(second.extras["q_max"].tolist())


def test_the_ladder_runs_over_all_environments_of_the_run():
    """P64: these are the lanes 4 to 7 of 8."""
    learner = built(NETS["numpy"], lanes=8, ladder=True, ladder_epsilon=0.9, ladder_alpha=1.0)
    here, obs = Explore(torch.Generator().manual_seed(1), np.arange(4, 8)), torch.randn(4, 3)
    greedy = act(learner, obs).action
    moved = np.mean([act(learner, obs, here).action != greedy for _ in range(6000)], axis=0)
    expected = 0.9 ** (1 + np.arange(4, 8) / 7) * 2 / 3  # one of three random actions is the greedy one
    np.testing.assert_allclose(moved, expected, atol=0.03)
    report = learner.step(transitions(), 0.5)
    assert "epsilon" not in report.metrics and len(set(np.round(expected, 3))) == 4


def test_actors_explore_with_streams_of_their_own():
    """P65: all at random, the same environments, and still no actor repeats another or itself."""
    lanes = 4
    learner = Learner(algorithm(spec=GuessLanes("symbol", lanes).spec, lanes=2 * lanes, unroll=8), seed=1)
    streams = [parcel_of(learner, GuessLanes("symbol", lanes), index=index)["action"] for index in (0, 1, 0)]
    assert np.array_equal(streams[0], streams[2]), "a stream belongs to the seed and the actor"
    size = min(len(stream) for stream in streams)
    assert size > 60 and 0.15 < np.mean(streams[0][:size] == streams[1][:size]) < 0.55  # a third, by chance
    rounds = np.array_split(streams[0], 3)
    assert not np.array_equal(rounds[0][:20], rounds[1][:20])


# Schedules and target nets


def test_epsilon_falls_over_a_share_of_the_run_and_travels_with_the_weights():
    learner = built(epsilon_start=0.8, epsilon_end=0.2, epsilon_share=0.5)
    mirror = learner.algorithm.nets()
    pipe = Published(learner.algorithm, mirror)
    seen = []
    for progress in (0.0, 0.25, 0.5, 1.0):
        told = learner.step(transitions(), progress).metrics["epsilon"]
        pipe.load(learner.published.read())
        seen.append(round(mirror["epsilon"].value.item(), 6))
        assert told == pytest.approx(seen[-1])
    assert seen == [0.8, 0.5, 0.2, 0.2]
    fresh = built(epsilon_start=0.8).nets["epsilon"]
    assert fresh.value.item() == pytest.approx(0.8), "before the first update"


def test_the_learning_rate_is_constant_or_falls_linearly():
    assert algorithm(lr=0.1).schedule(0.7) == {"all": 0.1}
    assert algorithm(lr=0.1, lr_end=0.0).schedule(0.75)["all"] == pytest.approx(0.025)


def test_targets_are_copied_every_so_many_updates_and_by_value():
    """P67, P92."""
    learner, items = built(target_period=3), transitions()

    def weights(name):
        return torch.cat([p.detach().flatten().clone() for p in learner.nets[name].parameters()])

    start = weights("target_q")
    for _ in range(2):
        learner.step(items, 0.0)
        assert torch.equal(weights("target_q"), start)
    learner.step(items, 0.0)
    third = weights("q")
    assert torch.equal(weights("target_q"), third)
    learner.step(items, 0.0)
    assert torch.equal(weights("target_q"), third) and not torch.equal(weights("q"), third)


def test_where_gradients_are_computed_elsewhere_targets_follow_the_version():
    learner = built(target_period=10)
    nets, follow = learner.nets, learner.algorithm.pulled

    def follows(before, now):
        shaken(learner, 0.1, seed=now)
        follow(nets, before, now)
        return torch.equal(nets["target_q"].advantage.layers[0].weight, nets["q"].advantage.layers[0].weight)

    assert follows(0, 4), "the first weights that arrive: a target of another beginning is a stranger"
    versions = [4, 5, 9, 10, 11, 19, 30, 31, 39, 40]
    assert [now for before, now in pairwise(versions) if follows(before, now)] == [10, 30, 40]
    learner.algorithm.after_update(nets, 10)


def test_statistics_come_from_the_observations_drawn():
    learner, items = built(NetConfig(hidden=(), normalize_obs=True)), transitions(200)
    learner.step(items, 0.0)
    running = learner.nets["normalizer"].leaves[0].running
    torch.testing.assert_close(running.mean.float(), items.obs["obs"].mean(0))
    assert running.count == 200


def test_a_learner_goes_on_exactly_from_its_state():
    """P103: targets, epsilon, optimiser."""
    for optimizer in ("adam", "rmsprop", "adagrad"):
        make = lambda: built(NETS["numpy"], optimizer=optimizer, momentum=0.5, noisy=True, target_period=3)  # noqa: E731, B023
        whole, half, rest = make(), make(), make()
        for number in range(4):
            for learner in (whole, half) if number < 2 else (whole,):
                learner.step(transitions(seed=number), number / 4)
        rest.load(*half.state())
        assert rest.nets["epsilon"].value == half.nets["epsilon"].value < 1
        for number in (2, 3):
            rest.step(transitions(seed=number), number / 4)
        for a, b in zip(whole.nets.state_dict().values(), rest.nets.state_dict().values()):
            assert torch.equal(a, b)


# Start priorities


def as_transitions(parcel: dict[str, np.ndarray]) -> Transitions:
    t = {name: torch.from_numpy(x) for name, x in parcel.items()}
    return Transitions(
        {"obs": t["obs/obs"]}, t["action"], t["reward"], t["discount"], {"obs": t["next_obs/obs"]},
        torch.ones(len(t["reward"])), t["version"],
    )  # fmt: skip


@pytest.mark.parametrize("net", ["numpy", "modules"])
@pytest.mark.parametrize("rescale", [False, True])
@pytest.mark.parametrize("n_step", [1, 3])
def test_an_actor_s_priorities_are_the_learner_s(n_step, rescale, net):
    """P72: with the same weights in actor, online and target net."""
    lanes = GuessLanes("symbol", count=4)
    config = dataclasses.replace(SMALL, unroll=6, replay=ACTOR, n_step=n_step, rescale=rescale)
    learner = Learner(DQN(config, NETS[net], lanes.spec, 4), seed=1)  # targets start equal
    parcel = parcel_of(learner, lanes)
    output = learner.gradients(minibatch(learner, as_transitions(parcel)))
    assert len(parcel["priority"]) > 30 and np.all(np.isfinite(parcel["priority"]))
    np.testing.assert_allclose(parcel["priority"], output.priorities.numpy(), rtol=0, atol=1e-6)
    assert {0.0, np.float32(0.9**n_step)} <= set(parcel["discount"].tolist())


@pytest.mark.parametrize("net", ["numpy", "modules"])
def test_they_agree_for_distributions_too(net):
    """An actor knows the means only, so that where it has the first word, the learner goes by means too."""
    lanes = GuessLanes("symbol", count=4)
    config = dataclasses.replace(SMALL, unroll=6, replay=ACTOR, n_step=3, atoms=51, v_min=-10.0, v_max=10.0)
    learner = Learner(DQN(config, NETS[net], lanes.spec, 4), seed=1)
    parcel = parcel_of(learner, lanes)
    output = learner.gradients(minibatch(learner, as_transitions(parcel)))
    assert np.ptp(parcel["priority"]) > 0.1
    np.testing.assert_allclose(parcel["priority"], output.priorities.numpy(), rtol=0, atol=1e-5)


def test_they_agree_across_truncations_too():
    lanes = ScriptedLanes()
    config = dataclasses.replace(SMALL, unroll=6, replay=ACTOR, n_step=3)
    learner = Learner(DQN(config, NETS["numpy"], lanes.spec, 4), seed=1)
    parcel = parcel_of(learner, lanes, unrolls=6)
    output = learner.gradients(minibatch(learner, as_transitions(parcel)))
    np.testing.assert_allclose(parcel["priority"], output.priorities.numpy(), rtol=1e-5, atol=1e-5)


def test_distributions_start_with_the_error_of_their_means():
    items = {"reward": [1.0], "discount": [0.5], "next_q_max": [2.0], "q": [0.5], "next_q": [9.0]}
    items = {name: np.array(x, np.float32) for name, x in items.items()}
    assert algorithm(replay=ACTOR, atoms=51).start_priorities(items).tolist() == [1.5]
    assert algorithm().start_priorities(items) is None, "the largest so far"


# The plan, and what is refused


def test_the_plan():
    plain = algorithm(n_step=3, refresh=100, unroll=5).plan()
    table = plain.table
    assert (plain.unroll, plain.chunk, plain.extras) == (5, 5, {})
    assert (table.gamma, table.n_step, table.sequence, table.burn_in, table.refresh) == (0.9, 3, 0, 0, 100)
    deep = algorithm(NETS["lstm"], replay=ACTOR, unroll=5).plan()
    assert (deep.chunk, deep.table.sequence, deep.table.burn_in, deep.table.overlap) == (1, 4, 3, 2)
    assert set(deep.extras) == {"q", "q_max"} and deep.table.memory == ACTOR


@pytest.mark.parametrize("action, fix", [(BOX, "ddpg, d4pg, apex_dpg or ppo"), (MULTI, "ppo")])
def test_other_actions_are_refused_with_what_to_use_instead(action, fix):
    with pytest.raises(UsageError, match=f"DQN needs discrete actions.*{fix}"):
        DQN(SMALL, NetConfig(), EnvSpec("arm", SPEC.obs, action), 1)


@pytest.mark.parametrize(
    "changes, word",
    [
        ({"unroll": 0}, "unroll"),
        ({"n_step": 0}, "n_step"),
        ({"target_period": 0}, "target_period"),
        ({"gamma": 1.5}, "gamma"),
        ({"epsilon_start": 1.1}, "epsilon_start"),
        ({"epsilon_share": 0.0}, "epsilon_share"),
        ({"huber": 0.0}, "huber"),
        ({"atoms": 1}, "atoms"),
        ({"atoms": 51, "v_min": 3.0}, "v_min"),
        ({"atoms": 51, "rescale": True}, "rescale"),
        ({"trunk_scale": True}, "dueling"),
        ({"shared_bias": True, "dueling": True}, "plain head"),
        ({"net": NETS["lstm"], "overlap": 4}, "overlap"),
        ({"net": NETS["lstm"], "sequence": 0}, "sequence"),
    ],
)
def test_numbers_that_cannot_be_are_refused(changes, word):
    with pytest.raises(UsageError, match=word):
        algorithm(**changes)


def test_a_policy_that_never_explores_is_said_to():
    still = {"epsilon_start": 0.0, "epsilon_end": 0.0}
    with pytest.warns(UserWarning, match="nothing explores"):
        algorithm(**still)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for one in ({"noisy": True}, {"ladder": True}, {"epsilon_start": 0.1}, {"epsilon_end": 0.1}):
            algorithm(**(still | one))


def test_rows_of_sequences_do_not_matter_without_a_core():
    assert algorithm(sequence=1, overlap=99).plan().table.sequence == 0


def test_every_number_has_its_line_of_documentation():
    assert set(comments_of(DQNConfig)) >= {field.name for field in dataclasses.fields(DQNConfig)}
