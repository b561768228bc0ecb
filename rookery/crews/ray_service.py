"""Ray actors that serve the learner: parts of a replay memory, and aggregators of batches, on its node while there is
room. `tables/service.py` says what a table sees of them; here is what starts, watches and replaces them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from rookery.core.config import RunConfig
from rookery.core.errors import LearnerError, RookeryError
from rookery.core.machine import amount
from rookery.core.types import Failure
from rookery.crews.ray import Resident, add_paths, check_versions, own_paths, remote_actor, versions
from rookery.pipes.ray_store import LIFE, WATCH, WORK, reason
from rookery.processes.child import failure_message
from rookery.processes.failure import Lost, told
from rookery.processes.signals import Signals, Stopped
from rookery.processes.worker import Restarts
from rookery.tables.service import ArgumentLost, ServiceLost

GROUPS = {WORK: 1, WATCH: 1, LIFE: 1}
STEP = 0.02  # seconds between two looks at services that start


@dataclass(frozen=True)
class Wanted:
    """A service, and what it needs."""

    name: str  # for messages: "shard 1 of the replay memory"
    role: str  # see ROLES
    setup: Mapping[str, Any]  # what it is made from; plain values
    cpus: float
    memory: int = 0  # bytes
    cost: str = ""  # of its loss, for messages
    reason: str = "service"  # for the ledger

    @property
    def need(self) -> str:
        memory = f" and {amount(self.memory)} of memory" if self.memory else ""
        return f"{self.cpus:g} CPUs{memory} on one node"


def _shard(setup: Mapping[str, Any]) -> Any:
    from rookery.storage.saved_shard import SavedShard

    return SavedShard(setup)


def _aggregator(setup: Mapping[str, Any]) -> Any:
    from rookery.roles.aggregator import Aggregator

    return Aggregator(setup)


ROLES = {"shard": _shard, "aggregator": _aggregator}


class ServiceHost(Resident):
    """The Ray actor of a service. What it is asked is carried out by one thread, in order."""

    def __init__(self, role: str, setup: Mapping[str, Any], sys_path: list[str]):
        super().__init__()
        self._role, self._setup, self._sys_path = role, setup, sys_path
        self._target: Any = None

    def ask(self, op: str, *args: Any) -> tuple[bool, Any]:
        """Whether it succeeded, and the answer; or a message as workers send it when they fail."""
        try:
            if op == "start":
                self._start(*args)
                return True, None
            return True, getattr(self._target, op)(*args)
        except BaseException as error:
            return False, failure_message(error)

    def _start(self, drivers: dict[str, str]) -> None:
        add_paths(self._sys_path)
        check_versions(drivers)
        import torch

        torch.set_num_threads(1)
        self._target = ROLES[self._role](self._setup)


class RayService:
    """One service after the other, in one place."""

    def __init__(self, wanted: Wanted, config: RunConfig, failed: Callable[[Failure], None]):
        limits = config.supervisor
        self.wanted, self.life = wanted, 0
        self._failed, self._restarts = failed, Restarts(limits.restarts, limits.window)
        self._lock = threading.Lock()
        self._actor: Any = None
        self.where: dict[str, Any] = {}  # what it says of itself, once it runs
        self._up = False
        self._gone = ""  # why it was lost, until that is reported
        self._error: RookeryError | None = None  # that ends the run
        self._start_at: float | None = 0.0  # when one is to be started

    @property
    def up(self) -> bool:
        return self._up

    def look(self) -> None:
        if self._error is not None:
            raise self._error
        if self._gone:
            self._report()
        if self._start_at is not None and time.monotonic() >= self._start_at:
            self._start_at = None
            self._start()

    def ask(self, op: str, *args: Any) -> Future[Any]:
        own: Future[Any] = Future()
        if not self._up:
            own.set_exception(ServiceLost(f"{self.wanted.name} is not there"))
            return own
        self._call(WORK, self._actor.ask, op, *args).add_done_callback(lambda answer: _pass_on(answer, own))
        return own

    def kill(self, why: str) -> None:
        import ray

        self._lose(self.life, f"was ended: {why}")
        with contextlib.suppress(Exception):  # it is gone, or the cluster is
            ray.kill(self._actor)

    def close(self) -> None:
        self._start_at = None
        if self._actor is not None:
            self.kill("the run is over")

    def _start(self) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        wanted, life, here = self.wanted, self.life, ray.get_runtime_context().get_node_id()
        near = NodeAffinitySchedulingStrategy(here, soft=True, _spill_on_unavailable=True)
        args = wanted.role, dict(wanted.setup), own_paths()
        self._actor = remote_actor(ServiceHost, wanted.cpus, near, GROUPS, *args, memory=wanted.memory)
        self._call(LIFE, self._actor.life).add_done_callback(lambda end: self._lose(life, _why(end)))
        self._call(WATCH, self._actor.about).add_done_callback(self._placed)
        started = self._call(WORK, self._actor.ask, "start", versions())
        started.add_done_callback(lambda answer: self._started(life, answer))

    @staticmethod
    def _call(group: str, method: Any, *args: Any) -> Future:
        return method.options(concurrency_group=group).remote(*args).future()

    def _report(self) -> None:
        """A loss, to the user; its successor starts after a delay. Raises the error if there were too many."""
        error = LearnerError(f"{self.wanted.name} {self._gone}")
        self._gone = ""
        delay = self._restarts.next(error)
        self._start_at = time.monotonic() + delay
        message = f"{error}{self.wanted.cost} — replaced in {delay:.1f} s"
        self._failed(Failure(-1, 0, self.wanted.reason, message, replaced=True))

    # On threads of Ray's

    def _placed(self, about: Future) -> None:
        if about.exception() is None:
            self.where = about.result()

    def _started(self, life: int, started: Future) -> None:
        if started.exception() is not None:
            return  # its end is told by the call that lasts as long as itself
        done, answer = started.result()
        if not done:
            self._error = _failure(answer)
            return
        with self._lock:
            self._up = life == self.life
        self._restarts.worked()

    def _lose(self, life: int, why: str) -> None:
        with self._lock:
            if life == self.life:
                self.life, self._up, self._gone = life + 1, False, why


def _pass_on(answer: Future, own: Future[Any]) -> None:
    error = answer.exception()
    if error is not None:
        own.set_exception(_kind_of(error)(reason(error)))
        return
    done, value = answer.result()
    if done:
        own.set_result(value)
    else:
        own.set_exception(_failure(value))


def _kind_of(error: BaseException) -> type[ServiceLost]:
    from ray.exceptions import ObjectLostError, RayTaskError

    cause = error.cause if isinstance(error, RayTaskError) else error
    return ArgumentLost if isinstance(cause, ObjectLostError) else ServiceLost


def _why(end: Future) -> str:
    error = end.exception()
    return "has ended" if error is None else f"is gone: {reason(error)}"


def _failure(message: dict[str, Any]) -> RookeryError:
    error = told(message)
    return LearnerError(str(error.error())) if isinstance(error, Lost) else error


class RayServices:
    """Several of them. Context manager: starts them, waits until they are up, and ends them whatever happens."""

    def __init__(
        self, config: RunConfig, wanted: list[Wanted], failed: Callable[[Failure], None], signals: Signals
    ):  # fmt: skip
        self._deadline, self._signals = config.supervisor.start_deadline, signals
        self.services = [RayService(each, config, failed) for each in wanted]

    def __enter__(self) -> list[RayService]:
        until = time.monotonic() + self._deadline
        try:
            while missing := [service for service in self.services if not service.up]:
                for service in missing:
                    service.look()
                if self._signals.requested is not None:
                    raise Stopped(self._signals.requested)
                if time.monotonic() > until:
                    names = ", ".join(service.wanted.name for service in missing)
                    raise LearnerError(
                        f"not started in {self._deadline:g} s: {names}; each needs {missing[0].wanted.need}"
                    )
                time.sleep(STEP)
        except BaseException:
            self.__exit__()
            raise
        return self.services

    def __exit__(self, *error: object) -> None:
        for service in self.services:
            service.close()
