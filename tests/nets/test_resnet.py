"""Torso `resnet`: the layout of DD-PPO's network, and rows that do not depend on their batch."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from support_lanes import build
from torch import nn

from rookery.algorithms.ppo import PPOConfig
from rookery.core.config import NetConfig, RunConfig
from rookery.core.types import ActionSpec, EnvSpec, Leaf
from rookery.envs.make import make as make_lanes
from rookery.nets.body import Body
from rookery.nets.resnet import Block, ResNet
from rookery.nets.torso import Torso, make_torso

NET = NetConfig(torso="resnet", features=16)


def spec(**leaves: Leaf) -> EnvSpec:
    return EnvSpec("toy", leaves, ActionSpec("discrete", choices=(2,)))


def image(*shape: int) -> Leaf:
    return Leaf(shape, "uint8", "image")


def frames(n: int, *shape: int) -> torch.Tensor:
    return torch.randint(256, (n, *shape), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)


def make(s: EnvSpec, net: NetConfig = NET) -> Torso:
    torch.manual_seed(0)
    return Torso(s, net)


MAPS = {  # by hand: pixels, averaged from 128 on, quartered by the stem from 64 on, then halved three times
    (10, 10): (512, 2, 2),
    (42, 42): (57, 6, 6),
    (63, 200): (10, 8, 25),  # the shorter side decides
    (64, 64): (512, 2, 2),
    (84, 84): (228, 3, 3),
    (128, 128): (512, 2, 2),
    (256, 256): (128, 4, 4),
    (480, 640): (26, 8, 10),
}


@pytest.mark.parametrize("size", MAPS)
def test_about_2048_values_are_left_of_an_image_of_any_size(size):
    torso = make(spec(obs=image(3, *size)))
    with torch.no_grad():
        features, maps = torso.with_maps({"obs": frames(2, 3, *size)})
    assert features.shape == (2, 16) and torso.map_shapes == {"obs": MAPS[size]}
    assert maps["obs"].shape == (2, *MAPS[size])
    assert abs(math.prod(MAPS[size]) - 2048) <= 48


def test_the_layout_is_resnet_18_with_half_the_channels():
    net = ResNet(4, 84, 84)
    blocks = [module for module in net.modules() if isinstance(module, Block)]
    assert [(b.first.in_channels, b.first.out_channels, b.first.stride[0]) for b in blocks] == [
        (32, 32, 1), (32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1),
    ]  # fmt: skip
    # By hand, stage by stage: 3x3 convolutions, 1x1 shortcut, scale and shift of each norm.
    first = 4 * 9 * 32 * 32 + 4 * 2 * 32
    rest = sum(9 * c * c // 2 + 3 * 9 * c * c + c * c // 2 + 5 * 2 * c for c in (64, 128, 256))
    assert (first, rest) == (37_120, 2_756_992)
    assert sum(p.numel() for b in blocks for p in b.parameters()) == first + rest
    ends = 4 * 49 * 32 + 2 * 32 + 9 * 256 * 228 + 2 * 228  # stem and compression
    assert sum(p.numel() for p in net.parameters()) == first + rest + ends
    norms = [module for module in net.modules() if isinstance(module, nn.GroupNorm)]
    assert [norm.num_groups for norm in norms] == [16] * 20 + [1]
    assert not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in net.modules())


@pytest.mark.parametrize("size", [12, 64, 128])
def test_the_forward_pass_is_the_network_written_out(size):
    """In float64 and contiguous memory, from the parameters in their order."""
    torso, obs = make(spec(obs=image(3, size, size))), frames(2, 3, size, size)
    with torch.no_grad():
        for p in torso.parameters():
            p.add_(0.05 * torch.randn_like(p))  # norms start as the identity, which would hide mistakes
        y = torso({"obs": obs})
    weights = iter([p.detach().double() for p in torso.parameters()])

    def conv(x, stride, groups=16):
        weight = next(weights)
        x = F.conv2d(x, weight, None, stride, weight.shape[-1] // 2).unflatten(1, (groups, -1))
        x = (x - x.mean((2, 3, 4), keepdim=True)) / (x.var((2, 3, 4), False, keepdim=True) + 1e-5).sqrt()
        return x.flatten(1, 2) * next(weights).view(-1, 1, 1) + next(weights).view(-1, 1, 1)

    x = obs.double() / 255
    if size == 128:
        x = (x[..., ::2, ::2] + x[..., 1::2, ::2] + x[..., ::2, 1::2] + x[..., 1::2, 1::2]) / 4
    x = conv(x, 1 if size == 12 else 2).relu()
    if size > 12:
        x = F.max_pool2d(x, 3, 2, 1)
    for stride in (1, 1, 2, 1, 2, 1, 2, 1):
        z = conv(conv(x, stride).relu(), 1)
        x = (z + (x if stride == 1 else conv(x, 2))).relu()
    x = conv(x, 1, groups=1).relu()
    expected = F.linear(x.permute(0, 2, 3, 1).flatten(1), next(weights), next(weights)).relu()
    assert next(weights, None) is None and expected.any()
    torch.testing.assert_close(y.double(), expected, rtol=1e-3, atol=1e-4)


def test_a_row_does_not_depend_on_the_others_in_training_mode():
    torso, obs = make(spec(obs=image(4, 64, 64))).train(), frames(3, 4, 64, 64)
    others = obs.clone()
    others[1:] = 255 - obs[1:] // 2
    with torch.no_grad():
        one, same, alone = (torso({"obs": x})[0] for x in (obs, others, obs[:1]))
    assert one.any()
    torch.testing.assert_close(one, same, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(one, alone, rtol=1e-4, atol=1e-5)


def test_bytes_are_divided_by_255_and_layouts_agree():
    obs = frames(2, 3, 24, 28)
    with torch.no_grad():
        expected = make(spec(obs=image(3, 24, 28)))({"obs": obs})
        floats = make(spec(obs=Leaf((3, 24, 28), "float32", "image")))({"obs": obs.float() / 255})
        last = make(spec(obs=image(24, 28, 3)))({"obs": obs.permute(0, 2, 3, 1).contiguous()})
    torch.testing.assert_close(floats, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(last, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_reach_every_parameter_with_several_leaves_and_two_lstm_layers(precision):
    s = spec(rgb=image(20, 20, 3), depth=image(1, 64, 64), goal=Leaf((2,), "float32", "vector"))
    net = NetConfig(
        torso="resnet", features=16, hidden=(8,), core="lstm", core_size=6, core_layers=2, precision=precision
    )
    torch.manual_seed(0)
    body = Body(s, net, make_torso(s, net))
    assert body.torso.features == 16 + 16 + 8
    obs = {"rgb": frames(6, 20, 20, 3), "depth": frames(6, 1, 64, 64), "goal": torch.randn(6, 2)}
    obs = {key: x.unflatten(0, (2, 3)) for key, x in obs.items()}
    features, state = body.sequence(obs, body.initial(3), torch.zeros(2, 3, dtype=torch.bool))
    assert features.shape == (2, 3, 6) and features.dtype == torch.float32 and state["h"].shape == (3, 2, 6)
    features.square().sum().backward()
    assert all(p.grad is not None and p.grad.any() and p.grad.isfinite().all() for p in body.parameters())


def test_ppo_makes_an_update_and_its_ratio_starts_at_1():
    net = NetConfig(torso="resnet", features=16, core="lstm", core_size=8, core_layers=2)
    config = PPOConfig(unroll=4, chunk=4, epochs=1, minibatches=1)
    run = RunConfig("ppo", "rookery.algorithms.ppo:PPO", "rookery/Catch-v0", config)
    rig = build(lambda: make_lanes(run, 4), config, net, shake=0.0)
    before = rig.learner.flat["all"].data.clone()
    metrics = rig.update().metrics
    assert metrics["kl"] == pytest.approx(0.0, abs=1e-6)
    after = rig.learner.flat["all"].data
    assert after.isfinite().all() and not torch.equal(before, after)
