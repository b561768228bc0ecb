"""Small learners of deterministic policy gradients and data for them: what several test files share."""

from __future__ import annotations

import dataclasses

import torch
from support_lanes import BOX
from torch import nn

from rookery.algorithms.dpg import DPG, DPGBatch, DPGConfig
from rookery.core.config import NetConfig, ReplayConfig
from rookery.core.reduce import ALONE, Reduce
from rookery.core.types import EnvSpec, Leaf, LossOutput, Sequences, Transitions
from rookery.roles.learner import Learner

SPEC = EnvSpec("flat", {"obs": Leaf((3,), "float32", "vector")}, BOX)
DICT = EnvSpec(
    "dict",
    {"body": Leaf((3,), "float32", "vector"), "eye": Leaf((2, 10, 10), "uint8", "image")},
    BOX,
)
CRITICS = ("scalar", "categorical", "mixture")
SMALL = DPGConfig(
    replay=ReplayConfig(batch=16, min_size=16), critic="scalar", v_min=-5.0, v_max=5.0, atoms=11, components=3,
    actor_hidden=(8, 7), critic_hidden=(9, 8), target_period=3, actor_lr=1e-2, critic_lr=1e-2, activation="tanh",
)  # fmt: skip


def algorithm(net: NetConfig | None = None, spec: EnvSpec = SPEC, lanes: int = 4, **changes) -> DPG:
    return DPG(dataclasses.replace(SMALL, **changes), net or NetConfig(features=6, hidden=(8,)), spec, lanes)


def built(
    net: NetConfig | None = None, spec: EnvSpec = SPEC, lanes: int = 4, reduce: Reduce | None = None, **changes
) -> Learner:
    """A learner whose weights and target weights all differ from their near-zero start."""
    learner = Learner(algorithm(net, spec, lanes, **changes), seed=1, reduce=reduce or ALONE)
    rng = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in learner.nets.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=rng))
    return learner


def batch(rows: int = 16, spec: EnvSpec = SPEC, seed: int = 0) -> Transitions:
    rng = torch.Generator().manual_seed(seed)

    def observe():
        return {
            key: torch.randint(256, (rows, *leaf.shape), generator=rng, dtype=torch.uint8)
            if leaf.dtype == "uint8"
            else torch.randn(rows, *leaf.shape, generator=rng)
            for key, leaf in spec.obs.items()
        }

    discount = torch.where(torch.rand(rows, generator=rng) < 0.3, 0.0, 0.95)
    return Transitions(
        obs=observe(), action=torch.rand(rows, 2, generator=rng) * 2 - 1, reward=torch.randn(rows, generator=rng),
        discount=discount, next_obs=observe(), weight=torch.rand(rows, generator=rng) + 0.1,
        version=torch.zeros(rows, dtype=torch.int64),
    )  # fmt: skip


def policy_of(nets: nn.ModuleDict, name: str, obs: dict) -> torch.Tensor:
    return nets[name].action(nets[name].step(obs, {})[0])


def params_of(nets: nn.ModuleDict, name: str, obs: dict, action: torch.Tensor):
    return nets[name].value(nets[name].step(obs, {})[0], action)


def q_of(nets: nn.ModuleDict, name: str, obs: dict, action: torch.Tensor) -> torch.Tensor:
    return nets[name].mean(params_of(nets, name, obs, action))


def weights(learner: Learner, *names: str) -> dict[str, torch.Tensor]:
    found = learner.nets.named_parameters()
    return {name: p.detach().clone() for name, p in found if name.partition(".")[0] in names}


def drawn(alg: DPG, items: Transitions | Sequences, seed: int = 0) -> DPGBatch:
    """As the losses want it, with the noise that a mixture needs."""
    return next(alg.minibatches(items, torch.Generator().manual_seed(seed), ALONE))


def score(learner: Learner, items: Transitions | Sequences, seed: int = 0) -> LossOutput:
    return learner.algorithm.losses(learner.nets, drawn(learner.algorithm, items, seed))
