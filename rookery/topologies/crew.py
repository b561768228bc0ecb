"""The actor processes of one machine: started, ordered, watched, replaced, and always ended.

Every wait has a deadline. A worker that fails says why in its own words; one that dies or hangs is described. Either
way its half-filled slot is dropped and counted, and a replacement with the next incarnation number takes its place.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

from rookery.actor import ActorReport, as_unroll, live_steps
from rookery.config import RunConfig
from rookery.errors import EnvError, RookeryError, StorageError, UsageError
from rookery.pipes import channel as channels
from rookery.pipes.channel import ChannelClosed, ChannelTimeout, pack_tree, unpack_tree
from rookery.pipes.shm import Pulse, Segment, Slots, WeightBoard
from rookery.producer import Shapes
from rookery.registry import encode_config
from rookery.topologies.job import Job
from rookery.topologies.signals import Signals
from rookery.topologies.supervise import Deadline, Restarts, Worker, stop_all
from rookery.types import EnvSpec

MODULE = "rookery.topologies.local_actor"
POLL = 0.2  # seconds between two looks at heartbeats
STOP = 3.0  # seconds for the workers to end when asked to


class Crew:
    def __init__(
        self, config: RunConfig, folder: Path, signals: Signals, module: str = MODULE, report: Any = ActorReport
    ):
        self._module, self._report_type = module, report
        self.config, self.limits, self.signals = config, config.supervisor, signals
        self._logs = folder / "logs"
        self._segments = {name: Segment.reserve(name) for name in ("slots", "weights", "pulse")}
        self._workers: list[Worker | None] = [None] * config.actors
        self._incarnation = [0] * config.actors
        self._early: list[tuple[int, str, str]] = []  # replaced before there was a journal: actor, reason, words
        self._restarts = [Restarts(self.limits.restarts, self.limits.window) for _ in range(config.actors)]
        self._deadlines = [Deadline(self.limits.step_deadline) for _ in range(config.actors)]
        self._busy: dict[int, deque[int]] = {}  # actor -> slots it was given; it is filling the first
        self._published: int | None = None  # version on the board
        self._last_order: dict[int, dict[str, Any]] = {}
        self._job: Job | None = None
        self._feed: Any = None  # what must hear of a lost worker
        self._spec: EnvSpec | None = None

    def __enter__(self) -> Crew:
        self.signals.kill = self._kill
        try:
            for index in range(self.config.actors):
                self._spawn(index)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        stop_all([worker for worker in self._workers if worker is not None], STOP)
        for segment in self._segments.values():
            segment.close()

    def _kill(self) -> None:
        for worker in self._workers:
            if worker is not None:
                worker.kill()

    # Coming up

    def spec(self) -> EnvSpec:
        """What the environment looks like, as the workers say once they have made theirs."""
        for index in range(self.config.actors):
            self._until_up(index, self._await_ready)
        assert self._spec is not None
        return self._spec

    def open(self, job: Job, feed: Any, shapes: Shapes, count: int, floats: int | None = None) -> None:
        """Lay out the shared memory and let every worker reset its environments; `floats` of weights travel."""
        self._job, self._feed = job, feed
        for index, reason, told in self._early:
            job.journal.lost(0, reason, told)
            feed.lost(index, reason)  # it begins anew, also where others continue from a checkpoint
        layout = Slots.layout(shapes, count)
        sizes = {
            "slots": layout.size,
            "weights": WeightBoard.size(job.learner.published.size if floats is None else floats),
            "pulse": Pulse.size(self.config.actors),
        }
        for name, segment in self._segments.items():
            segment.allocate(sizes[name])
        self.slots = Slots(self._segments["slots"], layout)
        self._board = WeightBoard(self._segments["weights"])
        self._pulse = Pulse(self._segments["pulse"])
        self._free = list(range(count))
        self._memory = {f"{name}_size": size for name, size in sizes.items()} | {"layout": msgspec.to_builtins(layout)}
        for index in range(self.config.actors):
            self._send_memory(index)
        for index in range(self.config.actors):
            self._until_up(index, self._await_started)

    def _spawn(self, index: int) -> None:
        start = {
            "config": encode_config(self.config).decode(),
            "index": index,
            "incarnation": self._incarnation[index],
            "trust": [path.partition(":")[0] for path in (self.config.algorithm, self.config.net.module) if path],
        }
        fds = {name: segment.fd for name, segment in self._segments.items()}
        log = self._logs / f"actor-{index}.log"
        self._workers[index] = Worker.start(self._module, f"actor {index}", start, fds, log)

    def _send_memory(self, index: int) -> None:
        job = self._job
        assert job is not None
        resumed = job.snapshots and self._incarnation[index] == 0
        snapshot = pack_tree(job.snapshots[index]) if resumed else None
        self._send(index, self._memory | {"op": "memory", "sequence": job.sequences[index], "snapshot": snapshot})

    def _await_ready(self, index: int) -> None:
        message = self._recv(index, self.limits.start_deadline)
        spec = msgspec.convert(message["spec"], EnvSpec)
        if self._spec is not None and spec != self._spec:
            raise EnvError(f"actor {index} made another environment than its peers: {spec} instead of {self._spec}")
        self._spec = spec

    def _await_started(self, index: int) -> None:
        self._recv(index, self.limits.start_deadline)

    def _until_up(self, index: int, wait: Any) -> None:
        """Wait for a worker's word; if it fails instead, bring up a replacement."""
        try:
            wait(index)
        except EnvError as error:
            self._replace(index, error)

    def _replace(self, index: int, error: EnvError) -> None:
        """Put a new worker in the place of a failed one, or give up with the failed one's words."""
        steps = self._give_back(index)
        while True:
            delay = self._restarts[index].next(error)  # raises the error itself once there were too many
            told = f"{error} — replaced in {delay:.1f} s"
            if self._job is not None and self._feed is not None:
                self._job.journal.lost(steps, error.reason, told)
                self._feed.lost(index, error.reason)
            else:
                self._early.append((index, error.reason, told))
            steps = 0
            self._end(index)
            self._pause(delay)
            self._incarnation[index] += 1
            self._spawn(index)
            try:
                self._await_ready(index)
                if self._job is not None:
                    self._send_memory(index)
                    self._await_started(index)
                return
            except EnvError as again:
                error = again

    def _give_back(self, index: int) -> int:
        """Free the slots of a failed worker; returns the environment steps that are lost with the one it was filling.

        Where a slot takes finished items its rows are not in it: every row then counts as a step of each environment.
        """
        slots = self._busy.pop(index, None)
        if not slots:
            return 0
        rows, arrays = self.slots.rows(slots[0]), self.slots.arrays(slots[0])
        steps = live_steps(as_unroll(arrays), rows) if "logp" in arrays else rows * self.config.envs_per_actor
        for slot in slots:
            self.release(slot)
        return steps

    def _end(self, index: int) -> None:
        worker = self._workers[index]
        assert worker is not None
        worker.abort()
        worker.channel.close()

    def _pause(self, delay: float) -> None:
        """Wait before a replacement, unless the user wants to leave."""
        until = time.monotonic() + delay
        while (left := until - time.monotonic()) > 0 and self.signals.requested is None:
            channels.wait([], left, wake=self.signals.fileno())

    # At work

    def publish(self, vector: torch.Tensor, version: int) -> None:
        if version != self._published:
            self._board.publish(vector.numpy(), version)
            self._published = version

    def collect(self) -> Iterator[tuple[int, int, ActorReport]]:
        """One unroll of every actor, as they come: (actor, slot, report)."""
        for index in range(self.config.actors):
            self.order(index)
        while self._busy:
            yield from self.arrived(POLL)

    def arrived(self, timeout: float) -> Iterator[tuple[int, int, ActorReport]]:
        """What the actors have filled by now, waiting for the first at most that long: (actor, slot, report)."""
        ready = channels.wait([self._channel(index) for index in self._busy], timeout)
        for index in [i for i in self._busy if self._channel(i) in ready]:
            try:
                report = self._report(index)
            except EnvError as error:
                self._again(index, error)
                continue
            slot = self._busy[index].popleft()
            if self._busy[index]:
                self._deadlines[index].rearm()
            else:
                del self._busy[index]
            yield index, slot, report
        for index in self._overdue():
            self._again(index, self._hung(index))

    @property
    def busy(self) -> bool:
        return bool(self._busy)

    def orders(self, index: int) -> int:
        """Slots an actor was given and has not filled yet."""
        return len(self._busy.get(index, ()))

    def _report(self, index: int) -> ActorReport:
        """What a worker says of the slot it was given, if that slot holds what it says."""
        message, slot = self._recv(index, 1.0), self._busy[index][0]
        assert self._job is not None
        if not self.slots.valid(slot, index, self._incarnation[index], self._job.sequences[index]):
            raise EnvError(f"actor {index} announced a slot that is not whole: {self.slots.stamp(slot)}", "torn_slot")
        return msgspec.convert(message["report"], self._report_type)

    def order(self, index: int, **more: Any) -> None:
        """Have an actor fill one more slot; `more` is said to it along with the order."""
        slot = self._free.pop()
        if index not in self._busy:
            self._busy[index] = deque()
            self._pulse.beat(index)
            self._deadlines[index].rearm()
        self._busy[index].append(slot)
        try:
            self._last_order[index] = more
            self._send(index, {"op": "unroll", "slot": slot} | more)
        except EnvError as error:
            self._again(index, error)

    def _again(self, index: int, error: EnvError) -> None:
        """The unroll is lost; a replacement starts on the same one, unless the user wants to leave."""
        orders = self.orders(index)
        if self.signals.requested is None:
            self._replace(index, error)
            for _ in range(orders):
                self.order(index, **self._last_order[index])
        else:
            steps = self._give_back(index)
            assert self._job is not None and self._feed is not None
            self._job.journal.lost(steps, error.reason, str(error))
            self._feed.lost(index, error.reason)

    def release(self, slot: int) -> None:
        self.slots.release(slot, poison=self.config.debug)
        self._free.append(slot)

    def _overdue(self) -> list[int]:
        """Workers without a sign of life for too long; the user's wish to leave shortens our patience."""
        late = [index for index in self._busy if self._deadlines[index].expired(self._pulse.last(index))]
        if self.signals.requested is not None:
            late += [
                index for index in self._busy if self._pulse.age(index) > self.limits.grace / 3 and index not in late
            ]
        return late

    def snapshots(self) -> list[dict[str, Any] | None]:
        """The actors' states for a checkpoint; None where an environment cannot be restored."""
        states: list[dict[str, Any] | None] = []
        for index in range(self.config.actors):
            try:
                self._send(index, {"op": "snapshot"})
                state = self._recv(index, self.limits.step_deadline)["state"]
            except EnvError as error:
                if self.signals.requested is None:
                    self._replace(index, error)
                state = None
            states.append(None if state is None else unpack_tree(state))
        return states

    # Words to and from a worker

    def _channel(self, index: int) -> channels.Channel:
        worker = self._workers[index]
        assert worker is not None
        return worker.channel

    def _send(self, index: int, message: dict[str, Any]) -> None:
        try:
            self._channel(index).send(message, timeout=10.0)
        except (ChannelClosed, ChannelTimeout) as error:
            raise self._died(index) from error

    def _recv(self, index: int, timeout: float) -> dict[str, Any]:
        """The worker's next message; its failure, death or silence become an EnvError."""
        try:
            message = self._channel(index).recv(timeout=timeout)
        except ChannelClosed as error:
            raise self._died(index) from error
        except ChannelTimeout as error:
            raise self._hung(index) from error
        if message["op"] == "failed":
            raise _as_error(message)
        return message

    def _died(self, index: int) -> EnvError:
        worker = self._workers[index]
        assert worker is not None
        try:  # its last words may still lie in the channel
            while True:
                message = worker.channel.recv(timeout=0.0)
                if message["op"] == "failed":
                    return _as_error(message)
        except (ChannelClosed, ChannelTimeout):
            pass
        where = self._where(index)
        return EnvError(f"actor {index} {worker.describe_exit()}{where}\n{worker.log_tail(20)}".rstrip(), "actor_died")

    def _hung(self, index: int) -> EnvError:
        worker = self._workers[index]
        assert worker is not None
        worker.abort()  # leaves the stack of the stuck process in its log
        where, limit = self._where(index), self.limits.step_deadline
        return EnvError(
            f"environment {self.config.env} hung: actor {index} gave no sign of life for {limit:g} s{where}; the stack "
            f"of the stuck process is in its log\n{worker.log_tail(30)}".rstrip(),
            "actor_hung",
        )

    def _where(self, index: int) -> str:
        slots = self._busy.get(index)
        if not slots:
            return f" while starting environment {self.config.env}"
        sequence = self._job.sequences[index] if self._job else 0
        return f" in environment {self.config.env}, unroll {sequence}, row {self.slots.rows(slots[0])} of it"


def _as_error(message: dict[str, Any]) -> RookeryError:
    """A worker's failure as the error it was over there."""
    kind = {2: UsageError, 7: StorageError}.get(message["exit_code"])
    if kind is not None:
        return kind(message["error"])
    text = message["error"] if message["exit_code"] == 3 else message["traceback"]
    return EnvError(text, message.get("reason") or "actor_failed")
