"""Values by numpy are the values of the modules; epsilon-greedy has the frequencies it promises."""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import pytest
import torch

from rookery.core.config import NetConfig
from rookery.core.types import ActionSpec, EnvSpec, Leaf
from rookery.nets.flat import FlatParams
from rookery.nets.noisy import factors
from rookery.nets.qnet import QHead, q_nets
from rookery.nets.quick_q import EpsilonGreedy, QuickQ

SPEC = EnvSpec("test", {"obs": Leaf((5,), "float32", "vector")}, ActionSpec("discrete", (3,)))


def nets_of(mix: dict | None = None, **fields):
    torch.manual_seed(2)
    net = NetConfig(**({"hidden": (8, 8)} | fields))
    return q_nets(SPEC, net, partial(QHead, actions=3, **(mix or {})), 1.0)


@pytest.mark.parametrize(
    "dueling, atoms, sigma, stream",
    list(itertools.product((False, True), (None, torch.linspace(-9, 9, 7)), (0.0, 0.5), (0, 6))),
)
@pytest.mark.parametrize("fields", [{}, {"activation": "relu", "normalize_obs": True}], ids=["tanh", "relu"])
def test_it_computes_what_the_modules_compute(fields, dueling, atoms, sigma, stream):
    nets = nets_of({"dueling": dueling, "atoms": atoms, "sigma": sigma, "stream": stream}, **fields)
    obs = {"obs": 2 * torch.randn(64, 5)}
    if fields.get("normalize_obs"):
        nets["normalizer"].update(obs, torch.ones(64, dtype=torch.bool))
    quick, head = QuickQ(nets), nets["q"]
    noises = [None]
    if sigma:
        noises.append(factors(64, head.noise, generator=torch.Generator().manual_seed(1)))
    for noise in noises:
        with torch.inference_mode():
            expected = head.means(head(nets["body"].step(nets["normalizer"](obs), {})[0], noise))
        values = quick.values(obs, noise)
        assert values.dtype == np.float32
        torch.testing.assert_close(torch.from_numpy(values), expected, rtol=0, atol=2e-6)


def test_it_computes_a_shared_bias():
    nets, obs = nets_of({"shared_bias": True}), {"obs": torch.randn(9, 5)}
    with torch.inference_mode():
        expected = nets["q"](nets["body"].step(obs, {})[0])
    torch.testing.assert_close(torch.from_numpy(QuickQ(nets).values(obs)), expected, rtol=0, atol=2e-6)


def test_it_sees_weights_that_change_in_place_and_notices_when_they_move():
    nets = nets_of({"dueling": True})
    quick, obs = QuickQ(nets), {"obs": torch.randn(4, 5)}
    before = quick.values(obs)
    with torch.no_grad():
        nets["q"].value.layers[0].bias.add_(1.0)
    torch.testing.assert_close(quick.values(obs), before + 1.0)
    assert not quick.stale
    FlatParams([nets["body"], nets["q"]])
    assert quick.stale


@pytest.mark.parametrize("fields", [{"core": "gru"}, {"precision": "bf16"}, {"hidden": ()}])
def test_what_is_not_covered_acts_through_the_modules(fields):
    assert QuickQ.fits(nets_of()) and not QuickQ.fits(nets_of(**fields))


# Epsilon-greedy


def shares(actions: np.ndarray, choices: int) -> np.ndarray:
    return np.bincount(actions, minlength=choices) / len(actions)


def test_random_actions_are_uniform_over_all_the_greedy_one_too():
    """P65."""
    choose, rng = EpsilonGreedy(4), torch.Generator().manual_seed(1)
    greedy = np.full(40_000, 2)
    np.testing.assert_allclose(shares(choose(greedy, 0.4, rng), 4), [0.1, 0.1, 0.7, 0.1], atol=0.006)
    np.testing.assert_allclose(shares(choose(greedy, 1.0, rng), 4), [0.25] * 4, atol=0.008)
    assert np.all(choose(greedy, 0.0, rng) == 2)
    assert np.all(greedy == 2), "what was passed in is not changed"


def test_every_row_flips_its_own_coin_with_its_own_epsilon():
    """P64: how many of 8 rows explore in a step varies as 8 independent coins do, and is not 0 or 8."""
    choose, rng = EpsilonGreedy(1000), torch.Generator().manual_seed(2)
    greedy = np.zeros(8, np.int64)
    counts = np.array([(choose(greedy, 0.5, rng) > 0).sum() for _ in range(4000)])
    assert counts.var() == pytest.approx(8 * 0.25, rel=0.1)
    each = np.array([choose(greedy, np.array([0.0, 0.1, 0.3, 0.5, 0.5, 0.7, 0.9, 1.0]), rng) > 0 for _ in range(4000)])
    np.testing.assert_allclose(each.mean(0), [0, 0.1, 0.3, 0.5, 0.5, 0.7, 0.9, 0.999], atol=0.03)
    assert abs(np.corrcoef(each[:, 3], each[:, 4])[0, 1]) < 0.06


def test_the_same_generator_the_same_actions_and_any_number_of_rows():
    choose, greedy = EpsilonGreedy(5), np.zeros(16, np.int64)
    draws = [choose(greedy, 1.0, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert draws[0].tolist() == draws[1].tolist() != draws[2].tolist()
    assert choose(greedy[:3], 1.0, torch.Generator()).shape == (3,)


@pytest.mark.parametrize("choices", [2, 3, 6, 17, 18, 100])
def test_the_largest_draw_is_still_a_choice(choices):
    choose = EpsilonGreedy(choices)
    choose(np.zeros(1, np.int64), 1.0, torch.Generator())
    assert int(np.float32(1 - 2**-24) * np.float32(choices)) == choices - 1
    assert (choose._draw * choices).dtype == np.float32
