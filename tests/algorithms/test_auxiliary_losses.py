"""Auxiliary losses of a fixed batch against plain loops, which unrolls they are learnt from, and what is refused."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from support_auxiliary import ALL, CONFIGS, KINDS, LEAVES, MLP, NETS, B, T, batch_of, learner_of, spec_of
from support_lanes import BOX, MULTI

from rookery.algorithms.auxiliary import columns
from rookery.core.config import AutoencoderConfig, AuxConfig, QueueConfig
from rookery.core.errors import UsageError
from rookery.core.types import EnvSpec, Mix, Queue
from rookery.core.unroll import Unroll
from rookery.nets.modules import Nets
from rookery.roles.learner import Learner

PIXELS = AuxConfig(pixel_control=0.5, cell=2, gamma=0.75)
EVERY = pytest.mark.parametrize("name", KINDS)


# A fixed batch, row by row


def stepped(nets: Nets, batch: Unroll) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Codes and features of the T+1 rows, each [B, F], step by step as an actor computes them."""
    state, codes, features = {name: x[0] for name, x in batch.state0.items()}, [], []
    for t in range(T + 1):
        obs = {"obs": batch.obs["obs"][t]}
        codes.append(nets["body"].torso(obs))
        x, state = nets["body"].step(obs, state)
        features.append(x)
        if t < T:  # the row behind a dead one begins an episode
            state = {name: x * batch.live[t].view(-1, 1, 1) for name, x in state.items()}
    return codes, features


def live_rows(batch: Unroll) -> list[tuple[int, int]]:
    return [(t, b) for t in range(T) for b in range(B) if batch.live[t, b]]


def bootstrapped(batch: Unroll, t: int, b: int, reward, value, gamma: float):
    """The return from row t on: to the episode's end, or to the end of the unroll."""
    total, factor = 0.0, 1.0
    for k in range(t, T):
        total, factor = total + factor * reward(k), factor * gamma
        if batch.terminated[k, b]:
            return total
        if batch.truncated[k, b] or k == T - 1:
            return total + factor * value(k + 1)
    raise AssertionError


def pixel_control(nets: Nets, batch: Unroll, leaf: str, features: list[torch.Tensor]) -> torch.Tensor:
    q = [nets["pixel_control"](x) for x in features]  # [B, A, h, w] each
    frames = pixels(leaf, batch.obs["obs"].double().numpy())
    best = [x.detach().amax(1).double().numpy() for x in q]
    errors = []
    for t, b in live_rows(batch):
        target = bootstrapped(
            batch, t, b, lambda k: change(frames[k, b], frames[k + 1, b]), lambda k: best[k][b], PIXELS.gamma  # noqa: B023
        )  # fmt: skip
        errors.append(0.5 * (q[t][b, batch.action[t, b]] - torch.tensor(target).float()).square().mean())
    return torch.stack(errors).mean()


def pixels(leaf: str, x: np.ndarray) -> np.ndarray:
    """The newest frames [T+1, B, C, H, W], bytes from 0 to 1."""
    x = x / 255 if LEAVES[leaf].dtype == "uint8" else x
    if leaf == "stack":
        return x[:, :, 3:]
    return {2: x[:, :, None], 3: x if leaf == "image" else np.moveaxis(x, -1, 2)}[x.ndim - 2]


