"""An auto-encoder in the policy's network: what actors receive, where gradients stop, freezing, and that it learns."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from support_auxiliary import (
    ALL,
    CONFIGS,
    KINDS,
    LEAVES,
    MLP,
    NETS,
    B,
    T,
    batch_of,
    lanes_of,
    learner_of,
    rig,
    spec_of,
)
from support_lanes import ScriptedLanes

from rookery.algorithms.a2c import A2C
from rookery.algorithms.ppo import PPO, PPOConfig
from rookery.core.config import AutoencoderConfig, NetConfig
from rookery.core.errors import UsageError
from rookery.core.types import Explore
from rookery.nets.flat import FlatParams
from rookery.roles.learner import Learner
from rookery.roles.weights import Published

LATENT = 5
ON = AutoencoderConfig(on=True, latent=LATENT)
EVERY = pytest.mark.parametrize("name", KINDS)
CORES = pytest.mark.parametrize("core", NETS)


def encoder(learner: Learner) -> list[torch.nn.Parameter]:
    body = learner.nets["body"]
    return [*body.torso.parameters(), *body.latent.parameters()]


def flat(parameters) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in parameters])


# What actors receive


@EVERY
def test_heads_of_auxiliary_tasks_change_nothing_of_what_actors_receive(name):
    plain, more = (learner_of(name, MLP, aux, shake=0.0) for aux in (None, ALL))
    assert set(more.nets) - set(plain.nets) == {"pixel_control", "reward_prediction"}
    assert torch.equal(plain.read(), more.read()) and more.flat["all"].data.numel() > plain.flat["all"].data.numel()


@CORES
@EVERY
def test_the_decoder_is_never_published(name, core):
    """Actors get the encoder and the heads: without the decoder, the vector is longer by the code layer only."""
    plain, coded = (learner_of(name, NETS[core], autoencoder=x, shake=0.0) for x in (None, ON))
    nets, algorithm = coded.nets, coded.algorithm
    assert not {"decoder", "pixel_control", "reward_prediction"} & set(algorithm.published)
    modules = [nets[each] for each in algorithm.published if each in nets]
    assert coded.published.size == FlatParams.room(modules)
    inside, outside = (FlatParams.room([learner.nets["body"].torso]) for learner in (plain, coded))
    assert inside == outside and torch.equal(plain.read()[:inside], coded.read()[:inside]), "the same torso"
    assert Published(algorithm, algorithm.nets()).size == coded.published.size, "both ends agree"

    before = coded.read()
    with torch.no_grad():
        for parameter in nets["decoder"].parameters():
            parameter.add_(1.0)
    assert torch.equal(coded.read(), before)
    with torch.no_grad():
        nets["body"].latent.linear.weight.add_(1.0)
    assert not torch.equal(coded.read(), before)


@EVERY
def test_what_is_not_published_is_trained_all_the_same(name):
    learner = learner_of(name, MLP, ALL, autoencoder=ON)
    parts = {part: flat(learner.nets[part].parameters()) for part in ("decoder", "pixel_control", "reward_prediction")}
    learner.step(batch_of(learner.algorithm, learner.nets), 0.0)
    for part, before in parts.items():
        assert not torch.equal(flat(learner.nets[part].parameters()), before), part


@CORES
def test_policy_and_value_read_the_code(core):
    learner = learner_of("a2c", NETS[core], autoencoder=ON)
    nets, body = learner.nets, learner.nets["body"]
    batch = batch_of(learner.algorithm, nets)
    width = LATENT if core == "none" else 6
    assert (body.code, body.features) == (LATENT, width)
    assert nets["policy"].linear.in_features == nets["value"].linear.in_features == width
    obs = {"obs": batch.obs["obs"][0]}
    code = torch.tanh(body.latent.linear(body.torso(obs)))
    state = {name: x[0] for name, x in batch.state0.items()}
    features = code if core == "none" else body.core.step(code, state)[0]
    torch.testing.assert_close(body.step(obs, state)[0], features)
    torch.testing.assert_close(body.encode(obs), code)


def test_without_images_the_value_has_a_network_of_its_own():
    nets = learner_of("ppo", MLP, autoencoder=ON, leaf="vector").nets
    assert nets["value_body"].latent is None and nets["value"].linear.in_features == 12
    assert nets["policy"].linear.in_features == LATENT


def test_acting_with_a_code_does_not_take_the_short_cut_through_numpy():
    """The short cut knows no code."""
    obs = {"obs": torch.randn(6, 5)}
    for config, used in ((None, True), (ON, False)):
        learner = learner_of("ppo", MLP, autoencoder=config, leaf="vector")
        algorithm, nets = learner.algorithm, learner.nets
        assert (algorithm._quick.of(nets) is not None) is used
        with torch.no_grad():
            output = algorithm.act(nets, obs, {}, Explore(torch.Generator().manual_seed(3), torch.arange(6).numpy()))
            action = torch.as_tensor(output.action)
            params = nets["policy"](nets["body"].sequence(obs, {}, None)[0])
            logp, _ = nets["policy"].logp_entropy(params, action)
        torch.testing.assert_close(torch.as_tensor(output.logp), logp, rtol=1e-4, atol=1e-5)


# Where gradients stop


def gradient(name: str, core: str, autoencoder: AutoencoderConfig) -> dict[str, torch.Tensor]:
    """Of the whole loss of one batch: of the encoder, the decoder, and what is behind the code."""
    changes = {} if name in ("a2c", "impala") else {"epochs": 1, "minibatches": 1}
    learner = learner_of(name, NETS[core], autoencoder=autoencoder, **changes)
    learner.first_gradients(batch_of(learner.algorithm, learner.nets), 0.0)
    groups = {"encoder": encoder(learner), "decoder": learner.nets["decoder"].parameters()}
    groups["heads"] = [*learner.nets["policy"].parameters(), *learner.nets["value"].parameters()]
    return {part: torch.cat([p.grad.flatten() for p in parameters]) for part, parameters in groups.items()}


@CORES
@EVERY
def test_either_gradient_can_be_kept_from_the_encoder(name, core):
    found = {
        (stop, weight): gradient(name, core, dataclasses.replace(ON, stop=stop, weight=weight))
        for stop in ("none", "policy", "reconstruction")
        for weight in (0.0, 1.0)
    }
    of = {key: parts["encoder"] for key, parts in found.items()}
    assert not of["policy", 0.0].any(), "nothing of the policy's and value's loss"
    assert of["policy", 1.0].any(), "but that of the reconstruction"
    assert torch.equal(of["reconstruction", 0.0], of["reconstruction", 1.0]) and of["reconstruction", 0.0].any()
    torch.testing.assert_close(of["none", 1.0], of["policy", 1.0] + of["none", 0.0], rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(of["none", 0.0], of["reconstruction", 0.0], rtol=1e-4, atol=1e-7)
    for stop in ("none", "policy", "reconstruction"):
        assert found[stop, 1.0]["decoder"].any(), "the decoder learns in any case"
        torch.testing.assert_close(found[stop, 1.0]["heads"], found["none", 0.0]["heads"], rtol=1e-5, atol=1e-8)


@EVERY
@pytest.mark.parametrize("leaf", ["image", "stack", "vector"])
def test_the_reconstruction_is_of_live_rows_and_of_the_newest_frame(name, leaf):
    changes = {} if name in ("a2c", "impala") else {"epochs": 1, "minibatches": 1}
    learner = learner_of(name, MLP, autoencoder=ON, leaf=leaf, lr=0.0, lr_end=0.0, **changes)
    nets, batch = learner.nets, batch_of(learner.algorithm, learner.nets, leaf)
    error = []
    with torch.no_grad():
        for t in range(T):
            x = batch.obs["obs"][t]
            predicted = nets["decoder"](nets["body"].latent(nets["body"].torso({"obs": x})))["obs"]
            x = x[:, 3] if leaf == "stack" else x
            x = x / 255 if LEAVES[leaf].dtype == "uint8" else x
            error.append(0.5 * (predicted - x).square().flatten(1).mean(1))
    expected = float(torch.stack(error)[batch.live].mean())
    assert learner.step(batch, 0.0).metrics["reconstruction_loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("normalize", [False, True], ids=["raw", "normalized"])
@pytest.mark.parametrize("core", ["none", "lstm"])
def test_vectors_are_reconstructed_as_the_network_sees_them(core, normalize):
    """Else observations of a large scale would decide the loss."""
    net = dataclasses.replace(NETS[core], normalize_obs=normalize)
    config = PPOConfig(unroll=6, chunk=3, epochs=1, minibatches=1, autoencoder=ON)
    made = rig(PPO, config, ScriptedLanes(offset=50.0), net)
    losses = [made.update().metrics["reconstruction_loss"] for _ in range(4)]
    batch = made.collect()
    nets = made.learner.nets
    with torch.no_grad():
        obs = nets["normalizer"]({"obs": batch.obs["obs"][:-1]})["obs"]
        code = nets["body"].latent(nets["body"].torso({"obs": obs.flatten(0, 1)}))
        error = (0.5 * (nets["decoder"](code)["obs"] - obs.flatten(0, 1)).square()).mean(1)
    found = made.learner.step(batch, 0.0).metrics["reconstruction_loss"]
    assert found == pytest.approx(float(error[batch.live.flatten()].mean()), rel=1e-4)
    assert (losses[0] > 100) and ((found < 10) is normalize), (losses, found)


# Freezing


@pytest.mark.parametrize("stop", ["none", "policy"])
@pytest.mark.parametrize("name", ["a2c", "ppo", "appo"])
def test_a_frozen_encoder_stays_as_it_is_while_the_heads_learn(name, stop):
    """Adam has momentum: no gradient is not enough. It stays frozen in a run that is resumed."""
    config = dataclasses.replace(ON, freeze=0.5, stop=stop)
    learner = learner_of(name, NETS["gru"], ALL, autoencoder=config)
    batches = [batch_of(learner.algorithm, learner.nets, seed=seed) for seed in range(3)]

    def steps(learner: Learner, progress: float, count: int) -> list[dict[str, float]]:
        return [learner.step(batches[i % 3], progress).metrics for i in range(count)]

    start = flat(encoder(learner))
    told = steps(learner, 0.4, 3)
    moved = flat(encoder(learner))
    assert not torch.equal(start, moved) and "reconstruction_loss" in told[-1]
    updates = learner.updates
    heads = [flat(learner.nets[part].parameters()) for part in ("policy", "value", "pixel_control")]
    core = flat(learner.nets["body"].core.parameters())
    seen = watched(learner)
    told = steps(learner, 0.5, 8)
    assert len(seen) == learner.updates - updates >= 8 and all(torch.equal(each, moved) for each in seen)
    assert not any(
        torch.equal(flat(learner.nets[part].parameters()), before)
        for part, before in zip(("policy", "value", "pixel_control"), heads)
    )
    assert not torch.equal(flat(learner.nets["body"].core.parameters()), core)
    assert "reconstruction_loss" not in told[-1] and all(math.isfinite(x) for x in told[-1].values())

    resumed = learner_of(name, NETS["gru"], ALL, autoencoder=config)
    resumed.load(*learner.state())
    for each in (learner, resumed):
        steps(each, 0.6, 4)
        assert torch.equal(flat(encoder(each)), moved)
    assert torch.equal(resumed.flat["all"].data, learner.flat["all"].data)


def watched(learner: Learner) -> list[torch.Tensor]:
    """The encoder after each step of the optimiser from now on, also of those within an update."""
    optimizer, seen = learner.optimizers["all"], []
    step = optimizer.step

    def watch() -> None:
        step()
        seen.append(flat(encoder(learner)))

    optimizer.step = watch
    return seen


def test_a_run_that_is_resumed_behind_the_freeze_begins_with_momentum_of_before():
    """The last checkpoint may be of the time before: the encoder stays as that checkpoint has it."""
    config = dataclasses.replace(ON, freeze=0.5)
    learner, resumed = (learner_of("ppo", MLP, autoencoder=config) for _ in range(2))
    batch = batch_of(learner.algorithm, learner.nets)
    for _ in range(3):
        learner.step(batch, 0.4)
    resumed.load(*learner.state())
    resumed.step(batch, 0.7)
    assert torch.equal(flat(encoder(resumed)), flat(encoder(learner)))
    assert not torch.equal(resumed.flat["all"].data, learner.flat["all"].data)


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_a_gradient_that_comes_late_does_not_move_a_frozen_encoder(optimizer):
    """A worker has computed it before it knew."""
    learner = learner_of("a2c", MLP, autoencoder=dataclasses.replace(ON, freeze=0.5), optimizer=optimizer)
    gradients = torch.ones_like(learner.flat["all"].grad)
    learner.accept(gradients, 0.4)
    before, whole = flat(encoder(learner)), learner.flat["all"].data.clone()
    for _ in range(3):
        learner.accept(gradients, 0.6)
    assert torch.equal(flat(encoder(learner)), before) and not torch.equal(learner.flat["all"].data, whole)


# Learning


def test_the_reconstruction_of_catch_is_learnt_while_playing():
    """Better than the best picture that knows nothing of the observation: the mean of all."""
    net = NetConfig(torso="mlp", hidden=(64,))
    config = PPOConfig(
        unroll=16, epochs=2, minibatches=2, lr=3e-3, lr_end=3e-3, autoencoder=AutoencoderConfig(True, 16)
    )
    made = rig(PPO, config, lanes_of("rookery/Catch-v0", 8), net)
    losses = [made.update().metrics["reconstruction_loss"] for _ in range(60)]
    batch = made.collect()
    seen = batch.obs["obs"][:-1][batch.live].float() / 255
    ignorant = float(0.5 * (seen - seen.mean(0)).square().mean())
    assert losses[-1] < 0.35 * losses[0] and losses[-1] < 0.5 * ignorant, (losses[0], losses[-1], ignorant)


@pytest.mark.parametrize("normalize", [False, True], ids=["raw", "normalized"])
def test_the_reconstruction_of_cartpole_is_learnt_while_balancing(normalize):
    net = NetConfig(hidden=(32,), normalize_obs=normalize)
    config = PPOConfig(unroll=16, epochs=2, minibatches=2, lr=3e-3, lr_end=3e-3, autoencoder=AutoencoderConfig(True, 8))
    made = rig(PPO, config, lanes_of("CartPole-v1", 8), net)
    losses = [made.update().metrics["reconstruction_loss"] for _ in range(40)]
    assert min(losses[-5:]) < 0.2 * max(losses[:5]), losses


# Bad input


@EVERY
@pytest.mark.parametrize(
    "field, value, words", [("latent", 0, "1 or more"), ("weight", -1.0, "0 or more"), ("freeze", 1.5, "from 0 to 1")]
)
def test_what_is_no_auto_encoder_is_refused(name, field, value, words):
    config = dataclasses.replace(CONFIGS[name], autoencoder=dataclasses.replace(ON, **{field: value}))
    with pytest.raises(UsageError) as caught:
        KINDS[name](config, MLP, spec_of(), B)
    assert f"algo.autoencoder.{field}" in str(caught.value) and words in str(caught.value), str(caught.value)


def test_without_one_there_is_no_code_and_no_loss():
    learner = learner_of("a2c", MLP, autoencoder=AutoencoderConfig(latent=LATENT))
    assert "decoder" not in learner.nets and learner.nets["body"].latent is None
    assert "reconstruction_loss" not in learner.step(batch_of(learner.algorithm, learner.nets), 0.0).metrics
    assert isinstance(learner.algorithm, A2C)
