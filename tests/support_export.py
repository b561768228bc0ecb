"""Policies of every kind with random weights and statistics, without training them, and what to export of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rookery.algorithms.registry import build_algorithm
from rookery.core.types import MASK, ActionSpec, EnvSpec, Leaf
from rookery.envs.last import with_last
from rookery.play.policy import Policy
from rookery.recipes import RECIPES
from rookery.storage.checkpoint import Checkpoint

VECTOR = {"obs": Leaf((4,), "float32", "vector")}
MIXED = {
    "arm.angle": Leaf((2, 3), "float32", "vector"),
    "eye": Leaf((2, 36, 36), "uint8", "image", stack=2),
    "hand": Leaf((3,), "uint8", "multi", counts=(2, 4, 3), starts=(1, 0, -5)),
    "where": Leaf((), "int64", "discrete", n=5, starts=(2,)),
    "action": Leaf((1,), "float32", "vector"),  # also the name of an output
}
PIXELS = {"obs": Leaf((4, 84, 84), "uint8", "image", stack=4)}
ONE = ActionSpec("discrete", (5,), (3,))
TWO = ActionSpec("multi", (3, 5), (0, -2))
BOX = ActionSpec("box", size=6, low=(-1, -2, 0, None, None, -3), high=(1, 2, 5, None, 4, -1), box_shape=(2, 3))
MEMORY = {"core_size": 16}


def policy_of(
    recipe: str, obs: dict[str, Leaf], action: ActionSpec, masked: bool = False, preset: str = "",
    clipped: bool = False, seed: int = 0, **fields: Any,
) -> Policy:  # fmt: skip
    """A loaded policy whose weights are larger than those that training starts with, so that it chooses clearly."""
    if masked:
        obs = obs | {MASK: Leaf((sum(action.choices),), "bool", "mask")}
    spec = EnvSpec("random", obs, action, clipped=clipped, mask_from="info" if masked else "")
    config = RECIPES[recipe].build("random", lambda: spec, preset, **fields)
    spec = with_last(spec) if config.net.feed_last else spec
    torch.manual_seed(seed)
    nets = build_algorithm(config, spec).nets()
    with torch.no_grad():
        for name, x in nets.state_dict().items():
            if "running.count" in name:
                x.fill_(100)
            elif "running.m2" in name:
                x.uniform_(50, 500)
            elif "running.mean" in name:
                x.normal_()
            elif x.is_floating_point() and x.dim() and not name.startswith(("target", "reward_scaler", "normalizer")):
                x.add_(torch.randn_like(x) * (0.3 if x.dim() == 1 else 0.5 / x[0].numel() ** 0.5))
        for leaf in nets["normalizer"].leaves:
            leaf.refresh()
    tensors = {f"nets/{name}": x.clone() for name, x in nets.state_dict().items()}
    return Policy(replace(config, env="random"), spec, Checkpoint(Path("run/checkpoints/step-7"), 7, tensors, {}))
