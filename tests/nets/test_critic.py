"""Policies and critics of deterministic policy gradients: ranges, starts, the two-torso networks, cores, floors."""

from __future__ import annotations

import copy

import pytest
import torch

from rookery.core.config import NetConfig
from rookery.core.errors import UsageError
from rookery.core.types import ActionSpec, EnvSpec, Leaf
from rookery.nets.critic import (
    STD_FLOOR,
    CategoricalHead,
    Critic,
    DeterministicPolicy,
    Layers,
    MixtureHead,
    RandomStart,
    ScalarHead,
)
from rookery.nets.flat import FlatParams
from rookery.ops.distributional import mixture_cross_entropy

ACTION = ActionSpec("box", size=2, low=(-1.0,) * 2, high=(1.0,) * 2, box_shape=(2,))
VECTOR = EnvSpec("vector", {"obs": Leaf((3,), "float32", "vector")}, ACTION)
BODY = EnvSpec(
    "body",
    {
        "joints": Leaf((4,), "float32", "vector"),
        "touch": Leaf((2,), "float32", "vector"),
        "terrain": Leaf((5, 3), "float32", "vector"),
        "camera": Leaf((2, 12, 12), "uint8", "image"),
        "mode": Leaf((), "int64", "discrete", 3),
    },
    ACTION,
)
NET = NetConfig(hidden=(8,), features=6)
HEADS = {
    "scalar": ScalarHead,
    "categorical": lambda inputs: CategoricalHead(inputs, 5, -2.0, 2.0),
    "mixture": lambda inputs: MixtureHead(inputs, 3, -10.0, 30.0),
}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(5)


def observe(spec: EnvSpec, rows: int, seed: int = 0) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    made = {}
    for key, leaf in spec.obs.items():
        high = {"discrete": leaf.n, "image": 256, "vector": 0}[leaf.kind]
        if high:
            made[key] = torch.randint(high, (rows, *leaf.shape), generator=rng).to(getattr(torch, leaf.dtype))
        else:
            made[key] = torch.randn(rows, *leaf.shape, generator=rng)
    return made


def act(policy: DeterministicPolicy, obs: dict[str, torch.Tensor]) -> torch.Tensor:
    return policy.action(policy.step(obs, {})[0])


def q(critic: Critic, obs: dict[str, torch.Tensor], action: torch.Tensor) -> torch.Tensor:
    return critic.mean(critic.value(critic.step(obs, {})[0], action))


@pytest.mark.parametrize("spec, second", [(VECTOR, ()), (BODY, ()), (BODY, ("terrain", "camera"))])
def test_actions_fill_the_open_box_and_start_near_its_middle(spec, second):
    policy = DeterministicPolicy(spec, NET, (7, 6), second_torso=second)
    obs = observe(spec, 9)
    action = act(policy, obs)
    assert action.shape == (9, 2) and action.abs().max() < 0.1
    with torch.no_grad():
        policy.out.weight.mul_(1e5)
    assert 0.9 < act(policy, obs).abs().max() <= 1


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("spec, second", [(VECTOR, ()), (BODY, ()), (BODY, ("terrain", "camera"))])
def test_a_critic_reads_every_observation_and_the_action(spec, second, kind):
    critic = Critic(spec, NET, (7, 6), HEADS[kind], activation="tanh", second_torso=second)
    obs = {key: x.requires_grad_() if x.is_floating_point() else x for key, x in observe(spec, 4).items()}
    action = torch.zeros(4, 2, requires_grad=True)
    value = q(critic, obs, action)
    assert value.shape == (4,)
    value.sum().backward()
    assert action.grad.abs().min() > 0
    for key, x in obs.items():
        if x.is_floating_point():
            assert x.grad.flatten(1).abs().sum(1).min() > 0, key
        else:
            other = obs | {key: (x + 1) % 3 if key == "mode" else 255 - x}
            assert not torch.equal(q(critic, other, action), value), key


