"""DQN on transitions: loss and gradient against loops, double-Q, C51, noise, priorities."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from support_dqn import algorithm, built, minibatch, transitions

from rookery.core.config import NetConfig, ReplayConfig
from rookery.core.errors import NumericError
from rookery.core.types import EnvSpec, Leaf
from rookery.ops.rescale import rescaled, unrescaled


def output_of(learner, items):
    return learner.gradients(minibatch(learner, items))


def double(x: torch.Tensor) -> np.ndarray:
    return x.detach().double().numpy()


# The loss of a fixed batch, by loops in float64


def scalar_targets(learner, items) -> list[float]:
    config, nets = learner.algorithm.config, learner.nets
    targets = []
    for i in range(len(items.reward)):
        obs = items.next_obs["obs"][i : i + 1]
        online, target = (double(nets[name](obs))[0] for name in ("q", "target_q"))
        value = target[online.argmax()] if config.double else target.max()
        if config.rescale:
            inner = float(items.reward[i]) + float(items.discount[i]) * float(unrescaled(torch.tensor(value)))
            targets.append(float(rescaled(torch.tensor(inner, dtype=torch.float64))))
        else:
            targets.append(float(items.reward[i]) + float(items.discount[i]) * value)
    return targets


def scalar_loss(weight: np.ndarray, bias: np.ndarray, config, items, targets) -> float:
    total = 0.0
    for i, target in enumerate(targets):
        q = weight[items.action[i]] @ double(items.obs["obs"][i]) + bias[items.action[i]]
        error = abs(target - q)
        if config.loss == "square" or error <= config.huber:
            loss = 0.5 * error**2
        else:
            loss = config.huber * (error - 0.5 * config.huber)
        total += float(items.weight[i]) * loss
    return total / len(targets)


@pytest.mark.parametrize("loss", ["huber", "square"])
@pytest.mark.parametrize("rescale", [False, True])
@pytest.mark.parametrize("double_q", [False, True])
def test_loss_and_gradient_of_a_fixed_batch_are_those_of_a_loop(double_q, rescale, loss):
    learner = built(double=double_q, rescale=rescale, loss=loss, huber=0.7)
    config, items = learner.algorithm.config, transitions(16)
    targets = scalar_targets(learner, items)
    output = output_of(learner, items)
    layer = learner.nets["q"].advantage.layers[0]
    weight, bias = double(layer.weight), double(layer.bias)
    expected = scalar_loss(weight, bias, config, items, targets)
    assert float(output.losses["all"].detach()) == pytest.approx(expected, rel=1e-5)
    assert float(output.metrics["loss"]) == pytest.approx(expected, rel=1e-5)
    taken = [weight[a] @ double(o) + bias[a] for a, o in zip(items.action, items.obs["obs"])]
    errors = np.abs(np.array(targets) - taken)
    assert (errors > config.huber).any() and (errors < config.huber).any()
    np.testing.assert_allclose(output.priorities.numpy(), errors, rtol=1e-4, atol=1e-6)
    assert float(output.metrics["q"]) == pytest.approx(np.mean(taken), rel=1e-4)
    assert float(output.metrics["error"]) == pytest.approx(errors.mean(), rel=1e-4)
    for at in np.ndindex(weight.shape):
        sides = []
        for h in (1e-6, -1e-6):
            moved = weight.copy()
            moved[at] += h
            sides.append(scalar_loss(moved, bias, config, items, targets))
        assert float(layer.weight.grad[at]) == pytest.approx((sides[0] - sides[1]) / 2e-6, rel=1e-3, abs=1e-6)
    assert all(p.grad is None for name in ("target_q", "target_body") for p in learner.nets[name].parameters())


def test_the_argmax_is_the_online_net_s_and_the_value_the_target_net_s():
    """P66: Q_online prefers action 0, Q_target = [1, 5, 2] says 1 of it; without double-Q the target is 5."""
    for double_q, expected in ((True, 1.0), (False, 5.0)):
        learner = built(double=double_q, loss="square")
        set_biases(learner, "q", [3.0, 2.0, 0.0])
        set_biases(learner, "target_q", [1.0, 5.0, 2.0])
        items = dataclasses.replace(
            transitions(), reward=torch.zeros(8), discount=torch.ones(8), action=torch.zeros(8, dtype=torch.int64)
        )
        torch.testing.assert_close(output_of(learner, items).priorities, torch.full((8,), abs(expected - 3.0)))


def set_biases(learner, name: str, values) -> None:
    """Values that do not depend on the observation."""
    layer = learner.nets[name].advantage.layers[0]
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias.copy_(torch.as_tensor(values, dtype=torch.float32))


def test_a_large_error_has_the_gradient_of_the_bound():
    """P75: under the mean over the batch each of N errors of 10 contributes bound / N."""
    learner = built(huber=0.25)
    set_biases(learner, "q", [10.0, 0.0, 0.0])
    items = dataclasses.replace(
        transitions(), reward=torch.zeros(8), discount=torch.zeros(8), action=torch.zeros(8, dtype=torch.int64),
        weight=torch.ones(8),
    )  # fmt: skip
    output_of(learner, items)
    torch.testing.assert_close(learner.nets["q"].advantage.layers[0].bias.grad, torch.tensor([0.25, 0.0, 0.0]))


def test_importance_weights_scale_gradients_and_not_priorities():
    learner, items = built(), transitions()
    first = output_of(learner, items)
    gradient = learner.flat["all"].grad.clone()
    second = output_of(learner, dataclasses.replace(items, weight=3 * items.weight))
    torch.testing.assert_close(learner.flat["all"].grad, 3 * gradient)
    assert torch.equal(first.priorities, second.priorities)


def test_termination_leaves_nothing_of_the_next_state():
    learner, items = built(), dataclasses.replace(transitions(), discount=torch.zeros(8))
    first = output_of(learner, items)
    second = output_of(learner, dataclasses.replace(items, next_obs={"obs": torch.randn(8, 3)}))
    assert torch.equal(first.priorities, second.priorities)


# C51

C51 = {
    "a": (0.5, 0.9, [0.03, 0.15, 0.32, 0.32, 0.18]),
    "b": (0.3, 0.0, [0.0, 0.0, 0.7, 0.3, 0.0]),
    "c": (5.0, 0.9, [0.0, 0.0, 0.0, 0.0, 1.0]),
    "d": (0.0, 1.0, [0.1, 0.2, 0.4, 0.2, 0.1]),
    "e": (1.0, 1.0, [0.0, 0.1, 0.2, 0.4, 0.3]),
}


@pytest.mark.parametrize("case", C51)
def test_golden_projections_reach_the_loss(case):
    """C51a-e, P69, P70: cross-entropy of the projected target relative to what the online net says."""
    reward, discount, target = C51[case]
    learner = built(atoms=5)
    p = torch.tensor([0.1, 0.2, 0.4, 0.2, 0.1])
    set_biases(learner, "target_q", p.log().repeat(3))
    said = torch.tensor([0.3, -0.2, 0.5, 0.1, -0.7])
    set_biases(learner, "q", said.repeat(3))
    items = transitions()
    items = dataclasses.replace(items, reward=torch.full((8,), reward), discount=torch.full((8,), discount))
    output = output_of(learner, items)
    expected = -(torch.tensor(target) * said.log_softmax(0)).sum()
    torch.testing.assert_close(output.priorities, expected.expand(8))
    torch.testing.assert_close(output.losses["all"].detach(), (expected * items.weight).mean())
    cut = target[0] * (reward - 2 * discount < -2) + target[-1] * (reward + 2 * discount > 2)
    assert float(output.metrics["mass_at_ends"]) == pytest.approx(cut, abs=1e-6)
    mean = (said.softmax(0) * torch.linspace(-2, 2, 5)).sum()
    assert float(output.metrics["q"]) == pytest.approx(float(mean), abs=1e-6)


def test_double_q_of_distributions_goes_by_their_means():
    learner = built(atoms=5)
    low, high = torch.tensor([0.9, 0.1, 0, 0, 0]), torch.tensor([0, 0, 0, 0.4, 0.6])
    # By its mean the online net prefers action 1, though action 0 has the largest single probability.
    set_biases(learner, "q", torch.cat([low, high, low]).clamp(min=1e-9).log())
    mine = torch.tensor([0.1, 0.2, 0.4, 0.2, 0.1])
    set_biases(learner, "target_q", torch.cat([low, mine, high]).clamp(min=1e-9).log())
    items = dataclasses.replace(transitions(), reward=torch.zeros(8), discount=torch.ones(8))
    items = dataclasses.replace(items, action=torch.ones(8, dtype=torch.int64))
    expected = -(mine * high.clamp(min=1e-9).log().log_softmax(0)).sum()
    torch.testing.assert_close(output_of(learner, items).priorities, expected.expand(8))


@pytest.mark.parametrize("dueling", [False, True])
def test_the_gradient_of_a_distribution_by_differences(dueling):
    learner, items = built(atoms=5, dueling=dueling, stream=4, noisy=True), transitions()
    made = minibatch(learner, items)
    learner.gradients(made)
    flat = learner.flat["all"]
    gradient = flat.grad.clone()
    direction = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(3))
    slope = float(torch.dot(gradient, direction))
    sides = []
    for h in (1e-3, -2e-3):
        flat.data.add_(direction, alpha=h)
        # The target is a constant, though the online net has a part in choosing its action.
        sides.append(float(learner.algorithm.losses(learner.nets, made).losses["all"].detach()))
    assert (sides[0] - sides[1]) / 2e-3 == pytest.approx(slope, rel=0.02, abs=1e-3)


# Noise


def test_three_noises_for_three_passes():
    """P71: drawn anew for every batch, different for the online pass, the choice and the target."""
    learner, items = built(noisy=True, stream=4), transitions()
    noise = minibatch(learner, items, seed=1).noise
    assert noise.shape == (3, learner.nets["q"].noise)
    assert len({tuple(row.tolist()) for row in noise}) == 3
    assert torch.equal(noise, minibatch(learner, items, seed=1).noise)
    assert not torch.equal(noise, minibatch(learner, items, seed=2).noise)
    assert minibatch(built(), items).noise is None


def test_each_noise_reaches_its_own_pass():
    learner, items = built(noisy=True, stream=4), transitions(64)
    made = minibatch(learner, items)

    def parts(noise):
        rows = learner.algorithm._transitions(learner.nets, items, noise.unbind(0))
        return rows.online.detach(), rows.bootstrap

    online, bootstrap = parts(made.noise)
    for which in range(3):
        other = made.noise.clone()
        other[which] = minibatch(learner, items, seed=9).noise[which]
        changed_online, changed = parts(other)
        assert torch.equal(changed_online, online) == (which != 0)
        assert torch.equal(changed, bootstrap) == (which == 0)
    learner.algorithm = algorithm(noisy=True, stream=4, double=False)
    _, bootstrap = parts(made.noise)
    other = made.noise.clone()
    other[1] += 1
    assert torch.equal(parts(other)[1], bootstrap), "without double-Q nobody chooses"


# Mixes


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop", "adagrad"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dueling": True, "stream": 5, "trunk_scale": True},
        {"shared_bias": True},
        {"atoms": 5, "dueling": True, "noisy": True},
        {"rescale": True, "double": False, "momentum": 0.9},
    ],
    ids=["plain", "dueling", "shared-bias", "rainbow", "rescale"],
)
def test_repeated_updates_on_one_batch_lower_its_loss(changes, optimizer):
    lr = {"adam": 1e-2, "rmsprop": 5e-2, "adagrad": 1e-1}[optimizer] * (0.2 if "momentum" in changes else 1)
    learner = built(NetConfig(hidden=(8,)), lr=lr, optimizer=optimizer, target_period=1000, **changes)
    items = transitions(16)
    losses = [learner.step(items, 0.0).metrics["loss"] for _ in range(80)]
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5]) and all(map(math.isfinite, losses))


def test_images_are_learnt_from_bytes():
    spec = EnvSpec("eye", {"obs": Leaf((2, 10, 10), "uint8", "image", stack=2)}, algorithm().spec.action)
    net = NetConfig(features=6)
    learner = built(net, spec=spec, dueling=True, atoms=5, replay=ReplayConfig(batch=8, start="actor"))
    eye = torch.randint(256, (8, 2, 10, 10), dtype=torch.uint8)
    items = dataclasses.replace(transitions(), obs={"obs": eye}, next_obs={"obs": eye.flip(0)})
    report = learner.step(items, 0.0)
    assert math.isfinite(report.metrics["loss"]) and learner.algorithm.work(learner.nets) == math.inf
    with torch.inference_mode():
        act = learner.algorithm.act(learner.nets, {"obs": eye}, {}, None)
    assert act.action.shape == (8,) and act.extras["q"].shape == (8,)


# What is not finite


@pytest.mark.parametrize("loss", ["huber", "square"])
def test_an_infinite_error_reaches_neither_weights_nor_priorities(loss):
    learner = built(loss=loss)
    good, bad = transitions(), transitions()
    bad.reward[3] = math.inf
    before = learner.flat["all"].data.clone()
    report = learner.step(bad, 0.0)
    assert report.priorities is None and learner.skipped == 1 and learner.updates == 0
    assert torch.equal(learner.flat["all"].data, before)
    assert learner.step(good, 0.0).priorities.isfinite().all() and learner.updates == 1
    learner.step(bad, 0.0)
    learner.step(bad, 0.0)
    with pytest.raises(NumericError, match="3 times in a row"):
        learner.step(bad, 0.0)


def test_the_epsilon_that_is_told_is_the_one_that_acts():
    """In a worker of async_grads nobody runs the schedule: the value comes with the weights."""
    learner = built()
    learner.nets["epsilon"].value.fill_(0.125)
    assert float(learner.gradients(minibatch(learner, transitions())).metrics["epsilon"]) == 0.125
