"""Small Q-learners and data for them: what several test files share."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from support_lanes import DISCRETE

from rookery.algorithms.dqn import DQN, DQNConfig
from rookery.core.config import NetConfig, ReplayConfig
from rookery.core.reduce import ALONE, Reduce
from rookery.core.types import EnvSpec, Leaf, Sequences, Transitions
from rookery.envs.lanes import Lanes
from rookery.roles.learner import Learner
from rookery.roles.producer import Producer, empty_arrays, handover_shapes

SPEC = EnvSpec("flat", {"obs": Leaf((3,), "float32", "vector")}, DISCRETE)
FLAT = NetConfig(hidden=())  # values linear in the observation
SMALL = DQNConfig(
    replay=ReplayConfig(batch=8, min_size=8), gamma=0.9, lr=1e-2, optimizer_eps=1e-5, max_grad_norm=1e9,
    target_period=3, v_min=-2.0, v_max=2.0, sequence=4, burn_in=3, overlap=2,
)  # fmt: skip


def algorithm(net: NetConfig = FLAT, spec: EnvSpec = SPEC, lanes: int = 4, **changes) -> DQN:
    return DQN(dataclasses.replace(SMALL, **changes), net, spec, lanes)


def built(net: NetConfig = FLAT, shake: float = 0.5, reduce: Reduce | None = None, **changes) -> Learner:
    """A learner whose online and target nets differ."""
    learner = Learner(algorithm(net, **changes), seed=1, reduce=reduce or ALONE)
    shaken(learner, shake)
    return learner


def shaken(learner: Learner, amount: float, seed: int = 11) -> None:
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in learner.nets.parameters():
            parameter.add_(amount * torch.randn(parameter.shape, generator=rng))


def minibatch(learner: Learner, items, seed: int = 5):
    """What the losses get."""
    (made,) = learner.algorithm.minibatches(items, torch.Generator().manual_seed(seed), ALONE)
    return made


def transitions(rows: int = 8, seed: int = 0) -> Transitions:
    rng = torch.Generator().manual_seed(seed)
    return Transitions(
        obs={"obs": torch.randn(rows, 3, generator=rng)}, action=torch.randint(3, (rows,), generator=rng),
        reward=torch.randn(rows, generator=rng), discount=torch.where(torch.rand(rows, generator=rng) < 0.3, 0.0, 0.81),
        next_obs={"obs": torch.randn(rows, 3, generator=rng)}, weight=torch.rand(rows, generator=rng) + 0.1,
        version=torch.zeros(rows, dtype=torch.int64),
    )  # fmt: skip


def sequences(learner: Learner, ends: dict[int, tuple[int, str]] | None = None, count: int = 4, seed: int = 0):
    """`count` sequences of S = burn_in + sequence rows; ends: item -> (its last live row, "terminated"|"truncated").

    Item 0 begins with an episode: the burn-in's rows are missing.
    """
    config, rng = learner.algorithm.config, torch.Generator().manual_seed(seed)
    rows = config.burn_in + config.sequence
    live = torch.ones(rows, count, dtype=torch.bool)
    live[: config.burn_in, 0] = False
    flags = {name: torch.zeros(rows, count, dtype=torch.bool) for name in ("terminated", "truncated")}
    for item, (last, kind) in (ends or {}).items():
        flags[kind][last, item] = True
        live[last + 1 :, item] = False
    shown = torch.zeros(rows + 1, count, dtype=torch.bool)
    shown[:-1] |= live
    shown[1:] |= live  # the row behind a live one is its successor
    state = learner.algorithm.initial_state(learner.nets, count)
    state = {name: torch.randn(x.shape, generator=rng) * live[0].view(-1, 1, 1) for name, x in state.items()}
    obs = torch.randn(rows + 1, count, 3, generator=rng) * shown.unsqueeze(-1)
    return Sequences(
        obs={"obs": obs}, action=torch.randint(3, (rows, count), generator=rng) * live,
        reward=torch.randn(rows, count, generator=rng) * live, **flags, live=live, state=state,
        weight=torch.rand(count, generator=rng) + 0.1, version=torch.zeros(count, dtype=torch.int64),
    )  # fmt: skip


def parcel_of(learner: Learner, lanes: Lanes, unrolls: int = 3, index: int = 0) -> dict[str, np.ndarray]:
    """Items that an actor with the learner's nets makes of some unrolls, with their start priorities."""
    algorithm = learner.algorithm
    producer = Producer(algorithm, learner.nets, lanes, 3, index)
    producer.begin(0, "0")
    state = algorithm.initial_state(learner.nets, 1)
    arrays = empty_arrays(handover_shapes(lanes.spec, producer.plan, lanes.count, state))
    parts = []
    for _ in range(unrolls):
        producer.fill(arrays, 0)
        parts.append({name: x[: arrays["count"][0]].copy() for name, x in arrays.items() if name != "count"})
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
