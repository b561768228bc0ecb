"""The Atari rows build the networks of their papers, layer by layer (spec sheet, section 2.2)."""

from __future__ import annotations

import pytest
from torch import nn

from rookery.algorithms.registry import build_algorithm
from rookery.core.types import ActionSpec, EnvSpec, Leaf
from rookery.recipes import RECIPES

CONVOLUTIONS = [(32, 4, 8, 8), (64, 32, 4, 4), (64, 64, 3, 3)]
FLAT, ACTIONS = 64 * 7 * 7, 6
SPEC = EnvSpec(
    "ALE/Pong-v5",
    {"obs": Leaf((4, 84, 84), "uint8", "image", stack=4)},
    ActionSpec("discrete", choices=(ACTIONS,)),
    clipped=True,
)


def nets_of(recipe: str) -> nn.ModuleDict:
    return build_algorithm(RECIPES[recipe].build("ALE/Pong-v5", "pixels", "atari"), SPEC).nets()


def weights(recipe: str, *modules: str) -> list[tuple[int, ...]]:
    """Shapes of the weight matrices of some modules, in the order of the data."""
    nets = nets_of(recipe)
    named = [(n, p) for module in modules for n, p in nets[module].named_parameters() if p.dim() > 1]
    return [tuple(p.shape) for name, p in named if "sigma" not in name]


@pytest.mark.parametrize("recipe", ["dqn", "double_dqn", "gorila"])
def test_one_head_on_a_layer_of_512(recipe):
    assert weights(recipe, "body", "q") == [*CONVOLUTIONS, (512, FLAT), (ACTIONS, 512)]


def test_the_actions_of_the_tuned_double_dqn_share_a_bias():
    biases = {name: nets_of(name)["q"].advantage.layers[-1].bias.shape for name in ("dqn", "double_dqn")}
    assert biases == {"dqn": (ACTIONS,), "double_dqn": (1,)}


@pytest.mark.parametrize("recipe", ["prioritized_dueling_dqn", "apex_dqn"])
def test_two_streams_on_the_convolutions(recipe):
    assert weights(recipe, "body", "q") == [*CONVOLUTIONS, (512, FLAT), (ACTIONS, 512), (512, FLAT), (1, 512)]


def test_c51_has_a_distribution_for_every_action():
    assert weights("c51", "body", "q") == [*CONVOLUTIONS, (512, FLAT), (51 * ACTIONS, 512)]


def test_rainbow_has_two_noisy_streams_of_distributions():
    streams = [(512, FLAT), (51 * ACTIONS, 512), (512, FLAT), (51, 512)]
    assert weights("rainbow", "body", "q") == [*CONVOLUTIONS, *streams]
    head = nets_of("rainbow")["q"]
    assert [tuple(p.shape) for name, p in head.named_parameters() if "sigma" in name and p.dim() > 1] == streams