def test_the_standard_networks_are_the_papers_layers_and_nothing_else():
    policy, critic = DeterministicPolicy(VECTOR, NET, (300, 200)), Critic(VECTOR, NET, (400, 300), ScalarHead)
    assert [tuple(p.shape) for p in policy.parameters() if p.dim() == 2] == [(300, 3), (200, 300), (2, 200)]
    assert [tuple(p.shape) for p in critic.parameters() if p.dim() == 2] == [(400, 5), (300, 400), (1, 300)]


@pytest.mark.parametrize("second", [(), ("terrain", "camera")])
def test_torsos_start_uniform_within_one_over_the_root_of_their_inputs(second):
    torso = DeterministicPolicy(BODY, NET, (7,), second_torso=second).torso
    layers = [layer for layer in torso.modules() if isinstance(layer, torch.nn.Linear | torch.nn.Conv2d)]
    assert len(layers) >= 3
    for layer in layers:
        bound = layer.weight[0].numel() ** -0.5
        assert 0.8 * bound < layer.weight.abs().max() <= bound
        assert 0 < layer.bias.abs().max() <= bound


def test_two_torsos_keep_their_groups_apart_until_they_are_joined():
    second = ("terrain", "camera")
    policy = DeterministicPolicy(BODY, NET, (7,), second_torso=second)
    one, other = observe(BODY, 3, seed=1), observe(BODY, 3, seed=2)
    first = policy.torso.first.features
    here, there = policy.step(one, {})[0], policy.step(one | {key: other[key] for key in second}, {})[0]
    assert torch.equal(here[:, :first], there[:, :first]) and not torch.equal(here[:, first:], there[:, first:])
    there = policy.step(other | {key: one[key] for key in second}, {})[0]
    assert torch.equal(here[:, first:], there[:, first:]) and not torch.equal(here[:, :first], there[:, :first])
    assert policy.features == here.shape[1] == 8 + (6 + 8)  # `hidden` of each MLP, `features` of the CNN


def test_a_cnn_that_is_asked_for_serves_the_group_with_images():
    net = NetConfig(hidden=(8,), features=6, torso="tiny")
    policy = DeterministicPolicy(BODY, net, (7,), second_torso=("camera",))
    assert act(policy, observe(BODY, 2)).shape == (2, 2)


@pytest.mark.parametrize("second", [("terain",), ("joints", "touch", "terrain", "camera", "mode")])
def test_a_second_torso_that_cannot_be_is_refused_with_the_names_there_are(second):
    with pytest.raises(UsageError, match=r"second_torso.*\['camera', 'joints', 'mode', 'terrain', 'touch'\]"):
        DeterministicPolicy(BODY, NET, (7,), second_torso=second)


def test_the_first_layer_is_normalised_so_that_the_scale_of_its_input_hardly_matters():
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    norm, plain = Layers(3, (16, 8), True, "relu"), Layers(3, (16, 8), False, "relu")
    assert norm.norm is not None and plain.norm is None
    with torch.no_grad():
        hidden = torch.tanh(norm.norm(norm.linear[0](x)))
        torch.testing.assert_close(norm(x), torch.relu(norm.linear[1](hidden)))
        torch.testing.assert_close(plain(x), torch.relu(plain.linear[1](torch.relu(plain.linear[0](x)))))
        assert (norm(1e6 * x) - norm(1e3 * x)).abs().max() < 0.05


@pytest.mark.parametrize("activation, bottom", [("relu", 0.0), ("elu", -1.0), ("tanh", -1.0)])
def test_activations(activation, bottom):
    layers = Layers(3, (16,), False, activation)
    y = layers(1e4 * torch.randn(64, 3, generator=torch.Generator().manual_seed(0)))
    assert y.min().item() == pytest.approx(bottom) and (y.max() > 1) == (activation != "tanh")


def test_no_hidden_layers_is_a_linear_policy():
    policy = DeterministicPolicy(VECTOR, NET, ())
    obs = observe(VECTOR, 4)
    torch.testing.assert_close(act(policy, obs), torch.tanh(policy.out(obs["obs"])))


