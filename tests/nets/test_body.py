"""From observations to features: steps equal sequences, resets, burn-in; maps come from the pass of the features."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from rookery.core.config import NetConfig
from rookery.core.errors import UsageError
from rookery.core.types import ActionSpec, EnvSpec, Leaf
from rookery.nets.body import Body
from rookery.nets.cnn import CHUNK
from rookery.nets.core import resets, resets_at_start
from rookery.nets.critic import DeterministicPolicy
from rookery.nets.torso import make_torso

IMAGE, VECTOR = Leaf((2, 12, 14), "uint8", "image"), Leaf((4,), "float32", "vector")
SPECS = {
    "vector": {"obs": VECTOR},
    "image": {"obs": IMAGE},
    "dict": {"p": Leaf((12, 14, 3), "uint8", "image"), "v": VECTOR, "n": Leaf((), "int64", "discrete", 3)},
}
CORES = pytest.mark.parametrize("core", ["none", "gru", "lstm"])
KINDS = pytest.mark.parametrize("kind", SPECS)
NET = NetConfig(hidden=(8,), features=6, core_size=5, core_layers=2)
T, B = 6, 3


def spec_of(kind: str) -> EnvSpec:
    return EnvSpec("toy", SPECS[kind], ActionSpec("box", size=2))


def make(kind: str, net: NetConfig = NET, **fields) -> Body:
    torch.manual_seed(0)
    net = replace(net, **fields)
    return Body(spec_of(kind), net, make_torso(spec_of(kind), net))


def observed(kind: str, *lead: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    obs = {}
    for key, leaf in SPECS[kind].items():
        if leaf.kind == "vector":
            obs[key] = torch.randn(*lead, *leaf.shape, generator=g)
        else:
            obs[key] = torch.randint(leaf.n or 256, (*lead, *leaf.shape), generator=g).to(getattr(torch, leaf.dtype))
    return obs


def random_state(body: Body) -> dict[str, torch.Tensor]:
    return {leaf: torch.randn_like(x) for leaf, x in body.initial(B).items()}


def some_resets() -> torch.Tensor:
    reset = torch.zeros(T, B, dtype=torch.bool)
    reset[0, 2] = reset[2, 1] = reset[4, 0] = True
    return reset


def row(x: dict[str, torch.Tensor], at: int | slice) -> dict[str, torch.Tensor]:
    return {key: value[at] for key, value in x.items()}


# Features


@CORES
@KINDS
def test_steps_and_sequences_compute_the_same(kind, core):
    body, obs, reset = make(kind, core=core), observed(kind, T, B), some_resets()
    state = random_state(body)
    features, last = body.sequence(obs, state, reset)
    assert features.shape == (T, B, body.features)
    for t in range(T):
        state = {leaf: x * ~reset[t].view(B, 1, 1) for leaf, x in state.items()}
        y, state = body.step(row(obs, t), state)
        torch.testing.assert_close(y, features[t], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state, last, rtol=1e-5, atol=1e-6)


@KINDS
@pytest.mark.parametrize("lead", [(5,), (4, 3), (2, 2, 3)])
def test_without_a_core_any_leading_axes_will_do(kind, lead):
    body, obs = make(kind), observed(kind, *lead)
    features, state = body.sequence(obs, {}, None)
    assert features.shape == (*lead, body.features) and state == {}
    flat = {key: x.reshape(-1, *SPECS[kind][key].shape) for key, x in obs.items()}
    torch.testing.assert_close(features.reshape(-1, body.features), body.step(flat, {})[0])


@pytest.mark.parametrize("core", ["gru", "lstm"])
def test_rows_behind_a_reset_know_nothing_of_those_before(core):
    body, obs = make("vector", core=core), observed("vector", T, B)
    reset = torch.zeros(T, B, dtype=torch.bool)
    reset[3] = True
    features, _ = body.sequence(obs, random_state(body), reset)
    fresh, _ = body.sequence(row(obs, slice(3, None)), body.initial(B), torch.zeros(T - 3, B, dtype=torch.bool))
    torch.testing.assert_close(features[3:], fresh)


@pytest.mark.parametrize("burn_in", [0, 2])
def test_burn_in_gives_the_same_features_and_no_gradient(burn_in):
    body, obs, reset = make("vector", core="gru"), observed("vector", T, B), some_resets()
    obs["obs"].requires_grad_()
    state = random_state(body)
    features = body.burned_in(obs, state, reset, burn_in)
    torch.testing.assert_close(features, body.sequence(obs, state, reset)[0][burn_in:])
    features.sum().backward()
    touched = obs["obs"].grad.flatten(1).any(1)
    assert touched.tolist() == [False] * burn_in + [True] * (T - burn_in)


@CORES
@KINDS
def test_gradients_reach_every_parameter(kind, core):
    body = make(kind, core=core)
    body.sequence(observed(kind, T, B), random_state(body), some_resets())[0].square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in body.parameters())


@CORES
def test_a_copy_is_a_network_of_its_own(core):
    body, obs = make("image", core=core), observed("image", T, B)
    twin = copy.deepcopy(body).requires_grad_(False)
    before = body.sequence(obs, body.initial(B), some_resets())[0]
    assert torch.equal(twin.sequence(obs, twin.initial(B), some_resets())[0], before)
    with torch.no_grad():
        for parameter in body.parameters():
            parameter.mul_(0.5)
    assert torch.equal(twin.sequence(obs, twin.initial(B), some_resets())[0], before)
    assert not torch.equal(body.sequence(obs, body.initial(B), some_resets())[0], before)


# Maps


@CORES
@pytest.mark.parametrize("kind, key", [("image", "obs"), ("dict", "p")])
@pytest.mark.parametrize("torso, shape", [("tiny", (64, 6, 7)), ("impala", (32, 2, 2))])
def test_a_map_is_what_the_features_are_made_of(kind, key, torso, shape, core):
    body, obs, state = make(kind, torso=torso, core=core), observed(kind, T, B), {}
    state, reset = random_state(body), some_resets()
    plain, end = body.sequence(obs, state, reset)
    features, last, maps = body.sequence_and_maps(obs, state, reset)
    assert torch.equal(features, plain) and all(torch.equal(last[leaf], end[leaf]) for leaf in end)
    assert body.map_shapes == {key: shape} and list(maps) == [key] and maps[key].shape == (T, B, *shape)
    encoder = body.torso.images[0]
    pixels = encoder._pixels(obs[key].flatten(0, 1))
    torch.testing.assert_close(maps[key].flatten(0, 1), encoder.stack(pixels))
    made = encoder.linear(maps[key].flatten(0, 1).permute(0, 2, 3, 1).flatten(1)).relu()
    if core == "none":
        torch.testing.assert_close(made, features.flatten(0, 1)[:, : encoder.features])


def test_nature_s_map_and_more_images_than_a_cpu_takes_at_once():
    spec = EnvSpec("toy", {"obs": Leaf((4, 84, 84), "uint8", "image")}, ActionSpec("discrete", choices=(2,)))
    body = Body(spec, NET, make_torso(spec, NET))
    obs = {"obs": torch.randint(256, (CHUNK + 3, 4, 84, 84), dtype=torch.uint8)}
    with torch.no_grad():
        features, _, maps = body.sequence_and_maps(obs, {}, None)
        assert body.map_shapes == {"obs": (64, 7, 7)} and maps["obs"].shape == (CHUNK + 3, 64, 7, 7)
        few = body.sequence_and_maps(row(obs, slice(2)), {}, None)
    assert torch.equal(features, body.step(obs, {})[0])
    torch.testing.assert_close(maps["obs"][:2], few[2]["obs"])


def test_a_map_costs_no_second_pass_and_carries_gradients_into_the_convolutions():
    body, obs = make("image", core="gru"), observed("image", T, B)
    ran = []
    body.torso.images[0].stack.register_forward_hook(lambda *_: ran.append(1))
    features, _, maps = body.sequence_and_maps(obs, body.initial(B), some_resets())
    assert len(ran) == 1
    (from_map,) = torch.autograd.grad(maps["obs"].square().sum(), [_conv(body).weight], retain_graph=True)
    (from_features,) = torch.autograd.grad(features.square().sum(), [_conv(body).weight])
    assert from_map.any() and from_features.any()


def _conv(body: Body) -> nn.Conv2d:
    return next(m for m in body.modules() if isinstance(m, nn.Conv2d))


def test_with_bf16_features_and_maps_are_float32():
    body, obs = make("dict", precision="bf16"), observed("dict", B)
    features, _, maps = body.sequence_and_maps(obs, {}, None)
    assert features.dtype == maps["p"].dtype == torch.float32
    assert torch.equal(features, body.step(obs, {})[0])
    assert torch.equal(maps["p"], maps["p"].bfloat16().float())


def test_without_a_layer_behind_the_convolutions_the_map_is_the_features():
    body, obs = make("image", features=0), observed("image", B)
    features, _, maps = body.sequence_and_maps(obs, {}, None)
    assert torch.equal(maps["obs"].permute(0, 2, 3, 1).flatten(1), features)
    assert maps["obs"].data_ptr() == features.data_ptr()


def test_maps_of_two_torsos():
    policy = DeterministicPolicy(spec_of("dict"), NET, (7,), second_torso=("p",))
    obs = observed("dict", T, B)
    features, _, maps = policy.sequence_and_maps(obs, {}, None)
    assert policy.map_shapes == {"p": (64, 6, 7)} and maps["p"].shape == (T, B, 64, 6, 7)
    assert torch.equal(features, policy.sequence(obs, {}, None)[0])


class Plain(nn.Module):
    """A user's torso without a map."""

    def __init__(self, spec, net):
        super().__init__()
        self.features = 9
        self.linear = nn.Linear(math.prod(spec.obs["obs"].shape), 9)

    def forward(self, obs):
        return self.linear(obs["obs"].float().flatten(1))