def change(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Of the 3x4 cells of 2x2 pixels."""
    difference = abs(after - before).mean(0)
    return np.array([[difference[2 * i : 2 * i + 2, 2 * j : 2 * j + 2].mean() for j in range(4)] for i in range(3)])


def reward_prediction(nets: Nets, batch: Unroll, codes: list[torch.Tensor]) -> torch.Tensor:
    kinds: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    for t, b in live_rows(batch):
        if t >= 2 and batch.live[t - 1, b] and batch.live[t - 2, b]:
            logits = nets["reward_prediction"](torch.cat([codes[k][b] for k in (t - 2, t - 1, t)]).unsqueeze(0))[0]
            reward = float(batch.reward[t, b])
            right = 0 if reward == 0 else 1 if reward > 0 else 2
            kinds[reward != 0].append(-logits.log_softmax(0)[right])
    assert len(kinds[True]) > 2 and len(kinds[False]) > 2
    return 0.5 * (torch.stack(kinds[True]).mean() + torch.stack(kinds[False]).mean())


def value_replay(nets: Nets, batch: Unroll, features: list[torch.Tensor], gamma: float) -> torch.Tensor:
    if "value_body" in nets:
        features = [nets["value_body"].step({"obs": batch.obs["obs"][t]}, {})[0] for t in range(T + 1)]
    value = [nets["value"](x) for x in features]
    known = [x.detach() for x in value]
    errors = []
    for t, b in live_rows(batch):
        target = bootstrapped(batch, t, b, lambda k: float(batch.reward[k, b]), lambda k: float(known[k][b]), gamma)  # noqa: B023
        errors.append(0.5 * (value[t][b] - target).square())
    return torch.stack(errors).mean()


@pytest.mark.parametrize("leaf, core", [(leaf, "none") for leaf in LEAVES] + [("image", "gru"), ("stack", "lstm")])
def test_losses_and_gradients_are_those_of_plain_loops(leaf, core):
    """Ends of both kinds and dead rows: a termination cuts, a truncation bootstraps, no task looks across either."""
    aux = dataclasses.replace(ALL, pixel_control=0.0 if leaf == "vector" else ALL.pixel_control)
    learner = learner_of("a2c", NETS[core], aux, leaf)
    algorithm, nets = learner.algorithm, learner.nets
    batch = batch_of(algorithm, nets, leaf)
    total, metrics = algorithm.auxiliary.losses(nets, batch)
    codes, features = stepped(nets, batch)
    expected = {
        "reward_prediction_loss": reward_prediction(nets, batch, codes),
        "value_replay_loss": value_replay(nets, batch, features, algorithm.config.gamma),
    }
    if leaf != "vector":
        expected["pixel_control_loss"] = pixel_control(nets, batch, leaf, features)
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(metrics[name], value.detach(), rtol=1e-4, atol=1e-6, msg=name)
    weighted = sum(getattr(aux, name.removesuffix("_loss")) * value for name, value in expected.items())
    parameters = list(nets.parameters())
    found, known = (torch.autograd.grad(x, parameters, allow_unused=True) for x in (total, weighted))
    reached = 0
    for a, b in zip(found, known):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-6)
            reached += bool(a.any())
    assert reached >= len(list(nets["body"].parameters())), "they shape the features"
    assert all(x is None for x in torch.autograd.grad(total, list(nets["policy"].parameters()), allow_unused=True))


@pytest.mark.parametrize("core", ["none", "gru"])
def test_what_a_dead_row_contains_changes_nothing(core):
    learner = learner_of("a2c", NETS[core], ALL)
    auxiliary, nets = learner.algorithm.auxiliary, learner.nets
    batch = batch_of(learner.algorithm, nets)
    dead = ~batch.live
    assert dead.sum() >= 4
    junk = dataclasses.replace(
        batch,
        action=torch.where(dead, (batch.action + 1) % 3, batch.action), reward=torch.where(dead, 9.0, batch.reward),
    )  # fmt: skip
    assert not torch.equal(junk.reward, batch.reward)
    (one, _), (other, _) = (auxiliary.losses(nets, each) for each in (batch, junk))
    torch.testing.assert_close(one, other, rtol=1e-6, atol=0)


def test_a_batch_in_which_nothing_is_live_has_no_gradient():
    learner = learner_of("a2c", MLP, ALL)
    batch = batch_of(learner.algorithm, learner.nets)
    batch = dataclasses.replace(batch, live=torch.zeros_like(batch.live), reward=torch.zeros_like(batch.reward))
    total, metrics = learner.algorithm.auxiliary.losses(learner.nets, batch)
    assert float(total) == 0 and all(float(x) == 0 for x in metrics.values())
    gradients = torch.autograd.grad(total, list(learner.nets.parameters()), allow_unused=True)
    assert not any(x is not None and x.any() for x in gradients)


# Which unrolls


def mixed(learner: Learner, seed: int = 3) -> Unroll:
    """A batch whose last two unrolls were replayed."""
    batch = batch_of(learner.algorithm, learner.nets, seed=seed)
    return dataclasses.replace(batch, replayed=torch.tensor([False, False, True, True]))


def changed(batch: Unroll, where: torch.Tensor) -> Unroll:
    """Other rewards, log-probabilities and stored values in some lanes."""
    extras = {name: torch.where(where, x + 1.0, x) for name, x in batch.extras.items()}
    return dataclasses.replace(
        batch, reward=torch.where(where & batch.live, 1.0 - batch.reward, batch.reward),
        logp=torch.where(where, batch.logp - 0.7, batch.logp), extras=extras,
    )  # fmt: skip


@pytest.mark.parametrize("core", ["none", "lstm"])
def test_the_tasks_are_learnt_from_replayed_unrolls_if_there_are_any(core):
    learner = learner_of("a2c", NETS[core], ALL)
    auxiliary, nets, batch = learner.algorithm.auxiliary, learner.nets, mixed(learner)
    (total, metrics), (alone, told) = auxiliary.losses(nets, batch), auxiliary.losses(nets, last_two(batch))
    assert torch.equal(total, alone) and metrics == told
    (same, _) = auxiliary.losses(nets, changed(batch, ~batch.replayed))
    assert torch.equal(same, total), "new unrolls have no part in it"
    (other, _) = auxiliary.losses(nets, changed(batch, batch.replayed))
    assert not torch.equal(other, total)
    everything = dataclasses.replace(batch, replayed=None)
    (whole, _), (moved, _) = (auxiliary.losses(nets, x) for x in (everything, changed(everything, ~batch.replayed)))
    assert not torch.equal(whole, moved), "without replayed ones the new unrolls are learnt from"


def last_two(batch: Unroll) -> Unroll:
    part = columns(batch, torch.tensor([False, False, True, True]))
    assert part.lane.tolist() == [2, 3] and torch.equal(part.obs["obs"], batch.obs["obs"][:, 2:])
    assert all(torch.equal(part.state0[name], x[:, 2:]) for name, x in batch.state0.items())
    return dataclasses.replace(part, replayed=None)


def after_a_step(name: str, core: str, where: str | None, **changes) -> tuple[torch.Tensor, dict[str, float]]:
    """The weights after one update, and its metrics; rewards and log-probabilities of some unrolls are other ones."""
    learner = learner_of(name, NETS[core], PIXELS, scale_reward=True, **changes)
    batch = mixed(learner)
    if where is not None:
        batch = changed(batch, batch.replayed if where == "replayed" else ~batch.replayed)
    metrics = learner.step(batch, 0.0).metrics
    return learner.flat["all"].data.clone(), metrics


@pytest.mark.parametrize("core", ["none", "gru"])
@EVERY
def test_what_is_replayed_for_the_tasks_has_no_part_in_the_policy_s_loss(name, core):
    """Pixel control reads no reward: with it alone nothing at all depends on rewards of replayed unrolls."""
    weights, metrics = after_a_step(name, core, None)
    other, told = after_a_step(name, core, "replayed")
    assert torch.equal(weights, other) and metrics == told
    assert metrics["pixel_control_loss"] > 0
    assert not torch.equal(weights, after_a_step(name, core, "new")[0])


@pytest.mark.parametrize("core", ["none", "gru"])
@pytest.mark.parametrize("name", ["impala", "appo"])
def test_what_is_replayed_for_the_policy_is_learnt_from(name, core):
    queue = QueueConfig(replayed=1.0)
    (weights, metrics), (other, told) = (after_a_step(name, core, where, queue=queue) for where in (None, "replayed"))
    assert not torch.equal(weights, other) and metrics["policy_loss"] != told["policy_loss"]
    assert metrics["pixel_control_loss"] > 0


@EVERY
def test_the_loss_is_that_of_the_new_unrolls_and_the_tasks_on_the_replayed_ones(name):
    changes = {} if name in ("a2c", "impala") else {"epochs": 1, "minibatches": 1}
    learner, plain = (learner_of(name, MLP, aux, **changes) for aux in (ALL, None))
    plain.nets.load_state_dict(learner.nets.state_dict(), strict=False)
    batch = mixed(learner)
    new = dataclasses.replace(columns(batch, ~batch.replayed), replayed=None)
    whole, own = first_loss(learner, batch), first_loss(plain, new)
    side, _ = learner.algorithm.auxiliary.losses(learner.nets, batch)
    torch.testing.assert_close(whole, own + side.detach())
    assert abs(float(side)) > 1e-3


def first_loss(learner: Learner, batch: Unroll) -> torch.Tensor:
    return learner.first_gradients(batch, 0.0).losses["all"].detach()


@EVERY
def test_unrolls_are_kept_for_the_tasks_or_for_the_policy(name):
    def table(**changes):
        return learner_of(name, **changes).algorithm.plan().table

    aux = dataclasses.replace(PIXELS, replayed=0.5, ring=17)
    assert isinstance(table(), Queue) and isinstance(table(aux=dataclasses.replace(aux, replayed=0.0)), Queue)
    kept = table(aux=aux)
    assert isinstance(kept, Mix) and (kept.proportion, kept.ring) == (0.5, 17)
    if name in ("impala", "appo"):
        queue = QueueConfig(lag=3, batch=5, replayed=2.0, ring=33)
        for each in (None, aux):
            kept = table(aux=each, queue=queue)
            assert (kept.proportion, kept.ring, kept.queue.max_lag, kept.queue.batch) == (2.0, 33, 3, 5)


# Metrics and rewards


@EVERY
def test_metrics_are_means_over_the_minibatches_that_have_them(name):
    """The tasks run with the first minibatch of each pass. With weights that do not move all of them tell the same."""
    changes = {} if name in ("a2c", "impala") else {"epochs": 3, "minibatches": 4}
    learner = learner_of(name, MLP, ALL, lr=0.0, lr_end=0.0, **changes)
    batch = mixed(learner)
    _, told = learner.algorithm.auxiliary.losses(learner.nets, batch)
    report = learner.step(batch, 0.0)
    assert report.metrics["minibatches"] == (1 if name in ("a2c", "impala") else 12)
    assert all(math.isfinite(x) for x in report.metrics.values())
    assert len(told) == 3
    for metric, value in told.items():
        assert report.metrics[metric] == pytest.approx(float(value), rel=1e-5)


@EVERY
def test_values_are_replayed_with_the_rewards_that_the_policy_is_trained_with(name):
    """Else the two value losses would pull to returns of different scales."""
    aux = AuxConfig(value_replay=1.0)
    learner = learner_of(name, MLP, aux, lr=0.0, lr_end=0.0, scale_reward=True)
    batch = dataclasses.replace(mixed(learner), reward=1000.0 * mixed(learner).reward)
    metrics = learner.step(batch, 0.0).metrics
    moments = learner.nets["reward_scaler"].running
    assert int(moments.count) == int(batch.live[:, :2].sum()), "what is replayed was counted before"
    scaled = (batch.reward / (moments.m2 / moments.count).sqrt()).float().clamp(-10, 10)
    _, told = learner.algorithm.auxiliary.losses(learner.nets, dataclasses.replace(batch, reward=scaled))
    assert metrics["value_replay_loss"] == pytest.approx(float(told["value_replay_loss"]), rel=1e-5)


def test_tasks_that_read_the_code_of_an_auto_encoder_stop_where_the_policy_does():
    for stop, reaches in {"policy": False, "none": True, "reconstruction": True}.items():
        learner = learner_of("a2c", NETS["gru"], ALL, autoencoder=AutoencoderConfig(on=True, latent=5, stop=stop))
        nets, algorithm = learner.nets, learner.algorithm
        total, _ = algorithm.auxiliary.losses(nets, batch_of(algorithm, nets))
        encoder = [*nets["body"].torso.parameters(), *nets["body"].latent.parameters()]
        found = torch.autograd.grad(total, encoder, allow_unused=True)
        assert any(x is not None and x.any() for x in found) is reaches


# Bad input


def refused(name: str, aux: AuxConfig, spec: EnvSpec, *words: str, **changes) -> None:
    config = dataclasses.replace(CONFIGS[name], aux=aux, **changes)
    with pytest.raises(UsageError) as caught:
        KINDS[name](config, MLP, spec, B)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@EVERY
def test_pixel_control_needs_images_and_discrete_actions(name):
    refused(name, PIXELS, spec_of("vector"), "no image", "algo.aux.pixel_control 0")
    refused(name, PIXELS, spec_of("image", BOX), "'box'", "discrete", "algo.aux.pixel_control 0")
    refused(name, PIXELS, spec_of("image", MULTI), "'multi'", "algo.aux.pixel_control 0")
    KINDS[name](dataclasses.replace(CONFIGS[name], aux=AuxConfig(value_replay=1.0)), MLP, spec_of("vector", BOX), B)


def test_cells_fit_into_the_image():
    refused("a2c", dataclasses.replace(PIXELS, cell=7), spec_of(), "7 pixels", "6x8", "algo.aux.cell")
    refused("a2c", dataclasses.replace(PIXELS, cell=0), spec_of(), "algo.aux.cell", "1 or more")
    nets = learner_of("a2c", MLP, dataclasses.replace(PIXELS, cell=6)).nets
    assert nets["pixel_control"](torch.zeros(1, 12)).shape == (1, 3, 1, 1)


@EVERY
def test_reward_prediction_needs_three_rows(name):
    aux = AuxConfig(reward_prediction=1.0)
    refused(name, aux, spec_of(), "algo.unroll is 2", "algo.unroll 3", "algo.aux.reward_prediction 0", unroll=2)
    KINDS[name](dataclasses.replace(CONFIGS[name], aux=aux, unroll=3), MLP, spec_of(), B)


def test_a_negative_weight_is_refused():
    refused("a2c", AuxConfig(value_replay=-1.0), spec_of(), "algo.aux.value_replay", "0 or more")
