"""The auto-encoder: what is decoded, in which shape and scale, and that it can be learnt."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rookery.core.config import NetConfig
from rookery.core.errors import UsageError
from rookery.core.types import ActionSpec, EnvSpec, Leaf
from rookery.nets.autoencoder import Decoder, ImageDecoder, Latent
from rookery.nets.flat import FlatParams
from rookery.nets.torso import Torso

LATENT = 8
VECTOR = Leaf((4,), "float32", "vector")
STACK = Leaf((4, 42, 42), "uint8", "image", stack=4)
LEAVES = {
    "vector": {"obs": VECTOR},
    "float64": {"obs": Leaf((4,), "float64", "vector")},
    "matrix": {"obs": Leaf((2, 3), "float32", "vector")},
    "discrete": {"obs": Leaf((), "int64", "discrete", 7)},
    "discretes": {"obs": Leaf((3,), "int64", "discrete", 4)},
    "first": {"obs": Leaf((3, 40, 44), "uint8", "image")},
    "last": {"obs": Leaf((40, 37, 3), "uint8", "image")},
    "grey": {"obs": Leaf((84, 84), "uint8", "image")},
    "tiny": {"obs": Leaf((7, 7, 3), "uint8", "image")},
    "minatar": {"obs": Leaf((10, 10, 4), "float32", "image")},
    "odd": {"obs": Leaf((3, 45, 38), "uint8", "image")},
    "one pixel": {"obs": Leaf((1, 1), "uint8", "image")},
    "stack": {"obs": STACK},
    "dict": {"rgb": Leaf((36, 36, 3), "uint8", "image"), "v": VECTOR, "n": Leaf((), "int64", "discrete", 3)},
}
EVERY = pytest.mark.parametrize("name", LEAVES)


def spec(**leaves: Leaf) -> EnvSpec:
    return EnvSpec("toy", leaves, ActionSpec("discrete", choices=(2,)))


def random_obs(s: EnvSpec, n: int, seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    obs = {}
    for key, leaf in s.obs.items():
        if leaf.dtype == "uint8":
            obs[key] = torch.randint(0, 256, (n, *leaf.shape), generator=g, dtype=torch.uint8)
        elif leaf.kind == "discrete":
            obs[key] = torch.randint(0, leaf.n, (n, *leaf.shape), generator=g)
        else:
            obs[key] = torch.randn(n, *leaf.shape, generator=g).to(getattr(torch, leaf.dtype))
    return obs


def codes(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, LATENT, generator=torch.Generator().manual_seed(seed)).tanh()


def make(s: EnvSpec, **options) -> Decoder:
    torch.manual_seed(0)
    return Decoder(s, LATENT, **options)


@EVERY
def test_every_leaf_is_decoded_in_its_own_layout(name):
    s = spec(**LEAVES[name])
    decoder, obs = make(s), random_obs(s, 3)
    predicted, target = decoder(codes(3)), decoder.target(obs)
    assert list(predicted) == list(target) == list(s.obs)
    for key, leaf in s.obs.items():
        shape = leaf.shape[1:] if leaf.stack > 1 else leaf.shape
        shape = (3, *shape, leaf.n) if leaf.kind == "discrete" else (3, *shape)
        assert predicted[key].shape == target[key].shape == shape
        assert predicted[key].dtype == target[key].dtype == torch.float32


@pytest.mark.parametrize("side", [*range(1, 13), *range(34, 50), 84, 96])
def test_images_of_any_size_are_met_exactly(side):
    other = side + 3
    for shape in ((side, other), (1, other, side), (side, other, 1)):
        decoder = ImageDecoder(shape, LATENT)
        assert decoder(codes(2)).shape == (2, *shape)


@EVERY
def test_the_gradient_reaches_the_latent_and_every_parameter(name):
    s = spec(**LEAVES[name])
    decoder, obs, latent = make(s), random_obs(s, 3), codes(3).requires_grad_()
    before = {key: x.clone() for key, x in obs.items()}
    loss = decoder.loss(latent, obs)
    assert loss.shape == (3,) and (loss > 0).all()
    loss.sum().backward()
    assert latent.grad.abs().sum(1).all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in decoder.parameters())
    assert all(torch.equal(before[key], obs[key]) for key in obs)


@EVERY
def test_there_may_be_no_rows(name):
    s = spec(**LEAVES[name])
    assert make(s).loss(codes(0), random_obs(s, 0)).shape == (0,)


@EVERY
def test_rows_do_not_depend_on_their_neighbours(name):
    s = spec(**LEAVES[name])
    decoder, obs, latent = make(s), random_obs(s, 4), codes(4)
    alone = [decoder.loss(latent[i : i + 1], {key: x[i : i + 1] for key, x in obs.items()}) for i in range(4)]
    torch.testing.assert_close(decoder.loss(latent, obs), torch.cat(alone))


def test_targets_are_scaled_once():  # P73
    byte, grey = spec(obs=Leaf((6, 6), "uint8", "image")), spec(obs=Leaf((6, 6), "float32", "image"))
    white = torch.full((1, 6, 6), 255, dtype=torch.uint8)
    assert (make(byte).target({"obs": white})["obs"] == 1).all()
    assert (make(grey).target({"obs": white.float() / 255})["obs"] == 1).all()
    counts = spec(obs=Leaf((2,), "uint8", "vector"))  # bytes that are not pixels stay what they are
    assert make(counts).target({"obs": torch.tensor([[3, 200]], dtype=torch.uint8)})["obs"].tolist() == [[3, 200]]
    number = spec(obs=Leaf((2,), "int64", "discrete", 3))
    assert make(number).target({"obs": torch.tensor([[2, 0]])})["obs"].tolist() == [[[0, 0, 1], [1, 0, 0]]]


def test_of_a_stack_only_the_newest_frame_is_decoded_unless_all_are_wanted():
    s = spec(obs=STACK)
    obs, latent = random_obs(s, 2), codes(2)
    newest, every = make(s), make(s, newest=False)
    assert newest(latent)["obs"].shape == (2, 42, 42) and every(latent)["obs"].shape == (2, 4, 42, 42)
    torch.testing.assert_close(newest.target(obs)["obs"], obs["obs"][:, 3].float() / 255)
    torch.testing.assert_close(every.target(obs)["obs"], obs["obs"].float() / 255)
    loss = newest.loss(latent, obs)
    obs["obs"][:, :3] = 0
    assert torch.equal(newest.loss(latent, obs), loss)


def test_the_newest_frame_of_a_stack_longer_than_its_images_are_wide():
    """(8, 6, 4) would be read as 4 channels last; a stack says that frames come first."""
    s = spec(obs=Leaf((8, 6, 4), "uint8", "image", stack=8))
    obs = random_obs(s, 2)
    assert make(s)(codes(2))["obs"].shape == (2, 6, 4)
    torch.testing.assert_close(make(s).target(obs)["obs"], obs["obs"][:, -1].float() / 255)


def test_each_leaf_weighs_the_same_however_large_it_is():
    leaves = LEAVES["dict"]
    s = spec(**leaves)
    decoder, obs, latent = make(s), random_obs(s, 5), codes(5)
    predicted, target = decoder(latent), decoder.target(obs)
    each = [0.5 * (predicted[key] - target[key]).square().flatten(1).mean(1) for key in leaves]
    torch.testing.assert_close(decoder.loss(latent, obs), sum(each) / 3)


@pytest.mark.parametrize("shape", [(2, 41, 46), (41, 46, 2), (2, 9, 12), (9, 12, 2)])
def test_patches_are_a_transposed_convolution_with_its_centre_cut_out(shape):
    torch.manual_seed(0)
    decoder = ImageDecoder(shape, LATENT)
    y = decoder.linear(codes(3)).relu().view(3, *decoder.map, 32).permute(0, 3, 1, 2)
    if decoder.deconv is not None:
        y = decoder.deconv(y).relu()
    weight = decoder.pixels.weight.T.unflatten(1, (2, decoder.patch, decoder.patch))  # [inputs, C, patch, patch]
    y = F.conv_transpose2d(y, weight, None, decoder.patch)
    top, left = (y.shape[2] - decoder.image[0]) // 2, (y.shape[3] - decoder.image[1]) // 2
    y = y[:, :, top:, left:][:, :, : decoder.image[0], : decoder.image[1]]
    torch.testing.assert_close(decoder(codes(3)), y if shape[0] == 2 else y.permute(0, 2, 3, 1))


def test_images_of_unknown_layout_are_refused():
    with pytest.raises(UsageError, match="2 or 3 axes"):
        make(spec(obs=Leaf((2, 3, 4, 5), "uint8", "image")))


def test_vectors_have_one_hidden_layer():
    decoder = make(spec(obs=VECTOR), hidden=16)
    sizes = [tuple(m.weight.shape) for m in decoder.modules() if isinstance(m, nn.Linear)]
    assert sizes == [(16, LATENT), (4, 16)]


def test_parameters_may_become_views_of_one_vector():
    s = spec(obs=STACK)
    decoder, latent = make(s), codes(4)
    before = decoder(latent)["obs"]
    FlatParams([decoder])
    assert torch.equal(decoder(latent)["obs"], before)


def test_leading_axes_are_the_callers_to_flatten():
    with pytest.raises(AssertionError):
        make(spec(obs=VECTOR))(torch.zeros(2, 3, LATENT))


class TestLatent:
    def test_is_bounded_for_any_leading_axes(self):
        latent = Latent(6, 4)
        for lead in ((), (5,), (2, 3)):
            code = latent(100 * torch.randn(*lead, 6))
            assert code.shape == (*lead, 4) and code.abs().max() <= 1
        assert latent.features == 4

    def test_starts_orthogonal_without_bias(self):
        weight = Latent(6, 4).linear.weight.detach()
        torch.testing.assert_close(weight @ weight.T, 2 * torch.eye(4))
        assert not Latent(6, 4).linear.bias.any()


def blocks(side: int, n: int) -> torch.Tensor:
    """Frames with a bright block at a different place each, [n, side, side]."""
    frames = torch.zeros(n, side, side, dtype=torch.uint8)
    for i in range(n):
        y, x = (7 * i) % (side - 3), (11 * i) % (side - 3)
        frames[i, y : y + 3, x : x + 3] = 255
    return frames


def learnt(s: EnvSpec, obs: dict[str, torch.Tensor], net: NetConfig, steps: int) -> tuple[float, float]:
    """The loss after some steps, and that of the best prediction that knows nothing of the observation: the mean."""
    torch.manual_seed(0)
    torso = Torso(s, net)
    latent = Latent(torso.features, LATENT)
    decoder = Decoder(s, LATENT)
    optimizer = torch.optim.Adam([*torso.parameters(), *latent.parameters(), *decoder.parameters()], 3e-3)
    for _ in range(steps):
        loss = decoder.loss(latent(torso(obs)), obs).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    ignorant = [0.5 * x.flatten(1).var(0, correction=0).mean().item() for x in decoder.target(obs).values()]
    return loss.item(), sum(ignorant) / len(ignorant)


@pytest.mark.parametrize("side, steps", [(10, 70), (42, 160)])
def test_a_handful_of_images_is_learnt(side, steps):
    s = spec(obs=Leaf((4, side, side), "uint8", "image", stack=4))
    frames = torch.zeros(6, 4, side, side, dtype=torch.uint8)
    frames[:, 3] = blocks(side, 6)
    loss, ignorant = learnt(s, {"obs": frames}, NetConfig(features=32), steps)
    assert loss < 0.1 * ignorant, (loss, ignorant)


def test_vectors_and_integers_are_learnt():
    s = spec(v=VECTOR, n=Leaf((2,), "int64", "discrete", 3))
    loss, ignorant = learnt(s, random_obs(s, 8), NetConfig(), 200)
    assert loss < 0.1 * ignorant, (loss, ignorant)
