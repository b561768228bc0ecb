"""A2C, IMPALA, asynchronous PPO and IMPACT learn small tasks in seconds, through the tables that their plans ask for.

Two actors take turns with the learner in one process. Where the plan lets actors run ahead they do, so that the
asynchronous algorithms learn from older policies here too.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from support_lanes import GuessLanes, delivered

from rookery.algorithms.a2c import A2C, A2CConfig
from rookery.algorithms.appo import APPO, APPOConfig, CircularConfig
from rookery.algorithms.impala import IMPALA, IMPALAConfig
from rookery.core.config import NetConfig, QueueConfig
from rookery.core.unroll import empty_unroll, unroll_shapes
from rookery.roles.actor import Actor
from rookery.roles.learner import Learner
from rookery.tables.factory import make_table

ACTORS, COUNT, SEED = 2, 8, 2
FAST = {"lr": 2e-2, "optimizer": "adam", "optimizer_eps": 1e-5, "max_grad_norm": 0.5, "entropy": 0.0, "unroll": 16}
QUEUE = QueueConfig(lag=1, loaders=0)
CIRCULAR = CircularConfig(batches=4, uses=2)
ALGORITHMS = {
    "a2c": (A2C, A2CConfig(**FAST)),
    "impala": (IMPALA, IMPALAConfig(**FAST, queue=QUEUE)),
    "impala-replay": (IMPALA, IMPALAConfig(**FAST, queue=dataclasses.replace(QUEUE, replayed=1.0, ring=8))),
    "appo": (APPO, APPOConfig(**FAST, queue=QUEUE, chunk=8, epochs=2, minibatches=2)),
    "appo-gae": (APPO, APPOConfig(**FAST, queue=QUEUE, chunk=8, epochs=2, minibatches=2, correction="gae")),
    "impact": (APPO, APPOConfig(**FAST, queue=QUEUE, chunk=8, circular=CIRCULAR, target_period=4)),
}


class Learnt(NamedTuple):
    first: float  # mean reward per step of the first unrolls
    last: float  # the worst of the last ones
    lag: int  # age of the oldest data that was trained on, in updates
    learner: Learner


def learnt(
    name: str, task: str, net: NetConfig, updates: int, enough: float, length: int = 5, **changes: Any
) -> Learnt:
    """Until three rounds of unrolls in a row were good enough, or `updates` are over."""
    kind, config = ALGORITHMS[name]
    lanes = [GuessLanes(task, count=COUNT, length=length) for _ in range(ACTORS)]
    spec = lanes[0].spec
    algorithm = kind(dataclasses.replace(config, **changes), net, spec, ACTORS * COUNT)
    learner, plan = Learner(algorithm, SEED), algorithm.plan()
    actors = [Actor(algorithm, learner.nets, each, SEED, index) for index, each in enumerate(lanes)]
    shapes = unroll_shapes(spec, plan, COUNT, algorithm.initial_state(learner.nets, 1))
    table = make_table(plan, shapes, spec, ACTORS, SEED, alone=True)
    for actor in actors:
        actor.reset()
    rounds, lag = [], 0
    while learner.version < updates:
        while all(table.wants(actor.index, True) for actor in actors):
            reward = steps = 0.0
            for actor in actors:
                unroll, sequence = empty_unroll(shapes), actor.sequence
                report = actor.unroll(unroll, learner.version)
                table.ordered(actor.index, learner.version)
                table.insert(delivered(actor.index, sequence, unroll, report))
                reward, steps = reward + float(unroll.reward.sum()), steps + report.steps
            rounds.append(reward / steps)
        if len(rounds) > 3 and min(rounds[-3:]) > enough:
            break
        sample = table.next(learner.version, 0.0)
        assert sample is not None
        lag = max(lag, learner.version - int(sample.versions.min()))
        learner.step(sample.batch, learner.version / updates, tell=False)
        table.update(sample, None, learner.version)
    return Learnt(rounds[0], min(rounds[-3:]), lag, learner)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_learns_to_name_what_it_sees(name):
    found = learnt(name, "symbol", NetConfig(hidden=(16,)), updates=80, enough=0.95)
    assert found.first < 0.6 and found.last > 0.95, found
    assert (found.lag == 0) if name == "a2c" else (found.lag >= 1), found


@pytest.mark.parametrize("name", ["a2c", "impala", "appo", "impact"])
def test_learns_to_be_where_it_should(name):
    net = NetConfig(hidden=(16,), log_std=-0.5)
    found = learnt(name, "target", net, updates=150, enough=-0.07, gamma=0.0)
    assert found.first < -0.4 and found.last > -0.07, found
    obs = torch.linspace(-0.7, 0.7, 5).unsqueeze(1)
    with torch.no_grad():
        action = torch.as_tensor(found.learner.algorithm.act(found.learner.nets, {"obs": obs}, {}, None).action)
    assert (action - obs).abs().max() < 0.3, "greedy: the observation itself"


@pytest.mark.parametrize(
    ("name", "core"), [("a2c", "gru"), ("impala", "lstm"), ("appo", "gru"), ("appo", "lstm"), ("impact", "gru")]
)
def test_remembers_a_cue_with_a_core(name, core):
    net = NetConfig(hidden=(16,), core=core, core_size=16)
    found = learnt(name, "cue", net, updates=250, enough=0.8 / 3, length=3, gamma=0.95)
    assert 3 * found.last > 0.8, "per episode; a third without memory"