class Mapped(Plain):
    """One with a map: the image itself."""

    def __init__(self, spec, net):
        super().__init__(spec, net)
        self.map_shapes = {"obs": spec.obs["obs"].shape}

    def with_maps(self, obs):
        return self(obs), {"obs": obs["obs"].float()}


@CORES
def test_a_torso_of_ones_own_works_in_every_way_and_says_that_it_has_no_map(core):
    body, obs = make("image", module=f"{__name__}:Plain", core=core), observed("image", T, B)
    features, _ = body.sequence(obs, body.initial(B), some_resets())
    assert features.shape == (T, B, 9 if core == "none" else 5)
    for ask in (lambda: body.map_shapes, lambda: body.sequence_and_maps(obs, body.initial(B), some_resets())):
        with pytest.raises(UsageError, match=r"Plain has no spatial map.*net\.module.*with_maps"):
            ask()


def test_a_torso_of_ones_own_may_have_a_map():
    body, obs = make("image", module=f"{__name__}:Mapped"), observed("image", T, B)
    features, _, maps = body.sequence_and_maps(obs, {}, None)
    assert features.shape == (T, B, 9) and torch.equal(maps["obs"], obs["obs"].float())


@pytest.mark.parametrize("kind, torso", [("vector", "auto"), ("image", "mlp")])
def test_nets_without_convolutions_have_no_map(kind, torso):
    with pytest.raises(UsageError, match="no spatial map"):
        _ = make(kind, torso=torso).map_shapes


# Resets


def test_resets_follow_dead_rows():
    live = torch.tensor([[0, 1, 1], [0, 1, 1], [1, 0, 1], [1, 0, 1]], dtype=torch.bool)
    reset = resets(live).T.int().tolist()
    assert reset == [[0, 1, 1, 0, 0], [0, 0, 0, 1, 1], [0, 0, 0, 0, 0]]
    only_start = resets_at_start(live).T.int().tolist()
    assert only_start == [[0, 0, 1, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]]


@pytest.mark.parametrize("core", ["gru", "lstm"])
def test_both_kinds_of_resets_give_live_rows_and_the_first_behind_them_the_same_features(core):
    body, obs = make("vector", core=core), observed("vector", T + 1, B)
    live = torch.ones(T, B, dtype=torch.bool)
    live[:2, 0] = live[4:, 1] = False  # rows missing before an episode's start, and behind its end
    state = random_state(body)
    every, few = (body.sequence(obs, state, reset)[0] for reset in (resets(live), resets_at_start(live)))
    read = torch.cat([live, torch.zeros(1, B, dtype=torch.bool)])
    read[1:] |= live
    torch.testing.assert_close(every[read], few[read])
