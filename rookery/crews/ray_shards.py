"""Parts of a replay memory as Ray actors, on the learner's node as long as there is room: handles as `tables/shard.py`
has them, and what starts, watches and replaces them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from rookery.core.config import RunConfig
from rookery.core.errors import LearnerError, RookeryError, UsageError
from rookery.core.machine import amount
from rookery.core.types import Failure
from rookery.crews.ray import Resident, add_paths, own_paths, remote_actor, versions
from rookery.pipes.ray_store import LIFE, WATCH, WORK, reason
from rookery.processes.child import failure_message
from rookery.processes.failure import Lost, told
from rookery.processes.signals import Signals, Stopped
from rookery.processes.worker import Restarts
from rookery.roles.shard import ShardSetup
from rookery.tables.shard import Answer, ShardLost

GROUPS = {WORK: 1, WATCH: 1, LIFE: 1}
STEP = 0.02  # seconds between two looks at shards that start


class ShardHost(Resident):
    """The Ray actor of a shard. What it is asked is carried out by one thread, in order."""

    def __init__(self, setup: dict[str, Any], sys_path: list[str]):
        super().__init__()
        self._setup, self._sys_path = setup, sys_path
        self._shard: Any = None

    def ask(self, op: str, *args: Any) -> Any:
        """The answer of the shard; or a message as workers send it when they fail."""
        try:
            if op == "start":
                return self._start()
            return getattr(self._shard, op)(*args)
        except BaseException as error:
            return failure_message(error)

    def _start(self) -> dict[str, Any]:
        add_paths(self._sys_path)
        import torch

        from rookery.storage.saved_shard import SavedShard

        torch.set_num_threads(1)
        self._shard = SavedShard(self._setup)
        return {}


class RayShard:
    """One shard after the other, in one place of the memory."""

    def __init__(self, setup: ShardSetup, config: RunConfig, failed: Callable[[Failure], None]):
        limits = config.supervisor
        self.life, self.index = 0, setup.index
        self._setup, self._cpus, self._failed = setup, config.ray.cpus_per_shard, failed
        self._restarts = Restarts(limits.restarts, limits.window)
        self._lock = threading.Lock()
        self._actor: Any = None
        self._up = False
        self._gone = ""  # why the shard was lost, until that is reported
        self._error: RookeryError | None = None  # that ends the run
        self._start_at: float | None = 0.0  # when one is to be started

    @property
    def up(self) -> bool:
        return self._up

    @property
    def need(self) -> str:
        return f"{self._cpus:g} CPUs and {amount(self._setup.bytes_needed)} of memory on one node"

    def look(self) -> None:
        if self._error is not None:
            raise self._error
        if self._gone:
            self._report()
        if self._start_at is not None and time.monotonic() >= self._start_at:
            self._start_at = None
            self._start()

    def ask(self, op: str, *args: Any) -> Future[Answer]:
        own: Future[Answer] = Future()
        if not self._up:
            own.set_exception(ShardLost(f"shard {self.index} is not there"))
            return own
        self._call(WORK, self._actor.ask, op, *args).add_done_callback(lambda answer: self._pass_on(answer, own))
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

        here = ray.get_runtime_context().get_node_id()
        near = NodeAffinitySchedulingStrategy(here, soft=True, _spill_on_unavailable=True)
        setup, life = self._setup, self.life
        self._actor = remote_actor(
            ShardHost, self._cpus, near, GROUPS, setup.builtins(), own_paths(), memory=setup.bytes_needed
        )
        self._call(LIFE, self._actor.life).add_done_callback(lambda end: self._lose(life, _why(end)))
        self._call(WATCH, self._actor.about).add_done_callback(self._placed)
        self._call(WORK, self._actor.ask, "start").add_done_callback(lambda started: self._started(life, started))

    @staticmethod
    def _call(group: str, method: Any, *args: Any) -> Future:
        return method.options(concurrency_group=group).remote(*args).future()

    def _report(self) -> None:
        """A loss, to the user; its successor starts after a delay. Raises the error if there were too many."""
        error = LearnerError(f"shard {self.index} of the replay memory {self._gone}")
        self._gone = ""
        delay = self._restarts.next(error)
        self._start_at = time.monotonic() + delay
        message = f"{error}; its items are lost — replaced in {delay:.1f} s"
        self._failed(Failure(-1, 0, "shard", message, replaced=True))

    # On threads of Ray's

    def _placed(self, about: Future) -> None:
        if about.exception() is None:
            where, own = about.result(), versions()
            if where["versions"] != own:
                other = f"node {where['node']} has {where['versions']}, and this one has {own}"
                self._error = UsageError(f"{other}: install the same on all nodes")

    def _started(self, life: int, started: Future) -> None:
        if started.exception() is not None:
            return  # its end is told by the call that lasts as long as itself
        message = started.result()
        if message:
            self._error = _failure(message)
            return
        with self._lock:
            self._up = life == self.life
        self._restarts.worked()

    def _pass_on(self, answer: Future, own: Future[Answer]) -> None:
        error = answer.exception()
        if error is not None:
            own.set_exception(ShardLost(reason(error)))
        elif isinstance(answer.result(), Answer):
            own.set_result(answer.result())
        else:
            own.set_exception(_failure(answer.result()))

    def _lose(self, life: int, why: str) -> None:
        with self._lock:
            if life == self.life:
                self.life, self._up, self._gone = life + 1, False, why


def _why(end: Future) -> str:
    error = end.exception()
    return "has ended" if error is None else f"is gone: {reason(error)}"


def _failure(message: dict[str, Any]) -> RookeryError:
    error = told(message)
    return LearnerError(str(error.error())) if isinstance(error, Lost) else error


class RayShards:
    """All shards of a memory. Context manager: starts them, and ends them whatever happens."""

    def __init__(
        self, config: RunConfig, setups: list[ShardSetup], failed: Callable[[Failure], None], signals: Signals
    ):
        self._deadline, self._signals = config.supervisor.start_deadline, signals
        self.handles = [RayShard(setup, config, failed) for setup in setups]

    def __enter__(self) -> RayShards:
        until = time.monotonic() + self._deadline
        try:
            while missing := [shard for shard in self.handles if not shard.up]:
                for shard in missing:
                    shard.look()
                if self._signals.requested is not None:
                    raise Stopped(self._signals.requested)
                if time.monotonic() > until:
                    raise LearnerError(
                        f"{len(missing)} of {len(self.handles)} shards of the replay memory did not start in "
                        f"{self._deadline:g} s: each needs {missing[0].need}"
                    )
                time.sleep(STEP)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for shard in self.handles:
            shard.close()
