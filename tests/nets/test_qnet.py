"""The head's identities in all mixes of dueling, categorical and noisy; target nets are copies; the published order."""

from __future__ import annotations

import itertools
import math
from functools import partial

import pytest
import torch

from rookery.core.config import NetConfig
from rookery.core.types import ActionSpec, EnvSpec, Leaf
from rookery.nets.flat import FlatParams
from rookery.nets.noisy import factors
from rookery.nets.qnet import ONLINE, QHead, copy_to_targets, q_nets

SPEC = EnvSpec("test", {"obs": Leaf((5,), "float32", "vector")}, ActionSpec("discrete", (3,)))
ATOMS = torch.linspace(-2, 2, 5)
MIXES = [
    {"dueling": d, "atoms": a, "sigma": s, "stream": w}
    for d, a, s, w in itertools.product((False, True), (None, ATOMS), (0.0, 0.5), (0, 6))
]


def head(**mix) -> QHead:
    torch.manual_seed(3)
    return QHead(4, 3, **mix)


def nets_of(mix: dict | None = None, **net):
    torch.manual_seed(2)
    return q_nets(SPEC, NetConfig(hidden=(8,), core_size=6, **net), partial(QHead, actions=3, **(mix or {})), 1.0)


# The head


@pytest.mark.parametrize("mix", MIXES)
def test_shapes_in_every_mix(mix):
    made = head(**mix)
    last = () if mix["atoms"] is None else (5,)
    assert (made.noise > 0) == (mix["sigma"] > 0)
    for lead in ((), (7,), (2, 7)):
        out = made(torch.randn(*lead, 4))
        assert out.shape == (*lead, 3, *last) and made.means(out).shape == (*lead, 3)
        if made.noise:
            assert made(torch.randn(*lead, 4), torch.randn(made.noise)).shape == out.shape
    if made.noise:
        assert made(torch.randn(7, 4), torch.randn(7, made.noise)).shape == (7, 3, *last)


@pytest.mark.parametrize("mix", [mix for mix in MIXES if mix["dueling"]])
def test_advantages_count_only_by_their_differences(mix):
    """P68: a constant added to all advantages, of each atom, changes nothing; the value is their mean."""
    made, x = head(**mix), torch.randn(7, 4)
    before = made(x)
    value = made.value(x)
    torch.testing.assert_close(before.mean(1), value if mix["atoms"] is not None else value.squeeze(1))
    with torch.no_grad():
        shift = torch.arange(made.count) + 1.0
        made.advantage.layers[-1].bias.add_(shift.repeat(3))
    torch.testing.assert_close(made(x), before)


def test_the_mean_advantage_is_each_row_s_own():
    made, x = head(dueling=True), torch.randn(7, 4)
    torch.testing.assert_close(made(x)[2:3], made(x[2:3]))


def test_means_are_those_of_the_distribution():
    made, x = head(atoms=ATOMS), torch.randn(7, 4)
    out = made(x)
    odds = out.exp()
    torch.testing.assert_close(made.means(out), (odds * ATOMS).sum(-1) / odds.sum(-1))
    plain = head()
    assert plain.means(out) is out


@pytest.mark.parametrize("mix", [mix for mix in MIXES if mix["sigma"]])
def test_every_layer_has_noise_of_its_own(mix):
    """P71: means without noise; each number of noise moves the output; the same noise gives the same output."""
    made, x = head(**mix), torch.rand(7, 4) + 0.5
    with torch.no_grad():  # every unit of a hidden layer is on, or its noise would not be seen
        for name, parameter in made.named_parameters():
            if mix["stream"] and "layers.0.bias" in name and "sigma" not in name:
                parameter.fill_(5.0)
    assert torch.equal(made(x), made(x)) and torch.equal(made(x, torch.zeros(made.noise)), made(x))
    noise = factors(made.noise, generator=torch.Generator().manual_seed(1))
    assert torch.equal(made(x, noise), made(x, noise)) and not torch.equal(made(x, noise), made(x))
    changed = []
    for i in range(made.noise):
        other = noise.clone()
        other[i] += 1.0
        changed.append(float((made(x, other) - made(x, noise)).detach().abs().max()) > 1e-7)
    assert all(changed)


def test_heads_start_uniform_within_one_over_the_root_of_the_inputs():
    torch.manual_seed(5)
    made = QHead(100, 20, stream=64, dueling=True)
    for stream in (made.advantage, made.value):
        for layer, bound in zip(stream.layers, (1 / 10, 1 / 8)):
            for values in (layer.weight, layer.bias):
                assert float(values.detach().abs().max()) <= bound
            assert float(layer.weight.detach().std()) == pytest.approx(bound / math.sqrt(3), rel=0.1)


def test_actions_may_share_one_bias():
    own, shared, x = head(), head(shared_bias=True), torch.randn(7, 4)
    assert shared.advantage.layers[-1].bias.shape == (1,)
    with torch.no_grad():
        own.advantage.layers[-1].bias.fill_(0.7)
        shared.advantage.layers[-1].bias.fill_(0.7)
    assert torch.equal(shared(x), own(x))
    for made in (own, shared):
        (made(x) ** 2).sum().backward()
    grads = [made.advantage.layers[-1].bias.grad for made in (own, shared)]
    torch.testing.assert_close(grads[1], grads[0].sum().view(1))


def test_the_gradient_into_the_trunk_is_scaled_and_nothing_else():
    torch.manual_seed(3)
    plain, scaled = head(dueling=True, stream=6), head(dueling=True, stream=6, trunk_scale=True)
    x = torch.randn(7, 4, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    assert torch.equal(plain(x), scaled(y))
    plain(x).square().sum().backward()
    scaled(y).square().sum().backward()
    torch.testing.assert_close(y.grad, x.grad / math.sqrt(2))
    for a, b in zip(plain.parameters(), scaled.parameters()):
        torch.testing.assert_close(a.grad, b.grad)


# The nets


@pytest.mark.parametrize("net", [{}, {"core": "lstm"}, {"normalize_obs": True}])
def test_what_actors_need_comes_first_and_targets_are_not_trained(net):
    nets = nets_of(**net)
    assert list(nets) == ["normalizer", *ONLINE, "epsilon", *(f"target_{name}" for name in ONLINE)]
    flat = FlatParams([nets[name] for name in ONLINE])
    assert flat.prefix([nets[name] for name in ("normalizer", *ONLINE, "epsilon")]) == flat.data.numel()
    assert all(p.requires_grad != name.startswith("target_") for name, m in nets.items() for p in m.parameters())
    assert [b.item() for b in nets["epsilon"].published()] == [1.0]


@pytest.mark.parametrize("core", ["none", "gru", "lstm"])
def test_targets_are_copies_and_not_references(core):
    """P67."""
    nets = nets_of({"sigma": 0.5}, core=core)
    FlatParams([nets[name] for name in ONLINE])
    obs, reset = {"obs": torch.randn(4, 2, 5)}, torch.zeros(4, 2, dtype=torch.bool)

    def run(prefix):
        body = nets[f"{prefix}body"]
        return nets[f"{prefix}q"](body.sequence(obs, body.initial(2), reset)[0])

    first = run("")
    assert torch.equal(run("target_"), first)
    with torch.no_grad():
        for name in ONLINE:
            for parameter in nets[name].parameters():
                parameter.add_(0.1)
    second = run("")
    assert torch.equal(run("target_"), first) and not torch.equal(second, first)
    copy_to_targets(nets)
    assert torch.equal(run("target_"), second)
    with torch.no_grad():
        nets["q"].advantage.layers[0].weight.add_(0.1)
    assert torch.equal(run("target_"), second)
