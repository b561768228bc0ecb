"""What `cluster_plan` plans with: what a recipe moves, by the shapes its actors hand over, and how fast it is here.

`work_of` reads the shapes; nothing is run. `measure` trains for a few seconds in this process and times the parts: the
actors take turns, so one core is what each of them has. Not here: the cost of a network, which is arithmetic.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch

from rookery.algorithms.registry import build_algorithm
from rookery.core.config import RunConfig
from rookery.core.errors import UsageError
from rookery.core.types import Circular, DataPlan, EnvSpec, Replay, Shapes
from rookery.crews.crew import Setup
from rookery.crews.inline import InlineCrew
from rookery.envs.lanes import Lanes
from rookery.envs.make import make
from rookery.processes.signals import Signals
from rookery.processes.threads import Threads
from rookery.roles.learner import Learner
from rookery.roles.producer import handover_shapes
from rookery.roles.weights import AllWeights
from rookery.run.cluster_plan import FLOAT_BYTES, Replayed, Work
from rookery.tables.factory import bytes_of, make_table
from rookery.tables.frames import frame_shape, image_leaves
from rookery.tables.memory import ReplayMemory
from rookery.tables.nstep import most_items as most_transitions
from rookery.tables.replay import AHEAD, PUBLISH
from rookery.tables.sequence import most_items as most_sequences
from rookery.tables.table import Table

ACTORS = 8  # at most, while measuring
ITEMS = 4096  # of the replay memory, while measuring
APPLIED = 20  # gradients
UPDATES = 3  # at least; the first one is not timed
PATIENCE = 60.0  # seconds, after which two are enough


@dataclass(frozen=True)
class Measured:
    actor_steps_per_s: float
    learner_s: float
    draws_per_s: float  # 0: there is no memory


def work_of(config: RunConfig, spec: EnvSpec) -> Work:
    algorithm = build_algorithm(config, spec)
    learner = Learner(algorithm, config.seed)
    plan, lanes = algorithm.plan(), config.envs_per_actor
    shapes = handover_shapes(spec, plan, lanes, algorithm.initial_state(learner.nets, 1))
    work = Work(
        recipe=config.recipe, env=config.env, what="unrolls", steps=plan.unroll * lanes, bytes=bytes_of(shapes),
        floats=learner.published.size, batch_steps=0.0, in_turns=plan.table.in_turns,
    )  # fmt: skip
    if config.gradients.by_workers:
        return _gradients(work, config, plan, learner)
    if isinstance(plan.table, Replay):
        return _items(work, plan, shapes, spec, lanes)
    return _unrolls(work, config, plan)


def _gradients(work: Work, config: RunConfig, plan: DataPlan, learner: Learner) -> Work:
    weights, steps, memory = AllWeights(learner), float(work.steps), getattr(config.algo, "replay", None)
    if isinstance(plan.table, Replay) and memory is not None and memory.samples_per_insert:
        steps = memory.batch / memory.samples_per_insert
    size = FLOAT_BYTES * weights.gradients
    return dataclasses.replace(
        work, what="gradients", steps=max(1, round(steps)), bytes=size, floats=weights.size,
        batch_steps=steps, in_turns=False,
    )  # fmt: skip


def _unrolls(work: Work, config: RunConfig, plan: DataPlan) -> Work:
    table: Any = plan.table
    queue = getattr(table, "queue", table)
    batch, lag = queue.batch or config.actors, queue.max_lag
    return dataclasses.replace(
        work, batch_steps=float(batch * work.steps), uses=table.uses if isinstance(table, Circular) else 1,
        ahead=1 + math.ceil((lag + 1) * batch / config.actors) if lag else 1,
    )  # fmt: skip


def _items(work: Work, plan: DataPlan, shapes: Shapes, spec: EnvSpec, lanes: int) -> Work:
    table: Any = plan.table
    memory, most = table.memory, _most_items(plan, lanes)
    per_step = 1.0 if not table.sequence else 1 / (table.sequence - table.overlap)
    images = image_leaves(spec)
    frames = {key: math.prod(frame_shape(leaf)) * np.dtype(leaf.dtype).itemsize for key, leaf in images.items()}
    stored = drawn = 0  # bytes of an item's columns, with numbers in the place of frames, and with the frames
    for path, (shape, dtype) in shapes.items():
        if path == "count" or path.startswith(("frames/", "first_frame/")):
            continue
        head, _, key = path.partition("/")
        count = math.prod(shape) // most
        stored += count * np.dtype(dtype).itemsize
        drawn += count * (frames[key] if head in ("obs", "next_obs") and key in frames else np.dtype(dtype).itemsize)
    items = work.steps * per_step
    replay = Replayed(
        memory_bytes=ReplayMemory.bytes_needed(table, shapes, spec), items_per_step=per_step, batch=memory.batch,
        samples_per_insert=memory.samples_per_insert, item_bytes=drawn,
    )  # fmt: skip
    draws_per_step = memory.samples_per_insert * per_step
    return dataclasses.replace(
        work, what="items", bytes=round(items * stored + work.steps * sum(frames.values())), replay=replay,
        batch_steps=memory.batch / draws_per_step if draws_per_step else 0.0,
        refresh=0 if work.in_turns else table.refresh, ahead=1 if work.in_turns else AHEAD,
        publish_s=0.0 if work.in_turns else PUBLISH,
    )  # fmt: skip


def _most_items(plan: DataPlan, lanes: int) -> int:
    table: Any = plan.table
    return most_sequences(plan, lanes) if table.sequence else most_transitions(plan, lanes)


# Measuring


def small(config: RunConfig) -> RunConfig:
    """The run that is timed: the same network and batch, few actors, and a memory that is soon full enough."""
    workers = config.gradients
    actors = 1 if workers.by_workers else min(config.actors, ACTORS)
    config = dataclasses.replace(
        config, topology="serial", ranks=1, actors=actors, target_return=None, fault_plan="",
        gradients=dataclasses.replace(workers, by_workers=False),
    )  # fmt: skip
    algo: Any = config.algo
    memory: Any = getattr(algo, "replay", None)
    if hasattr(memory, "min_size"):
        batch = memory.batch
        own = dataclasses.replace(
            memory, capacity=max(ITEMS, 4 * batch), min_size=min(memory.min_size, 2 * batch), slack=0.0, shards=1
        )
        algo = dataclasses.replace(algo, replay=own)
    queue: Any = getattr(algo, "queue", None)
    if hasattr(queue, "lag"):
        algo = dataclasses.replace(algo, queue=dataclasses.replace(queue, loaders=0))
    return dataclasses.replace(config, algo=algo)


class _OneCore(InlineCrew):
    """Its environments step in one thread, as those of an actor process do."""

    def _make(self) -> Lanes:
        return make(self.config, self.config.envs_per_actor, threads=1)


def spec_of(config: RunConfig) -> EnvSpec:
    """Makes one environment, in this process."""
    with _OneCore(dataclasses.replace(config, actors=1, envs_per_actor=1), Signals()) as crew:
        return crew.spec


def measure(config: RunConfig, seconds: float) -> Measured:
    """Train for about so many seconds with one core for acting, and time acting, updates and draws."""
    run = small(config)
    threads = Threads(run)
    try:
        with _OneCore(run, Signals()) as crew:
            learner = Learner(build_algorithm(run, crew.spec), run.seed, run.device, run.compile)
            threads.fit(learner.algorithm.work(learner.nets))
            found = _Clock(run, crew, learner, threads).run(seconds)
            if config.gradients.by_workers:
                return _worker(found, work_of(config, crew.spec), learner)
    finally:
        threads.restore()
    queue: Any = learner.algorithm.plan().table
    if isinstance(queue, Replay) or getattr(queue, "queue", queue).batch:
        return found
    return dataclasses.replace(found, learner_s=found.learner_s * config.actors / run.actors)  # a batch is theirs


def _worker(found: Measured, work: Work, learner: Learner) -> Measured:
    """A worker acts and computes the gradient; the learner applies it."""
    seconds = 1 / found.actor_steps_per_s + found.learner_s / work.batch_steps
    gradient = torch.zeros(AllWeights(learner).gradients)
    started = perf_counter()
    for _ in range(APPLIED):
        learner.accept(gradient, 0.0)
    return Measured(1 / seconds, (perf_counter() - started) / APPLIED, 0.0)


class _Clock:
    """The training loop in short, with a clock around its parts."""

    def __init__(self, run: RunConfig, crew: InlineCrew, learner: Learner, threads: Threads):
        self._run, self._crew, self._learner, self._threads = run, crew, learner, threads
        self._acted = self._acting = self._learning = self._drawing = 0.0
        self._updates = 0

    def run(self, seconds: float) -> Measured:
        learner, crew, run = self._learner, self._crew, self._run
        algorithm, spec = learner.algorithm, crew.spec
        plan = algorithm.plan()
        state = algorithm.initial_state(learner.nets, 1)
        shapes = handover_shapes(spec, plan, run.envs_per_actor, state)
        table = make_table(plan, shapes, spec, run.actors, run.seed, alone=True)
        setup = Setup(
            algorithm, shapes, learner.published.size, table.ahead, [0] * run.actors, [], lambda _: None, lambda _: None
        )
        crew.open(setup, learner, self._threads, table.rounds)
        began = perf_counter()
        while self._updates < UPDATES or perf_counter() - began < seconds:
            if self._updates > 1 and perf_counter() - began > PATIENCE:
                break
            if perf_counter() - began > 4 * PATIENCE:
                raise UsageError(
                    f"there was no second update in {4 * PATIENCE:g} s on this machine: give --actor-steps-per-s, "
                    "--learner-s and --draws-per-s yourself, or measure a smaller batch"
                )
            self._act(table)
            self._learn(table)
        table.close()
        updates = self._updates - 1
        batch = plan.table.memory.batch if isinstance(plan.table, Replay) else 0
        return Measured(
            self._acted / self._acting, self._learning / updates, batch * updates / max(1e-9, self._drawing)
        )

    def _act(self, table: Table) -> None:
        crew, learner = self._crew, self._learner
        for _ in range(len(crew.openings)):
            if not table.wants(crew.openings[0], True):
                crew.openings.rotate(-1)
                continue
            crew.publish(learner.published.read, learner.version)
            actor = crew.openings.popleft()
            crew.order(actor, 0.0)
            table.ordered(actor, crew.version or 0)
        for delivery in crew.arrived(0.0):
            self._acted += delivery.report.steps
            self._acting += delivery.report.total_s
            table.insert(delivery)

    def _learn(self, table: Table) -> None:
        learner = self._learner
        self._threads.learning()
        while True:
            started = perf_counter()
            sample = table.next(learner.version, 0.0)
            if sample is None:
                return
            drawn = perf_counter()
            report = learner.step(sample.batch, 0.0, tell=False)
            priorities = None if report.priorities is None else report.priorities.detach().numpy()
            table.update(sample, priorities, learner.version)
            if self._updates:
                self._drawing += drawn - started
                self._learning += perf_counter() - drawn
            self._updates += 1
            if table.patience:
                return
