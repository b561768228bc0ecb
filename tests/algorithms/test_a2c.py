"""A2C: loss and gradient of a fixed batch against n-step returns in plain loops, and what its contract promises."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support_actor_critic import (
    ACTIONS,
    CORES,
    LANES,
    NUMBERS,
    ROWS,
    Model,
    Table,
    check_gradients,
    fixed_batch,
    learner_of,
    linear,
    part_of,
    repeated,
    rig,
    spec_of,
    with_junk,
)
from support_lanes import ScriptedLanes, frozen, reward_of
from support_ranks import agreed, ranks, together

from rookery.algorithms.a2c import A2C, A2CConfig
from rookery.core import tree
from rookery.core.config import NetConfig
from rookery.core.reduce import ALONE
from rookery.core.types import Queue
from rookery.nets.rmsprop import FlatRMSProp

CONFIG = A2CConfig(**NUMBERS)


def parts(config: A2CConfig, table: Table, start: Model, now: Model) -> tuple[float, float, float]:
    """Policy loss, value loss and entropy: means over live rows. Advantages are those of `start`: constants."""
    policy = error = entropy = 0.0
    for t, b in table.live:
        x = table.obs[t, b]
        advantage = table.lambda_advantage(start, t, b, config.gamma, config.lam)
        policy -= advantage * now.logp(x, table.action[t, b])
        error += 0.5 * (now.value(x) - start.value(x) - advantage) ** 2
        entropy += now.entropy(x)
    return tuple(x / len(table.live) for x in (policy, error, entropy))


def total(config: A2CConfig, table: Table, start: Model, now: Model) -> float:
    policy, error, entropy = parts(config, table, start, now)
    return policy + config.value_coef * error - config.entropy * entropy


@pytest.mark.parametrize("lam", [1.0, 0.75, 0.0])
@pytest.mark.parametrize("action", ACTIONS)
def test_loss_and_gradient_of_a_fixed_batch_are_those_of_the_formulas(action, lam):
    """P32, P40: signs and factors of every term; terminations, truncations, dead rows; returns are constants."""
    config = dataclasses.replace(CONFIG, lam=lam)
    algorithm, nets = linear(A2C, config, action)
    batch = fixed_batch(action)
    output = algorithm.losses(nets, algorithm.prepare(nets, batch, ALONE))
    table, now = Table(batch), Model(nets, action)
    assert len(table.live) == 19 < ROWS * LANES
    policy, error, entropy = parts(config, table, now, now)
    assert output.metrics["policy_loss"].item() == pytest.approx(policy, rel=1e-12)
    assert output.metrics["value_loss"].item() == pytest.approx(error, rel=1e-12)
    assert output.metrics["entropy"].item() == pytest.approx(entropy, rel=1e-12)
    assert output.losses["all"].item() == pytest.approx(total(config, table, now, now), rel=1e-12)
    assert float(output.weight) == len(table.live)
    assert all(not x.requires_grad for x in output.metrics.values())
    check_gradients(nets, output.losses["all"], lambda model: total(config, table, now, model), now)


def test_with_lambda_1_the_target_is_the_return_to_the_end_of_the_episode_or_unroll():
    """Algorithm 3 of the paper: R is 0 behind a terminal state, else the value of where the unroll ends."""
    config = dataclasses.replace(CONFIG, lam=1.0)
    algorithm, nets = linear(A2C, config)
    output = algorithm.losses(nets, fixed_batch())
    table, model, errors = Table(fixed_batch()), Model(nets), []
    for t, b in table.live:
        span = table.span(t, b)
        r = table.bootstrap(model, span[-1], b)
        for k in reversed(span):
            r = table.reward[k, b] + config.gamma * r
        errors.append(0.5 * (model.value(table.obs[t, b]) - r) ** 2)
    assert output.metrics["value_loss"].item() == pytest.approx(sum(errors) / len(errors), rel=1e-12)


def test_a_truncation_is_bootstrapped_and_a_termination_is_not():
    """P1: the value behind row t counts if that row was cut off, and not if the task ended there."""
    algorithm, nets = linear(A2C, CONFIG)
    batch = fixed_batch()

    def moved_by(row: int, lane: int) -> bool:
        obs = batch.obs["obs"].clone()
        obs[row + 1, lane] += 1.0  # the final observation: of a dead row, or behind the last row
        other = dataclasses.replace(batch, obs={"obs": obs})
        losses = [algorithm.losses(nets, each).losses["all"].item() for each in (batch, other)]
        return losses[0] != losses[1]

    assert all(batch.truncated[at] and moved_by(*at) for at in ((1, 1), (4, 2), (5, 3)))
    assert all(batch.terminated[at] and not moved_by(*at) for at in ((2, 0), (5, 1), (0, 3)))
    assert moved_by(5, 0) and moved_by(5, 2) is False, "the unroll's end; and behind a dead row nothing counts"


@pytest.mark.parametrize("action", ACTIONS)
def test_dead_rows_weigh_nothing(action):
    algorithm, nets = linear(A2C, CONFIG, action)
    outputs = [algorithm.losses(nets, each) for each in (fixed_batch(action), with_junk(fixed_batch(action)))]
    gradients = [torch.autograd.grad(output.losses["all"], list(nets.parameters())) for output in outputs]
    assert outputs[0].losses["all"].item() == pytest.approx(outputs[1].losses["all"].item(), rel=1e-14)
    for a, b in zip(*gradients):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-15)
    for name, value in outputs[0].metrics.items():
        torch.testing.assert_close(value, outputs[1].metrics[name])


def test_the_loss_is_a_mean():
    """P44: the same unrolls twice leave it as it is, and weigh twice as much."""
    algorithm, nets = linear(A2C, CONFIG)
    once, twice = (algorithm.losses(nets, each) for each in (fixed_batch(), repeated(fixed_batch())))
    assert once.losses["all"].item() == pytest.approx(twice.losses["all"].item(), rel=1e-12)
    assert 2 * float(once.weight) == float(twice.weight)


def test_what_was_replayed_for_others_is_not_learnt_from():
    """It corrects for no other policy than its own."""
    algorithm, nets = linear(A2C, CONFIG)
    batch = fixed_batch()
    replayed = torch.tensor([False, True, True, False])
    some = algorithm.losses(nets, dataclasses.replace(batch, replayed=replayed))
    alone = algorithm.losses(nets, tree.map_fields(batch, lambda x: x[:, ~replayed] if x.dim() > 1 else x[~replayed]))
    assert some.losses["all"].item() == pytest.approx(alone.losses["all"].item(), rel=1e-12)
    assert float(some.weight) == float(alone.weight) < float(algorithm.losses(nets, batch).weight)


def test_a_batch_without_a_live_row_has_no_gradient():
    algorithm, nets = linear(A2C, CONFIG)
    batch = dataclasses.replace(fixed_batch(), live=torch.zeros(ROWS, LANES, dtype=torch.bool))
    output = algorithm.losses(nets, batch)
    assert output.losses["all"].item() == 0 and float(output.weight) == 0
    assert not any(x.any() for x in torch.autograd.grad(output.losses["all"], list(nets.parameters())))


def test_the_coefficients_weigh_their_losses():
    """P32: the loss is linear in both, with the signs of a cost and of a bonus."""
    losses = {}
    for value_coef, entropy in ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0)):
        config = dataclasses.replace(CONFIG, value_coef=value_coef, entropy=entropy)
        algorithm, nets = linear(A2C, config)
        output = algorithm.losses(nets, fixed_batch())
        losses[value_coef, entropy] = output.losses["all"].item()
    told = {name: x.item() for name, x in output.metrics.items()}
    assert losses[0, 0] == pytest.approx(told["policy_loss"])
    assert losses[1, 0] - losses[0, 0] == pytest.approx(told["value_loss"])
    assert losses[0, 1] - losses[0, 0] == pytest.approx(-told["entropy"])


def test_schedules_begin_and_end_where_they_say():
    """P30."""
    config = A2CConfig(lr=1e-3, lr_end=1e-5, entropy=0.02, entropy_end=0.0)
    algorithm = A2C(config, NetConfig(), spec_of("discrete"), 4)
    for progress, expected in {0.0: (1e-3, 0.02), 0.5: (5.05e-4, 0.01), 1.0: (1e-5, 0.0)}.items():
        assert (algorithm.schedule(progress)["all"], algorithm.entropy) == pytest.approx(expected, abs=1e-9)
    constant = A2C(A2CConfig(entropy=0.25), NetConfig(), spec_of("discrete"), 4)
    assert constant.schedule(1.0) == {"all": 0.0} and constant.entropy == 0.25


# With actors


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("action", ACTIONS)
def test_an_update_with_every_core_and_kind_of_action(core, action):
    """P25, P27, P97: values along an unroll are those of single steps, and an update moves every parameter."""
    config = A2CConfig(unroll=ROWS, gamma=0.5, lam=0.0, lr=1e-2, value_coef=1.0, entropy=0.0, lr_end=1e-2)
    set_up = rig(A2C, config, lambda: ScriptedLanes(action=ACTIONS[action]), CORES[core])
    nets, algorithm = set_up.learner.nets, set_up.algorithm
    for _ in range(3):
        batch = set_up.collect()
        output = algorithm.losses(nets, algorithm.prepare(nets, batch, ALONE))
        value = values(nets, batch)
        target = batch.reward + 0.5 * value[1:] * ~batch.terminated
        error = 0.5 * (value[:-1] - target).square()[batch.live].mean()
        assert output.metrics["value_loss"].item() == pytest.approx(error.item(), rel=1e-4)
        before = [p.detach().clone() for p in nets.parameters()]
        report = set_up.learner.step(batch, 0.0)
        assert all(not torch.equal(p, old) for p, old in zip(nets.parameters(), before))
        assert report.metrics["minibatches"] == 1
    assert set_up.learner.version == set_up.learner.updates == 3


def values(nets, batch) -> torch.Tensor:
    """Of all T+1 rows, step by step."""
    state, found = {name: x[0] for name, x in batch.state0.items()}, []
    with torch.no_grad():
        for t in range(ROWS + 1):
            features, state = nets["body"].step({"obs": batch.obs["obs"][t]}, state)
            if "value_body" in nets:
                features, _ = nets["value_body"].step({"obs": batch.obs["obs"][t]}, {})
            found.append(nets["value"](features))
            if t < ROWS:
                state = {name: x * batch.live[t].view(-1, 1, 1) for name, x in state.items()}  # no memory of the dead
    return torch.stack(found)


def test_rows_are_aligned():
    """P42: the reward of a row is that of its own observation and action."""
    set_up = rig(A2C, A2CConfig(unroll=ROWS))
    for _ in range(3):
        batch = set_up.prepared(set_up.collect())
        for t in range(ROWS):
            expected = torch.from_numpy(reward_of(batch.obs["obs"][t].numpy(), batch.action[t].numpy()))
            assert torch.equal(batch.reward[t][batch.live[t]], expected[batch.live[t]])


def test_rewards_are_scaled_before_the_loss_and_counted_once():
    set_up = rig(A2C, A2CConfig(unroll=ROWS, scale_reward=True))
    batch = set_up.collect()
    prepared = set_up.prepared(batch)
    scaler = set_up.learner.nets["reward_scaler"]
    deviation = (scaler.running.m2 / scaler.running.count).sqrt()
    torch.testing.assert_close(prepared.reward, (batch.reward / deviation).float().clamp(-10, 10))
    assert int(scaler.running.count) == int(batch.live.sum())
    set_up.algorithm.losses(set_up.learner.nets, prepared)
    assert int(scaler.running.count) == int(batch.live.sum())
    assert (
        "scale_reward" in set_up.algorithm.not_remote and A2C(CONFIG, NetConfig(), spec_of("box"), 4).not_remote == ""
    )


def test_the_plan_is_a_queue_in_turns_with_one_state_per_unroll():
    plan = A2C(A2CConfig(unroll=7), CORES["lstm"], spec_of("discrete"), 4).plan()
    assert (plan.unroll, plan.chunk) == (7, 7) and not plan.extras
    assert isinstance(plan.table, Queue) and plan.table.in_turns


def test_the_optimiser_is_tensorflows_rmsprop_unless_adam_is_asked_for():
    set_up = rig(A2C, A2CConfig(unroll=ROWS, lr=0.5, optimizer_eps=0.125, decay=0.75))
    optimizer = set_up.learner.optimizers["all"]
    assert isinstance(optimizer, FlatRMSProp)
    numbers = optimizer.param_groups[0]
    assert {name: numbers[name] for name in ("lr", "eps", "decay", "start", "centered", "momentum")} == {
        "lr": 0.5, "eps": 0.125, "decay": 0.75, "start": 1.0, "centered": False, "momentum": 0.0,
    }  # fmt: skip


@pytest.mark.parametrize("core", ["none", "gru"])
def test_ranks_with_parts_of_the_lanes_equal_one_rank_with_all(core):
    """P20, P21: gradients are weighed by live rows."""
    config = A2CConfig(unroll=ROWS, lr=1e-2, scale_reward=True)
    net = dataclasses.replace(CORES[core], normalize_obs=True)
    whole, group = rig(A2C, config, net=net), ranks(2)
    learners = [learner_of(A2C, config, net, ScriptedLanes().spec, 4, reduce=rank) for rank in group]
    for _ in range(3):
        batch = frozen(whole.collect())
        whole.learner.step(batch, 0.0)
        agreed(together(group, lambda r, batch=batch: learners[r].step(part_of(batch, r, 2), 0.0)))
        assert torch.equal(learners[0].flat["all"].data, learners[1].flat["all"].data)
        torch.testing.assert_close(learners[0].flat["all"].data, whole.learner.flat["all"].data, rtol=0, atol=1e-5)
