"""The numpy policy is the torch policy: the same probabilities, the same actions, always the newest weights."""

from __future__ import annotations

import pytest
import torch

from rookery.core.config import NetConfig
from rookery.core.types import ActionSpec, EnvSpec, Leaf
from rookery.nets.build import actor_critic
from rookery.nets.flat import FlatParams
from rookery.nets.quick import Quick, QuickPolicy

SPEC = EnvSpec("test", {"obs": Leaf((5,), "float32", "vector")}, ActionSpec("discrete", (3,)))


def nets_of(**fields):
    torch.manual_seed(2)
    nets = actor_critic(SPEC, NetConfig(**fields))
    with torch.no_grad():
        nets["policy"].linear.weight.mul_(100)  # probabilities that differ
    return nets


@pytest.mark.parametrize("fields", [{}, {"activation": "relu"}, {"normalize_obs": True}, {"hidden": (8,)}])
def test_it_computes_what_the_modules_compute(fields):
    nets = nets_of(**fields)
    obs = {"obs": 2 * torch.randn(64, 5)}
    if fields.get("normalize_obs"):
        nets["normalizer"].update({"obs": obs["obs"][None]}, torch.ones(1, 64, dtype=torch.bool))
    quick = QuickPolicy(nets)
    with torch.inference_mode():
        params = nets["policy"](nets["body"].step(nets["normalizer"](obs), {})[0])
        greedy, greedy_logp = nets["policy"].mode(params)
        drawn, drawn_logp = nets["policy"].sample(params, torch.Generator().manual_seed(9))
        action, logp = quick.act(obs, None)
        sampled, sampled_logp = quick.act(obs, torch.Generator().manual_seed(9))
    assert action.tolist() == greedy.tolist() and sampled.tolist() == drawn.tolist()
    torch.testing.assert_close(torch.from_numpy(logp), greedy_logp, rtol=0, atol=1e-6)
    torch.testing.assert_close(torch.from_numpy(sampled_logp), drawn_logp, rtol=0, atol=1e-6)


def test_it_sees_weights_that_change_in_place_and_notices_when_they_move():
    nets = nets_of()
    quick, obs = QuickPolicy(nets), {"obs": torch.randn(4, 5)}
    _, before = quick.act(obs, None)
    with torch.no_grad():
        nets["policy"].linear.weight.mul_(0)
    _, after = quick.act(obs, None)
    assert (before != after).all() and not quick.stale
    FlatParams(nets.values())
    assert quick.stale


@pytest.mark.parametrize("fields", [{"core": "gru"}, {"shared": True}, {"precision": "bf16"}, {"hidden": ()}])
def test_what_is_not_covered_acts_through_the_modules(fields):
    assert QuickPolicy.fits(nets_of()) and not QuickPolicy.fits(nets_of(**fields))


def test_the_numpy_version_is_made_once_and_again_when_nets_or_memory_change():
    quick, nets = Quick(QuickPolicy), nets_of()
    first = quick.of(nets)
    assert first is not None and quick.of(nets) is first
    FlatParams(nets.values())
    second = quick.of(nets)
    assert second is not first and not second.stale and quick.of(nets) is second
    assert quick.of(nets_of(core="gru")) is None
    assert quick.of(nets) is not None
