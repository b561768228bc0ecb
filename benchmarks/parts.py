"""The parts of a run measured alone: environment, forward pass, training. Prints one JSON line (seconds per step).

    parts.py RECIPE FLAGS…

The bound assumes that environments and forward passes use every core perfectly, and that training runs as it does
alone, with all threads; where actors run ahead, with one thread beside them.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
import torch

from rookery.algorithms.registry import build_algorithm
from rookery.cli.configure import config_for
from rookery.core.reduce import ALONE
from rookery.core.types import Delivery, Explore
from rookery.envs.check import random_actions
from rookery.envs.make import make
from rookery.processes.threads import Threads, available_cores
from rookery.roles.learner import Learner
from rookery.roles.producer import Producer, empty_arrays, handover_shapes
from rookery.tables.memory import ReplayMemory
from rookery.tables.queue import RoundQueue


def seconds_per_call(fn, at_least: float = 3.0) -> float:
    """The lower quartile: a bound is what the machine does when nothing disturbs it."""
    fn()
    times, started = [], time.perf_counter()
    while time.perf_counter() - started < at_least:
        before = time.perf_counter()
        fn()
        times.append(time.perf_counter() - before)
    return sorted(times)[len(times) // 4]


config = config_for(sys.argv[1], sys.argv[2:], "parts")
cores = available_cores()
lanes = make(config, config.envs_per_actor)
rng = np.random.default_rng(0)
lanes.reset(list(range(lanes.count)))
actions = np.stack([random_actions(lanes.spec, lanes.count, rng) for _ in range(512)])
step = iter(range(10**9))
env = seconds_per_call(lambda: lanes.step(actions[next(step) % 512])) / lanes.count

algorithm = build_algorithm(config, lanes.spec)
learner = Learner(algorithm, 1)
torch.set_num_threads(1)
obs = {name: torch.from_numpy(value.copy()) for name, value in lanes.reset(list(range(lanes.count))).items()}
explore = Explore(torch.Generator().manual_seed(0), np.arange(lanes.count))
with torch.inference_mode():
    forward = seconds_per_call(lambda: algorithm.act(learner.nets, obs, {}, explore)) / lanes.count

threads = Threads(config)
threads.fit(algorithm.work(learner.nets))
# Actors and learner take turns (with a replay memory, as the bound has it); otherwise they share the cores.
together = algorithm.plan().table.builds_items or algorithm.plan().table.in_turns
threads.share(together)
producers = [Producer(algorithm, learner.nets, lanes, 1, index) for index in range(config.actors)]
shapes = handover_shapes(lanes.spec, algorithm.plan(), lanes.count, {})


def ppo_update() -> float:
    """Seconds of training per environment step: every step is trained on once an epoch."""
    table = RoundQueue(config.actors)
    for producer in producers:
        producer.begin(0, "0")
        arrays = empty_arrays(shapes)
        report = producer.fill(arrays, 0)
        table.ordered(producer.index, 0)
        table.insert(Delivery(producer.index, 0, arrays, report, lambda: None))
    sample = table.next(0, 0.0)
    assert sample is not None
    prepared = algorithm.prepare(learner.nets, sample.batch, ALONE)
    minibatch = next(iter(algorithm.minibatches(prepared, explore.rng, ALONE)))
    threads.learning()

    def train() -> None:
        learner.gradients(minibatch)
        learner.apply()

    prepare = 0.0 if together else seconds_per_call(lambda: algorithm.prepare(learner.nets, sample.batch, ALONE))
    rows = prepare / sample.batch.logp.numel()
    return rows + seconds_per_call(train) / minibatch.logp.shape[0] * config.algo.epochs


def replay_update() -> float:
    """Seconds of training per environment step: an update on a batch follows every batch / samples_per_insert steps."""
    plan = algorithm.plan().table
    table = ReplayMemory(plan, shapes, lanes.spec, config.actors, 1)
    arrays = empty_arrays(shapes)
    producers[0].begin(0, "0")
    while not table.can_sample():
        producers[0].fill(arrays, 0)
        table.insert(arrays, 0)
    batch = table.sample().batch
    threads.learning()
    updates = plan.memory.samples_per_insert / plan.memory.batch  # per step
    return seconds_per_call(lambda: learner.step(batch, 0.0, tell=False)) * updates


learn = replay_update() if algorithm.plan().table.builds_items else ppo_update()
parallel = 1 if config.topology == "serial" else min(cores, config.actors)
bound = 1 / ((env + forward) / parallel + learn) if together else min(1 / learn, cores / (env + forward + learn))
print(json.dumps({"env": env, "forward": forward, "training": learn, "bound": bound}))
