"""Small actor-critics with auxiliary losses: batches of images with known ends, and rigs with a table of their own.

What several test files share.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from support_lanes import Rig, shaken

from rookery.algorithms.a2c import A2C, A2CConfig
from rookery.algorithms.actor_critic import ActorCritic
from rookery.algorithms.appo import APPO, APPOConfig
from rookery.algorithms.impala import IMPALA, IMPALAConfig
from rookery.algorithms.ppo import PPO, PPOConfig
from rookery.core.config import AtariConfig, AutoencoderConfig, AuxConfig, NetConfig
from rookery.core.types import ActionSpec, EnvSpec, Leaf
from rookery.core.unroll import Unroll, empty_unroll, unroll_shapes
from rookery.envs.lanes import Lanes
from rookery.envs.make import make
from rookery.roles.actor import Actor
from rookery.roles.learner import Learner
from rookery.tables.factory import make_table

T, B = 8, 4
SHORT = {"unroll": T, "lr_end": 0.01, "lr": 0.01}
CONFIGS: dict[str, Any] = {
    "a2c": A2CConfig(**SHORT, optimizer="adam"),
    "impala": IMPALAConfig(**SHORT, optimizer="adam"),
    "ppo": PPOConfig(**SHORT, chunk=4, epochs=2, minibatches=2),
    "appo": APPOConfig(**SHORT, chunk=4, epochs=2, minibatches=2),
}
KINDS: dict[str, type[ActorCritic]] = {"a2c": A2C, "impala": IMPALA, "ppo": PPO, "appo": APPO}
ALL = AuxConfig(pixel_control=0.5, reward_prediction=2.0, value_replay=0.25, cell=2, gamma=0.75)

CHOICE = ActionSpec("discrete", choices=(3,), starts=(0,))
LEAVES = {
    "image": Leaf((2, 6, 8), "uint8", "image"),
    "last": Leaf((6, 8, 3), "uint8", "image"),
    "grey": Leaf((6, 8), "uint8", "image"),
    "stack": Leaf((4, 6, 8), "uint8", "image", stack=4),
    "float": Leaf((6, 8, 2), "float32", "image"),
    "vector": Leaf((5,), "float32", "vector"),
}
MLP = NetConfig(torso="mlp", hidden=(12,))  # of images, too
NETS = {
    "none": MLP,
    "gru": dataclasses.replace(MLP, core="gru", core_size=6),
    "lstm": dataclasses.replace(MLP, core="lstm", core_size=6),
}


def spec_of(leaf: str = "image", action: ActionSpec = CHOICE) -> EnvSpec:
    return EnvSpec("fixed", {"obs": LEAVES[leaf]}, action)


def batch_of(algorithm: ActorCritic, nets: Any, leaf: str = "image", seed: int = 3) -> Unroll:
    """T rows of B lanes with ends of both kinds inside and in the last row, and dead rows at both borders."""
    rng = np.random.default_rng(seed)
    terminated, truncated = np.zeros((T, B), bool), np.zeros((T, B), bool)
    for row, lane in ((3, 0), (7, 1), (0, 3)):
        terminated[row, lane] = True
    for row, lane in ((2, 1), (5, 2), (7, 3)):
        truncated[row, lane] = True
    live = np.ones((T, B), bool)
    live[0, 2] = False
    live[1:] = ~(terminated | truncated)[:-1]
    reward = live * rng.choice([-1.0, 0.0, 0.0, 1.0], size=(T, B))
    chunks = T // algorithm.plan().chunk
    start = algorithm.initial_state(nets, chunks * B)
    state = {name: torch.tensor(rng.normal(size=x.shape).astype(np.float32)) for name, x in start.items()}
    extras = {name: torch.tensor(rng.normal(size=(T, B)).astype(np.float32)) for name in algorithm.plan().extras}
    return Unroll(
        obs={"obs": torch.tensor(seen(leaf, rng, T + 1, B))}, action=torch.tensor(rng.integers(3, size=(T, B))),
        reward=torch.tensor(reward.astype(np.float32)),
        terminated=torch.tensor(terminated), truncated=torch.tensor(truncated), live=torch.tensor(live),
        logp=torch.tensor(rng.normal(-1.1, 0.1, (T, B)).astype(np.float32)),
        state0={name: x.unflatten(0, (chunks, B)) for name, x in state.items()},
        version=torch.zeros(B, dtype=torch.int64), lane=torch.arange(B), extras=extras,
    )  # fmt: skip


def seen(leaf: str, rng: np.random.Generator, *lead: int) -> np.ndarray:
    """Observations of a kind."""
    shape = (*lead, *LEAVES[leaf].shape)
    if LEAVES[leaf].dtype == "uint8":
        return rng.integers(256, size=shape, dtype=np.uint8)
    return rng.normal(size=shape).astype(np.float32)


def learner_of(
    name: str, net: NetConfig = MLP, aux: AuxConfig | None = None, leaf: str = "image", shake: float = 0.2,
    autoencoder: AutoencoderConfig | None = None, **changes: Any,
) -> Learner:  # fmt: skip
    """`aux`: none by default, like the auto-encoder."""
    config = dataclasses.replace(
        CONFIGS[name], aux=aux or AuxConfig(), autoencoder=autoencoder or AutoencoderConfig(), **changes
    )
    learner = Learner(KINDS[name](config, net, spec_of(leaf), B), seed=5)
    shaken(learner, shake)
    return learner


def lanes_of(env: str, count: int, net: NetConfig = MLP, **kwargs: Any) -> Lanes:
    return make(SimpleNamespace(env=env, env_kwargs=kwargs, atari=AtariConfig(), net=net), count)


def rig(kind: type[ActorCritic], config: Any, lanes: Lanes, net: NetConfig = MLP, seed: int = 7) -> Rig:
    """An actor, the table that the algorithm asks for, with its ring of replayed unrolls, and a learner."""
    algorithm = kind(config, net, lanes.spec, lanes.count)
    learner, plan = Learner(algorithm, seed), algorithm.plan()
    shapes = unroll_shapes(lanes.spec, plan, lanes.count, algorithm.initial_state(learner.nets, 1))
    table: Any = make_table(plan, shapes, lanes.spec, 1, seed, alone=True)
    actor = Actor(algorithm, learner.nets, lanes, seed)
    actor.reset()
    made: Any = algorithm
    return Rig(made, learner, [actor], [empty_unroll(shapes)], table)