def test_first_values_are_near_zero_or_the_middle_of_their_range():
    obs, action = observe(VECTOR, 50), torch.zeros(50, 2)
    for kind, middle, width in (("scalar", 0.0, 0.1), ("categorical", 0.0, 0.1), ("mixture", 10.0, 1.0)):
        value = q(Critic(VECTOR, NET, (7, 6), HEADS[kind]), obs, action)
        assert (value - middle).abs().max() < width, kind


def test_the_mean_of_a_categorical_head_is_over_its_atoms():
    head = CategoricalHead(4, 3, 0.0, 10.0)
    assert head.atoms.tolist() == [0.0, 5.0, 10.0]
    logits = torch.tensor([[0.0, -50.0, -50.0], [-50.0, -50.0, 0.0], [0.0, -50.0, 0.0]])
    assert head.mean(logits).tolist() == pytest.approx([0.0, 10.0, 5.0])


def test_a_mixture_starts_spread_over_its_range_and_covers_it():
    head = MixtureHead(4, 5, -100.0, 300.0)
    with torch.no_grad():
        mixture = head(torch.zeros(1, 4))
    torch.testing.assert_close(mixture.mean[0], torch.tensor([0.0, 50.0, 100.0, 150.0, 200.0]), atol=2, rtol=0)
    torch.testing.assert_close(mixture.std[0], torch.full((5,), 62.0), atol=1, rtol=0)
    torch.testing.assert_close(mixture.log_weight.exp().sum(1), torch.ones(1))


def test_vanishing_deviations_stop_at_the_floor_and_the_loss_stays_finite():
    head = MixtureHead(4, 2, -1.0, 1.0)
    with torch.no_grad():
        head.out.bias[4:] = -80.0  # softplus of it is 0 in float32
    mixture = head(torch.zeros(1, 4))
    assert mixture.std.min().item() == pytest.approx(STD_FLOOR)
    loss = mixture_cross_entropy(mixture, torch.tensor([[1e3, 0.0]]), torch.tensor([[0.5, 0.5]])).sum()
    loss.backward()
    assert loss.isfinite() and all(p.grad.isfinite().all() for p in head.parameters())


@pytest.mark.parametrize("core", ["gru", "lstm"])
def test_steps_and_sequences_compute_the_same_with_a_core(core):
    net = NetConfig(hidden=(8,), core=core, core_size=5, core_layers=2)
    policy = DeterministicPolicy(VECTOR, net, (7,))
    obs = torch.randn(6, 4, 3, generator=torch.Generator().manual_seed(3))
    reset = torch.zeros(6, 4, dtype=torch.bool)
    reset[3, 1] = reset[2, 2] = True
    with torch.no_grad():
        features, end = policy.sequence({"obs": obs}, policy.initial(4), reset)
        state, rows = policy.initial(4), []
        for t in range(6):
            state = {key: x * ~reset[t].view(4, 1, 1) for key, x in state.items()}
            row, state = policy.step({"obs": obs[t]}, state)
            rows.append(row)
    torch.testing.assert_close(features, torch.stack(rows))
    for key in end:
        torch.testing.assert_close(end[key], state[key])


def test_copies_are_independent_and_flat_parameters_are_seen_by_every_layer():
    critic = Critic(VECTOR, NET, (7, 6), HEADS["categorical"])
    twin = copy.deepcopy(critic)
    obs, action = observe(VECTOR, 3), torch.zeros(3, 2)
    before = q(twin, obs, action)
    flat = FlatParams([critic])
    assert torch.equal(q(critic, obs, action), before)
    with torch.no_grad():
        flat.data.add_(0.1)
    assert not torch.equal(q(critic, obs, action), before) and torch.equal(q(twin, obs, action), before)


def test_the_random_start_is_a_published_flag():
    module = RandomStart()
    assert module.on and [x is module.flag for x in module.published()] == [True]
    module.published()[0].zero_()
    assert not module.on and "flag" in module.state_dict()
