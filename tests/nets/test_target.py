"""The target policy: copies of values that nothing else moves; and the weight of its divergence."""

from __future__ import annotations

import copy

import pytest
import torch
from support_lanes import BOX, NETS, ScriptedLanes
from torch import nn

from rookery.core.types import EnvSpec, Leaf
from rookery.nets import build
from rookery.nets.flat import FlatParams
from rookery.nets.modules import Nets
from rookery.nets.target import KLCoefficient, copy_nets, target_of

NAMES = ("body", "policy")
SPECS = {"discrete": ScriptedLanes().spec, "box": EnvSpec("box", {"obs": Leaf((3,), "float32", "vector")}, BOX)}


def made(name: str, spec: str = "discrete") -> tuple[Nets, Nets]:
    torch.manual_seed(3)
    nets = build.actor_critic(SPECS[spec], NETS[name])
    return nets, target_of(nets, NAMES)


def values(module: nn.Module) -> list[torch.Tensor]:
    return [x.detach().clone() for x in module.parameters()]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b))


def online(nets: Nets) -> list[torch.Tensor]:
    return [x for name in NAMES for x in values(nets[name])]


def moved(nets: Nets, amount: float = 0.1) -> None:
    with torch.no_grad():
        for parameter in nets.parameters():
            parameter.add_(amount)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", ["split", "gru", "lstm2"])
def test_a_target_is_a_copy_of_values_and_not_of_references(name, spec):
    """P67."""
    nets, target = made(name, spec)
    start = online(nets)
    assert list(target) == list(NAMES) and same(values(target), start)
    assert not {x.data_ptr() for x in nets.parameters()} & {x.data_ptr() for x in target.parameters()}
    moved(nets)
    assert same(values(target), start) and not same(online(nets), start)
    copy_nets(nets, target)
    copied = online(nets)
    assert same(values(target), copied)
    moved(nets)
    assert same(values(target), copied), "a copy of the values at that time"


@pytest.mark.parametrize("name", ["split", "gru", "lstm2"])
def test_a_target_computes_what_the_nets_computed_when_they_were_copied(name):
    """Also through the lists of weights that modules keep beside their parameters."""
    nets, target = made(name)
    obs, state = {"obs": torch.randn(4, 3)}, nets["body"].initial(4)

    def policy(nets: Nets) -> torch.Tensor:
        with torch.no_grad():
            return nets["policy"](nets["body"].step(obs, state)[0])

    moved(nets)
    copy_nets(nets, target)
    expected = policy(nets)
    moved(nets)
    assert torch.equal(policy(target), expected) and not torch.equal(policy(nets), expected)


@pytest.mark.parametrize("name", ["split", "gru"])
def test_no_gradient_reaches_a_target_also_after_a_copy(name):
    nets, target = made(name)
    obs = {"obs": torch.randn(5, 2, 3)}
    reset = torch.zeros(5, 2, dtype=torch.bool)
    for _ in range(2):
        features, _ = target["body"].sequence(obs, target["body"].initial(2), reset)
        assert not target["policy"](features).requires_grad
        assert all(x.grad is None and not x.requires_grad for x in target.parameters())
        copy_nets(nets, target)
    assert all(x.requires_grad for x in nets.parameters()), "those of the nets themselves are left alone"


def test_the_flat_parameters_of_the_nets_are_not_touched():
    """Copies are made before and after the parameters become views of one vector; that vector has nothing of them."""
    nets, target = made("shared")
    flat = FlatParams([nets[name] for name in ("body", "policy", "value")])
    floats = flat.data.numel()
    later = target_of(nets, NAMES)
    before = flat.data.clone()
    copy_nets(nets, target)
    copy_nets(nets, later)
    assert torch.equal(flat.data, before) and not flat.grad.any()
    room = range(flat.data.data_ptr(), flat.data.data_ptr() + 4 * floats)
    assert not any(x.data_ptr() in room for each in (target, later) for x in each.parameters())
    flat.data.add_(1.0)
    assert same(values(target), values(later)) and not same(values(target), online(nets))
    copy_nets(nets, target)
    assert same(values(target), online(nets)), "what the optimiser has done to the flat vector"
    nets["policy"](nets["body"].step({"obs": torch.ones(2, 3)}, {})[0]).sum().backward()
    assert flat.grad.any() and same(values(target), online(nets))


class Counted(nn.Module):
    """A module of a user, with statistics of its own."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(2))


def test_statistics_of_a_module_are_copied_with_its_weights():
    nets = Nets({"body": Counted()})
    target = target_of(nets, ["body"])
    nets["body"].mean.fill_(3.0)
    assert not target["body"].mean.any()
    copy_nets(nets, target)
    assert target["body"].mean.tolist() == [3.0, 3.0]
    nets["body"].mean.fill_(4.0)
    assert target["body"].mean.tolist() == [3.0, 3.0]


# The weight of the divergence


@pytest.mark.parametrize(
    ("kl", "factor"),
    [(0.0, 0.5), (0.0049, 0.5), (0.0051, 1.0), (0.01, 1.0), (0.0199, 1.0), (0.0201, 1.5), (7.0, 1.5)],
)
def test_the_weight_grows_above_twice_the_target_and_falls_below_half_of_it(kl, factor):
    coefficient = KLCoefficient(0.8)
    coefficient.adapt(kl, 0.01)
    assert float(coefficient.value) == pytest.approx(0.8 * factor)


def test_a_divergence_that_is_not_finite_does_not_halve_the_weight():
    coefficient = KLCoefficient(0.8)
    coefficient.adapt(float("nan"), 0.01)
    assert float(coefficient.value) == pytest.approx(0.8)


def test_the_weight_is_part_of_a_checkpoint_and_no_parameter():
    one, two = KLCoefficient(1.0), KLCoefficient(1.0)
    for kl in (1.0, 1.0, 0.01, 0.0):
        one.adapt(kl, 0.01)
    assert float(one.value) == pytest.approx(1.5 * 1.5 * 0.5)
    assert not list(one.parameters())
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    one.adapt(1.0, 0.01)
    assert float(two.value) == pytest.approx(1.5 * 1.5 * 0.5)
    two.adapt(1.0, 0.01)
    assert torch.equal(one.value, two.value)
