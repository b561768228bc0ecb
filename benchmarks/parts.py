"""The parts of a PPO run measured alone: environment, forward pass, training. Prints one JSON line (seconds per step).

The bound assumes that environments and forward passes use every core perfectly, and that training runs as it does
alone, with all threads.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
import torch

from rookery.actor import Actor, empty_unroll, unroll_shapes
from rookery.cli.configure import config_for
from rookery.envs.make import make
from rookery.learner import Learner
from rookery.registry import build_algorithm
from rookery.replay.table import QueueTable
from rookery.topologies.threads import Threads, available_cores


def seconds_per_call(fn, at_least: float = 3.0) -> float:
    """The lower quartile: a bound is what the machine does when nothing disturbs it."""
    fn()
    times, started = [], time.perf_counter()
    while time.perf_counter() - started < at_least:
        before = time.perf_counter()
        fn()
        times.append(time.perf_counter() - before)
    return sorted(times)[len(times) // 4]


config = config_for("ppo", sys.argv[1:], "parts")
cores = available_cores()
lanes = make(config, config.envs_per_actor)
rng = np.random.default_rng(0)
lanes.reset(list(range(lanes.count)))
actions = rng.integers(0, lanes.spec.action.choices[0], (512, lanes.count))
step = iter(range(10**9))
env = seconds_per_call(lambda: lanes.step(actions[next(step) % 512])) / lanes.count

algorithm = build_algorithm(config, lanes.spec)
learner = Learner(algorithm, 1)
torch.set_num_threads(1)
obs = {name: torch.from_numpy(value.copy()) for name, value in lanes.reset(list(range(lanes.count))).items()}
generator = torch.Generator().manual_seed(0)
with torch.inference_mode():
    forward = seconds_per_call(lambda: algorithm.act(learner.nets, obs, {}, generator)) / lanes.count

shapes = unroll_shapes(lanes.spec, algorithm.plan(), lanes.count, {})
table = QueueTable(config.actors)
for index in range(config.actors):
    actor = Actor(algorithm, learner.nets, lanes, 1, index)
    actor.reset()
    unroll = empty_unroll(shapes)
    actor.unroll(unroll, 0)
    table.insert(unroll, index, 0)
batch = table.sample()
threads = Threads(config)
threads.fit(algorithm.work(learner.nets))
threads.learning()
prepared = algorithm.prepare(learner.nets, batch, lambda x: x)
minibatch = next(iter(algorithm.minibatches(prepared, generator)))


def train() -> None:
    learner.gradients(minibatch)
    learner.apply()


learn = seconds_per_call(train) / minibatch.logp.shape[0] * config.algo.epochs
parallel = 1 if config.topology == "serial" else min(cores, config.actors)
print(
    json.dumps({"env": env, "forward": forward, "training": learn, "bound": 1 / ((env + forward) / parallel + learn)})
)
