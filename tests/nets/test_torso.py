"""Torsos: what goes in, what comes out, what is refused."""

import copy
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rookery.core.config import NetConfig
from rookery.core.errors import UsageError
from rookery.core.types import ActionSpec, EnvSpec, Leaf
from rookery.nets.cnn import CHUNK
from rookery.nets.flat import FlatParams
from rookery.nets.torso import Torso, make_torso

VECTOR = Leaf((4,), "float32", "vector")
ATARI = Leaf((4, 84, 84), "uint8", "image")
SMALL = NetConfig(features=32)


def spec(**leaves: Leaf) -> EnvSpec:
    return EnvSpec("toy", leaves, ActionSpec("discrete", choices=(2,)))


def random_obs(s: EnvSpec, n: int, seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    obs = {}
    for key, leaf in s.obs.items():
        if leaf.kind == "vector":
            obs[key] = torch.randn(n, *leaf.shape, generator=g).to(getattr(torch, leaf.dtype))
        elif leaf.kind == "discrete":
            obs[key] = torch.randint(0, leaf.n, (n, *leaf.shape), generator=g)
        else:
            obs[key] = torch.randint(0, 256, (n, *leaf.shape), generator=g, dtype=torch.uint8)
    return obs


def make(s: EnvSpec, net: NetConfig = SMALL) -> Torso:
    torch.manual_seed(0)
    return Torso(s, net)


LEAVES = {
    "vector": {"obs": VECTOR},
    "float64": {"obs": Leaf((4,), "float64", "vector")},
    "matrix": {"obs": Leaf((2, 3), "float32", "vector")},
    "discrete": {"obs": Leaf((), "int64", "discrete", 7)},
    "discretes": {"obs": Leaf((3,), "int64", "discrete", 4)},
    "atari": {"obs": ATARI},
    "last": {"obs": Leaf((40, 36, 3), "uint8", "image")},
    "grey": {"obs": Leaf((44, 44), "uint8", "image")},
    "tiny": {"obs": Leaf((7, 7, 3), "uint8", "image")},
    "odd": {"obs": Leaf((3, 45, 38), "uint8", "image")},
    "dict": {"rgb": Leaf((36, 36, 3), "uint8", "image"), "v": VECTOR, "n": Leaf((), "int64", "discrete", 3)},
    "two images": {"a": Leaf((3, 40, 40), "uint8", "image"), "b": Leaf((10, 10, 4), "uint8", "image")},
    "vectors": {"a": VECTOR, "b": Leaf((2,), "float32", "vector")},
}


@pytest.mark.parametrize("name", LEAVES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_kind_of_observation_gives_float_features_and_gradients(name, precision):
    s = spec(**LEAVES[name])
    torso = make(s, NetConfig(features=32, precision=precision))
    obs = random_obs(s, 3)
    before = {key: x.clone() for key, x in obs.items()}
    y = torso(obs)
    assert y.shape == (3, torso.features) and y.dtype == torch.float32
    y.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in torso.parameters())
    assert all(torch.equal(before[key], obs[key]) for key in obs)  # in-place arithmetic stays away from the input


@pytest.mark.parametrize("name", LEAVES)
def test_rows_do_not_depend_on_their_neighbours(name):
    s = spec(**LEAVES[name])
    torso, obs = make(s), random_obs(s, 5)
    with torch.no_grad():
        together = torso(obs)
        alone = torch.cat([torso({key: x[i : i + 1] for key, x in obs.items()}) for i in range(5)])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


PAPERS = {  # weights and strides of the convolutions
    "nature": ([(32, 4, 8, 8), (64, 32, 4, 4), (64, 64, 3, 3)], (4, 2, 1)),
    "nips": ([(16, 4, 8, 8), (32, 16, 4, 4)], (4, 2)),
}


@pytest.mark.parametrize(
    "kind, size",
    [("nature", size) for size in [(84, 84), (36, 36), (45, 38)]]
    + [("nips", size) for size in [(84, 84), (20, 20), (30, 21)]],
)
def test_nature_and_nips_are_the_papers_networks(kind, size):
    s = spec(obs=Leaf((4, *size), "uint8", "image"))
    torso, obs = make(s, NetConfig(torso=kind, features=64)), random_obs(s, 6)
    encoder = torso.images[0]
    convs = [module for module in encoder.modules() if isinstance(module, nn.Conv2d)]
    shapes, strides = PAPERS[kind]
    assert [tuple(conv.weight.shape) for conv in convs] == shapes
    layers = 2 * len(convs)  # of weights and biases
    with torch.no_grad():
        for conv in convs:
            conv.bias.normal_(0, 0.1)
    copies = [p.detach().double().requires_grad_() for p in encoder.parameters()]
    x = obs["obs"].double() / 255
    for (weight, bias), stride in zip(zip(copies[0:layers:2], copies[1:layers:2]), strides):
        x = F.relu(F.conv2d(x, weight, bias, stride))
    x = F.relu(F.linear(x.permute(0, 2, 3, 1).flatten(1), *copies[layers:]))  # flattened as (rows, columns, channels)
    y = torso(obs)
    torch.testing.assert_close(y.double(), x, rtol=1e-4, atol=1e-5)
    weight = torch.linspace(-1, 1, y.numel()).view_as(y)
    (y * weight).sum().backward()
    for p, grad in zip(encoder.parameters(), torch.autograd.grad((x * weight).sum(), copies)):
        torch.testing.assert_close(p.grad.double(), grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["nips", "nature", "impala"])
def test_large_batches_are_worked_off_in_pieces_of_the_same_numbers(kind):
    s = spec(obs=Leaf((3, 36, 36), "uint8", "image"))
    torso, obs = make(s, NetConfig(torso=kind, features=16)), random_obs(s, 2 * CHUNK + 5)
    y = torso(obs)
    y.square().mean().backward()
    whole = [p.grad.clone() for p in torso.parameters()]
    torso.zero_grad()
    parts = [torso({"obs": part}) for part in obs["obs"].split(CHUNK)]
    torch.testing.assert_close(torch.cat(parts), y, rtol=1e-5, atol=1e-5)
    torch.cat(parts).square().mean().backward()
    for p, grad in zip(torso.parameters(), whole):
        torch.testing.assert_close(p.grad, grad, rtol=1e-3, atol=1e-5)


def test_layouts_of_the_same_image_agree():
    first = spec(obs=Leaf((3, 40, 44), "uint8", "image"))
    last = spec(obs=Leaf((40, 44, 3), "uint8", "image"))
    obs = random_obs(first, 4)["obs"]
    a, b = make(first), make(last)
    with torch.no_grad():
        torch.testing.assert_close(a({"obs": obs}), b({"obs": obs.permute(0, 2, 3, 1).contiguous()}))
        strided = obs.permute(0, 3, 2, 1).contiguous().permute(0, 3, 2, 1)
        torch.testing.assert_close(a({"obs": obs}), a({"obs": strided}))
        grey, one = spec(obs=Leaf((40, 44), "uint8", "image")), spec(obs=Leaf((1, 40, 44), "uint8", "image"))
        torch.testing.assert_close(make(grey)({"obs": obs[:, 0]}), make(one)({"obs": obs[:, :1]}))


def test_float_images_are_taken_as_they_are():
    bytes_, floats = spec(obs=ATARI), spec(obs=Leaf((4, 84, 84), "float32", "image"))
    obs = random_obs(bytes_, 2)["obs"]
    with torch.no_grad():
        torch.testing.assert_close(
            make(bytes_)({"obs": obs}), make(floats)({"obs": obs.float() / 255}), rtol=1e-4, atol=1e-5
        )


def test_auto_picks_by_size_and_explicit_choices_are_kept():
    first_kernel = lambda torso: next(m for m in torso.modules() if isinstance(m, nn.Conv2d)).kernel_size  # noqa: E731
    assert first_kernel(make(spec(obs=Leaf((36, 36, 3), "uint8", "image")))) == (8, 8)
    assert first_kernel(make(spec(obs=Leaf((35, 40, 3), "uint8", "image")))) == (3, 3)
    big = spec(obs=ATARI)
    impala = make(big, NetConfig(torso="impala", features=16))
    assert sum(isinstance(m, nn.Conv2d) for m in impala.modules()) == 15
    assert impala(random_obs(big, 2)).shape == (2, 16)
    pixels = make(spec(obs=Leaf((5, 5, 3), "uint8", "image")), NetConfig(torso="mlp", hidden=(8,)))
    assert pixels(random_obs(spec(obs=Leaf((5, 5, 3), "uint8", "image")), 2)).shape == (2, 8)
    assert not any(isinstance(m, nn.Conv2d) for m in pixels.modules())


def test_impossible_choices_say_what_to_use():
    for kind, side in [("nature", 35), ("nips", 19)]:
        with pytest.raises(UsageError, match=rf"{kind}.*{side + 1}x{side + 1} pixels.*40x{side}; use torso 'tiny'"):
            make(spec(obs=Leaf((40, side, 3), "uint8", "image")), NetConfig(torso=kind))
    with pytest.raises(UsageError, match="mlp"):
        make(spec(obs=VECTOR), NetConfig(torso="impala"))
    with pytest.raises(UsageError, match="axes"):
        make(spec(obs=Leaf((2, 3, 40, 40), "uint8", "image")))


def test_tiny_warns_of_large_images_and_says_what_to_use():
    with pytest.warns(UserWarning, match=r"halves.*84x84 image has 112,896 values.*use 'nips' or 'nature'"):
        torso = make(spec(obs=ATARI), NetConfig(torso="tiny", features=2))
    assert math.prod(torso.map_shapes["obs"]) == 112_896
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for side in (3, 10, 35):  # what it is for
            make(spec(obs=Leaf((side, side, 3), "uint8", "image")), NetConfig(torso="tiny", features=2))
        for height, width in [(7, 7), (35, 84), (36, 36), (84, 84)]:
            make(spec(obs=Leaf((height, width, 3), "uint8", "image")), NetConfig(features=2))


def test_vectors_and_one_hots_share_one_mlp():
    s = spec(a=VECTOR, n=Leaf((), "int64", "discrete", 3), b=Leaf((2,), "float32", "vector"))
    torso, obs = make(s, NetConfig(hidden=(16, 8))), random_obs(s, 5)
    x = torch.cat([obs["a"], F.one_hot(obs["n"], 3).float(), obs["b"]], 1)
    weights = list(torso.parameters())
    expected = F.linear(F.linear(x, *weights[:2]).tanh(), *weights[2:]).tanh()
    torch.testing.assert_close(torso(obs), expected)
    assert torso.features == 8 and len(weights) == 4


def test_activation_and_initial_gain():
    torso = make(spec(obs=Leaf((16,), "float32", "vector")), NetConfig(hidden=(16,), activation="relu"))
    weight, bias = torso.parameters()
    torch.testing.assert_close(weight.t() @ weight, 2 * torch.eye(16), rtol=0, atol=1e-5)
    assert not bias.any()
    assert torso({"obs": torch.randn(9, 16)}).min() == 0
    for conv in (m for m in make(spec(obs=ATARI)).modules() if isinstance(m, nn.Conv2d)):
        rows = conv.weight.flatten(1)
        torch.testing.assert_close(rows @ rows.t(), 2 * torch.eye(len(rows)), rtol=0, atol=1e-5)
        assert not conv.bias.any()


@pytest.mark.parametrize("name", ["vector", "atari"])
def test_copies_and_flat_parameters_use_their_own_weights(name):
    s = spec(**LEAVES[name])
    torso, obs = make(s), random_obs(s, 2)
    with torch.no_grad():
        before = torso(obs)
        twin = copy.deepcopy(torso)
        flat = FlatParams([twin])
        torch.testing.assert_close(twin(obs), before, rtol=1e-5, atol=1e-6)
        flat.data.zero_()
        assert not twin(obs).any()
        torch.testing.assert_close(torso(obs), before, rtol=0, atol=0)


def test_the_same_seed_gives_the_same_numbers():
    s = spec(obs=ATARI)
    obs = random_obs(s, 3)
    runs = []
    for _ in range(2):
        torso = make(s)
        torso(obs).sum().backward()
        runs.append([p.grad for p in torso.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*runs))


class OwnTorso(nn.Module):
    def __init__(self, spec, net):
        super().__init__()
        self.features = 9
        self.linear = nn.Linear(math.prod(spec.obs["obs"].shape), 9)

    def forward(self, obs):
        return self.linear(obs["obs"])


class NoFeatures(nn.Module):
    def __init__(self, spec, net):
        super().__init__()


def test_a_torso_of_your_own(monkeypatch):
    s = spec(obs=VECTOR)
    torso = make_torso(s, NetConfig(module=f"{__name__}:OwnTorso"))
    assert isinstance(torso, OwnTorso) and torso(random_obs(s, 2)).shape == (2, 9)
    for module, words in [
        ("no.such.module:Torso", "no.such"),
        (f"{__name__}:Missing", "Missing"),
        ("justaname", "package.module:Class"),
        (f"{__name__}:NoFeatures", "features"),
    ]:
        with pytest.raises(UsageError, match=words):
            make_torso(s, NetConfig(module=module))


def test_without_a_layer_behind_the_convolutions_their_output_is_the_features():
    s = spec(obs=ATARI)
    with_layer, without = make(s), make(s, NetConfig(features=0))
    assert without.features == 64 * 7 * 7 and not any(isinstance(m, nn.Linear) for m in without.modules())
    obs = random_obs(s, CHUNK + 3)
    expected = with_layer.images[0].linear(without(obs)).relu()
    torch.testing.assert_close(with_layer(obs), expected)
