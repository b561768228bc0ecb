"""Actors that are objects in the learner's own process: deterministic, and easy to debug.

Each has its own environments, and acts when its turn comes. If its environments fail they are recreated. Where actors
may run ahead of the learner (a table with lag k), what they have filled arrives in the order of its versions, and
within one version in a random order that the seed decides: all data is k versions old, and even such a run repeats bit
for bit.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

import torch

from rookery.core.config import RunConfig
from rookery.core.errors import EnvError
from rookery.core.seeding import seed_of
from rookery.core.types import Arrays, Delivery, EnvSpec, Failure
from rookery.crews.crew import Setup, States
from rookery.envs.lanes import Lanes
from rookery.envs.make import make
from rookery.nets.modules import Nets
from rookery.processes.faults import FaultPlan, InjectedFault
from rookery.processes.orphans import MarkedHere
from rookery.processes.signals import Signals
from rookery.processes.threads import Threads, available_cores
from rookery.processes.worker import Restarts
from rookery.roles.actor import CUT
from rookery.roles.learner import Learner
from rookery.roles.producer import Producer, empty_arrays
from rookery.roles.weights import Published


class InlineCrew:
    """Context manager: makes the environments, and closes them, with everything that they have started."""

    parallel = 1

    cut: Callable[[], bool] | None = None

    def __init__(self, config: RunConfig, signals: Signals, first: int = 0):
        """`first`: the number of its first actor in the whole run; there are others before it on other ranks."""
        self.config, self._signals, self._first = config, signals, first
        self.marked = MarkedHere()  # what the environments start ends with them
        self.version: int | None = None
        self.openings: deque[int] = deque()
        self._lanes: list[Lanes] = []
        self._producers: list[Producer] = []
        limits = config.supervisor
        self._restarts = [Restarts(limits.restarts, limits.window) for _ in range(config.actors)]
        self._incarnation = [0] * config.actors
        self._plan = FaultPlan.parse(config.fault_plan)
        self._orders: deque[int] = deque()
        self._filled: list[Delivery] = []  # not arrived yet
        self._failed: dict[int, EnvError | InjectedFault] = {}  # actors that are not replaced yet
        self._void: list[int] = []  # their orders, which will not be filled
        self._chance = random.Random(seed_of(config.seed, "arrivals", *([first] if first else [])))

    def __enter__(self) -> InlineCrew:
        self.marked.__enter__()
        try:
            with self._signals.interruptible(self.config.supervisor.grace / 3):
                for _ in range(self.config.actors):
                    self._lanes.append(self._make())
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        try:
            for lanes in self._lanes:
                lanes.close()
        finally:
            self.marked.__exit__()
            self._producers = []  # each holds on to this crew, and the crew by way of its setup to the table

    def _make(self) -> Lanes:
        # Environments with threads of their own may use every core here; what they compute does not depend on it.
        return make(self.config, self.config.envs_per_actor, threads=available_cores())

    @property
    def spec(self) -> EnvSpec:
        return self._lanes[0].spec

    def open(self, setup: Setup, learner: Learner, threads: Threads, in_order: bool) -> None:
        """`in_order`: unrolls arrive in the order of the orders, and not in a random one."""
        self._setup, self._threads, self._in_order = setup, threads, in_order
        nets = self._nets(learner)
        self.sequences = list(setup.sequences)
        self._free = [empty_arrays(setup.shapes) for _ in range(self.config.actors * setup.ahead)]
        for index, lanes in enumerate(self._lanes):
            producer = Producer(setup.algorithm, nets, lanes, self.config.seed, self._first + index, setup.say)
            producer.recover = partial(self._recover, index)
            self._producers.append(producer)
        self._threads.acting()
        for producer in self._producers:
            self._begin(producer)
        self.openings.extend(list(range(self.config.actors)) * setup.ahead)

    def _nets(self, learner: Learner) -> Nets:
        """Those that act: the learner's own, or a copy if these live on another device."""
        self._mirror: Published | None = None
        if learner.device.type == "cpu":
            return learner.nets
        nets = learner.algorithm.nets()
        self._mirror = Published(learner.algorithm, nets)
        return nets

    def apart(self, learner: Learner) -> Learner:
        """The learner, whose updates may start processes that do not end with the environments: those of a compiler."""
        learner.step = self.marked.paused(learner.step)  # type: ignore[method-assign]  # of this one object
        return learner

    # At work

    @property
    def ordered(self) -> int:
        return len(self._orders) + len(self._filled) + len(self._void)

    @property
    def busy(self) -> bool:
        return self.ordered > 0

    def order(self, actor: int, progress: float) -> None:
        self._orders.append(actor)

    def publish(self, read: Callable[[], torch.Tensor], version: int) -> None:
        if self._mirror is not None:
            self._mirror.load(read())
        self.version = version

    def arrived(self, patience: float) -> Iterator[Delivery]:
        if self._orders:
            self._threads.acting()
        while self._orders:
            self._fill(self._orders.popleft())
            if self._in_order and self._filled:
                yield self._filled.pop()
        waiting = {delivery.actor for delivery in self._filled}
        for actor in [actor for actor in self._failed if actor not in waiting]:
            self._replace(actor)
        if self._filled:
            # The oldest weights first: what is trained on is as old as the table allows, and no older.
            oldest = min(_version(delivery) for delivery in self._filled)
            actor = self._chance.choice([each for each in self._filled if _version(each) == oldest]).actor
            first = next(i for i, delivery in enumerate(self._filled) if delivery.actor == actor)
            yield self._filled.pop(first)

    def _fill(self, actor: int) -> None:
        """What an actor that fails was to fill is ordered again, as it is of a process."""
        if actor in self._failed:
            self._void.append(actor)
            return
        producer, arrays = self._producers[actor], self._free.pop()
        try:
            report = producer.fill(arrays, self.version or 0, self._tick(producer))
        except (EnvError, InjectedFault) as error:
            self._free.append(arrays)
            self._void.append(actor)
            self._failed[actor] = error  # told when what it had filled before has arrived
            return
        self._restarts[actor].worked()
        self.sequences[actor] += 1
        release = partial(self._release, actor, arrays)
        self._filled.append(Delivery(actor, self.sequences[actor] - 1, arrays, report, release))

    def _replace(self, actor: int) -> None:
        """An actor that has failed: its orders are void, and there is room for others."""
        error, producer = self._failed.pop(actor), self._producers[actor]
        self.openings.extend(each for each in self._void if each == actor)
        self._void = [each for each in self._void if each != actor]
        self._fail(producer, error)
        self._begin(producer)

    def _release(self, actor: int, arrays: Arrays) -> None:
        self._free.append(arrays)
        self.openings.append(actor)

    def snapshots(self) -> States:
        return [producer.snapshot() for producer in self._producers]

    def finish(self) -> None:
        pass

    # Failures

    def _begin(self, producer: Producer) -> None:
        """Start its environments, on new ones if these fail."""
        while True:
            try:
                return self._start(producer)
            except (EnvError, InjectedFault) as error:
                self._fail(producer, error)

    def _fail(self, producer: Producer, cause: EnvError | InjectedFault) -> None:
        error = cause if isinstance(cause, EnvError) else EnvError(str(cause), "worker_error")
        self._wait_after(self._here(producer), error, "replaced", replaced=True)
        self._incarnation[self._here(producer)] += 1

    def _start(self, producer: Producer) -> None:
        index = self._here(producer)
        incarnation = self._incarnation[index]
        if incarnation:
            self._lanes[index].close()
            self._lanes[index] = producer.actor.lanes = self._make()
        state = self._setup.states[index] if self._setup.states and incarnation == 0 else None
        producer.begin(self.sequences[index], f"{self.sequences[index]}.{incarnation}", state)

    def _recover(self, index: int, error: EnvError) -> None:
        """Single environments of an actor failed and will be recreated."""
        self._wait_after(index, error, "recreated", replaced=False)

    def _wait_after(self, index: int, error: EnvError, what: str, replaced: bool) -> None:
        delay = self._restarts[index].next(error)  # raises the error itself once there were too many
        message = f"{what} in {delay:.1f} s: {error}"
        self._setup.failed(Failure(index, error.steps, error.reason, message, replaced))
        time.sleep(delay)

    def _here(self, producer: Producer) -> int:
        """Its number in this crew."""
        return producer.index - self._first

    def _tick(self, producer: Producer) -> Callable[[int], object] | None:
        """What is called before each row: faults on purpose, and the question whether to cut the unroll short."""
        plan, cut, actor = self._plan, self.cut, producer.actor
        if not plan and cut is None:
            return None
        before = actor.sequence * actor.plan.unroll
        least = self.config.group.preempt_after * (actor.plan.steps or actor.plan.unroll)
        incarnation = self._incarnation[self._here(producer)]

        def tick(row: int) -> object:
            if plan:
                plan.fire("actor", actor.index, before + row, actor.sequence, incarnation)
            return CUT if cut is not None and row >= least and cut() else None

        return tick


def _version(delivery: Delivery) -> int:
    return int(delivery.arrays["version"][0])
