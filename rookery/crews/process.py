"""The actors of one machine: what each of them fills, and what happens when one of them fails.

Their processes are the affair of `staff.py`. Every wait has a deadline. A worker that fails says why in its own words;
one that dies or hangs is described. Either way its half-filled slot is dropped and counted, and a replacement with the
next incarnation number takes its place. Neither the end of a worker nor the start of its replacement is waited for:
both go on whenever the crew is asked what has arrived.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

from rookery.core.config import RunConfig
from rookery.core.errors import CheckpointError, EnvError
from rookery.core.types import ActorReport, EnvSpec
from rookery.core.unroll import as_unroll, live_steps
from rookery.crews.arena import Arena
from rookery.crews.staff import Staff
from rookery.crews.waiting import Waiting, wait_for
from rookery.pipes import channel as channels
from rookery.pipes.channel import pack_tree, unpack_tree
from rookery.pipes.shm import Slots
from rookery.processes.failure import Lost
from rookery.processes.signals import Patience, Signals, Stopped
from rookery.processes.worker import Deadline, Restarts
from rookery.roles.producer import Shapes
from rookery.topologies.job import Job

MODULE = "rookery.crews.local_actor"
POLL = 0.2  # seconds between two looks at heartbeats


class Crew:
    def __init__(
        self, config: RunConfig, folder: Path, signals: Signals, module: str = MODULE, report: Any = ActorReport
    ):
        self._report_type = report
        self.config, self.limits, self.signals = config, config.supervisor, signals
        self._hurried = self.limits.grace / 3  # seconds for a worker to answer once a shutdown was requested
        self._arena = Arena()
        self.staff = Staff(config, folder / "logs", signals, module, self._arena.fds, self._where)
        self._early: list[tuple[int, str, str]] = []  # replaced before there was a journal: actor, reason, words
        self._restarts = [Restarts(self.limits.restarts, self.limits.window) for _ in range(config.actors)]
        self._deadlines = [Deadline(self.limits.step_deadline) for _ in range(config.actors)]
        self._up: set[int] = set()  # actors that have started, and not failed since as far as we know
        self._busy: dict[int, deque[int]] = {}  # actor -> slots it was given; it is filling the first
        self._coming: dict[int, Waiting[None]] = {}  # actors whose replacement is on its way
        self._ending: set[int] = set()  # those of them that have not ended yet; their slots are theirs until then
        self._published: int | None = None  # version on the board
        self._last_order: dict[int, dict[str, Any]] = {}
        self._finishing = False  # nobody is replaced any more
        self._complained = False  # about snapshots, to the user
        self._job: Job | None = None
        self._feed: Any = None  # what must hear of a lost worker
        self._spec: EnvSpec | None = None

    def __enter__(self) -> Crew:
        self.signals.kill = self.staff.kill
        try:
            for index in range(self.config.actors):
                self._spawn(index)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if not self._up:  # nobody has begun: one that still imports or makes environments does not hear a request
            self.staff.kill()
        self.staff.stop()
        self._arena.close()
        self._job = self._feed = None  # they hold on to us as we to them: a circle, and a replay memory in it

    # Coming up

    def spec(self) -> EnvSpec:
        """What the environment looks like, as the workers say once they have made theirs."""
        for index in range(self.config.actors):
            self._until_up(index, self._ready)
        assert self._spec is not None
        return self._spec

    def open(self, job: Job, feed: Any, shapes: Shapes, count: int, floats: int | None = None) -> None:
        """Lay out the shared memory and let every worker reset its environments; `floats` of weights travel."""
        self._job, self._feed = job, feed
        for index, reason, told in self._early:
            job.journal.lost(0, reason, told)
            feed.lost(index, reason)  # it begins anew, also where others continue from a checkpoint
        self._arena.open(shapes, count, job.learner.published.size if floats is None else floats, self.config.actors)
        for index in range(self.config.actors):
            self._send_memory(index)
        for index in range(self.config.actors):
            self._until_up(index, self._started)
        self.staff.spare.expect()

    def _spawn(self, index: int) -> None:
        self.staff.start(index)

    def _send_memory(self, index: int) -> None:
        job = self._job
        assert job is not None
        resumed = job.snapshots and self.staff.incarnation[index] == 0
        snapshot = pack_tree(job.snapshots[index]) if resumed else None
        message = self._arena.described | {"op": "memory", "sequence": job.sequences[index], "snapshot": snapshot}
        try:
            self.staff.tell(index, message)
        except ValueError as error:  # saved by a run of one process, which sends nothing
            raise CheckpointError(
                f"the state of actor {index} is too large to send ({error}): use --topology serial"
            ) from error

    def _ready(self, index: int) -> Waiting[None]:
        message = yield from self.staff.word(index, self._start_patience())
        spec = msgspec.convert(message["spec"], EnvSpec)
        if self._spec is not None and spec != self._spec:
            other = f"actor {index} made another environment than its peers: {spec} instead of {self._spec}"
            raise Lost.by(EnvError(other))
        self._spec = spec

    def _started(self, index: int) -> Waiting[None]:
        yield from self.staff.word(index, self._start_patience())
        self._up.add(index)

    def _start_patience(self) -> Patience:
        """Once shutdown is requested, nobody waits for a worker to start."""
        return Patience(self.signals, self.limits.start_deadline, 0.0)

    def _until_up(self, index: int, word: Callable[[int], Waiting[None]]) -> None:
        """Wait for a worker's word; if it fails instead, for a replacement."""
        try:
            wait_for(word(index), self.signals.fileno())
        except Lost as lost:
            if not wait_for(self._replacement(index, lost), self.signals.fileno()):
                raise Stopped(self.signals.requested or 0) from lost

    def _replacement(self, index: int, lost: Lost) -> Waiting[bool]:
        """Put a new worker in the place of a failed one, or give up with the failed one's words.

        Nobody is replaced for a run that ends, or after a request to shut down: False if that left the place empty.
        """
        error = yield from self._end(index, lost)  # first: what it still wrote would be read as its successor's
        steps = self._give_back(index)
        while not self._leaving:
            delay = self._restarts[index].next(error)  # raises the error itself once there were too many
            self._count(index, steps, error, f" — replaced in {delay:.1f} s")
            steps, until = 0, time.monotonic() + delay
            while (left := until - time.monotonic()) > 0 and not self._leaving:
                yield [], left
            if self._leaving:
                return False
            self.staff.incarnation[index] += 1
            self._spawn(index)
            try:
                yield from self._ready(index)
                if self._job is not None:
                    self._send_memory(index)
                    yield from self._started(index)
                return True
            except Lost as again:
                error = yield from self._end(index, again)
        self._count(index, steps, error)
        return False

    @property
    def _leaving(self) -> bool:
        return self._finishing or self.signals.requested is not None

    def _count(self, index: int, steps: int, error: EnvError, more: str = "") -> None:
        """Put a failure into the books."""
        if self._job is not None and self._feed is not None:
            self._job.journal.lost(steps, error.reason, f"{error}{more}")
            self._feed.lost(index, error.reason)
        else:
            self._early.append((index, error.reason, f"{error}{more}"))

    def _give_back(self, index: int) -> int:
        """Free the slots of a worker that has ended; returns the environment steps that are lost with them.

        Where a slot takes finished items its rows are not in it: every row then counts as a step of each environment.
        """
        steps = 0
        for slot in self._busy.pop(index, ()):
            rows, arrays = self.slots.rows(slot), self.slots.arrays(slot)
            steps += live_steps(as_unroll(arrays), rows) if "logp" in arrays else rows * self.config.envs_per_actor
            self.release(slot)
        return steps

    def _end(self, index: int, lost: Lost) -> Waiting[EnvError]:
        """Have a lost worker ended; what it came to, with the end of its log."""
        self._up.discard(index)
        self._ending.add(index)
        try:
            yield from self.staff.ended(index, lost.patience)
        finally:
            self._ending.discard(index)
        return lost.error()

    # At work

    @property
    def slots(self) -> Slots:
        return self._arena.slots

    def publish(self, vector: torch.Tensor, version: int) -> None:
        if version != self._published:
            self._arena.board.publish(vector.numpy(), version)
            self._published = version

    def collect(self) -> Iterator[tuple[int, int, ActorReport]]:
        """One unroll of every actor, as they come: (actor, slot, report)."""
        for index in range(self.config.actors):
            self.order(index)
        while self.busy:
            yield from self.arrived(POLL)

    def arrived(self, timeout: float, again: bool = True) -> Iterator[tuple[int, int, ActorReport]]:
        """What the actors have filled by now, waiting for the first at most that long: (actor, slot, report).

        What is lost with an actor its replacement is ordered `again`, or nobody is.
        """
        self.staff.look()
        pending = [self._go_on(index) for index in list(self._coming)]
        listening = [index for index in self._busy if index not in self._coming]
        awaited = [self.staff.channel(index) for index in listening] + [each for some, _ in pending for each in some]
        ready = channels.wait(awaited, min([timeout, *(seconds for _, seconds in pending)]))
        for index in [i for i in listening if self.staff.channel(i) in ready]:
            yield from self._take(index, again)
        for index in self._overdue():
            yield from self._take(index, again, self.staff.hung(index, self._arena.pulse.age(index)))

    def _take(self, index: int, again: bool, lost: Lost | None = None) -> Iterator[tuple[int, int, ActorReport]]:
        """Every unroll that an actor has announced, whole as they are; then the end it came to, if it came to one."""
        wanted = self.orders(index)  # not those that are ordered while we are at it
        while wanted and self.staff.channel(index).poll():
            try:
                report = self._report(index)
            except Lost as cause:
                lost = lost or cause
                break
            if report is None:
                continue
            wanted -= 1
            slot = self._busy[index].popleft()
            if self._busy[index]:
                self._expect(index)
            else:
                del self._busy[index]
            self._restarts[index].worked()
            yield index, slot, report
        if lost is not None:
            self._come_back(index, lost, self.orders(index) if again else 0)

    def _expect(self, index: int) -> None:
        """An actor has something to do from now on: what was before says nothing about its health."""
        self._arena.pulse.beat(index)
        self._deadlines[index].rearm()

    @property
    def busy(self) -> bool:
        """Whether anybody fills a slot, or will."""
        return bool(self._busy or self._coming)

    def orders(self, index: int) -> int:
        """Slots an actor was given and has not filled yet."""
        return len(self._busy.get(index, ()))

    def _report(self, index: int) -> ActorReport | None:
        """What a worker says of the slot it was given, if that slot holds what it says; None: it is not done yet."""
        message, slot = self.staff.read(index), self._busy[index][0]
        assert self._job is not None
        if message["op"] == "cut":
            self._cut(index, message)
            return None
        if not self.slots.valid(slot, index, self.staff.incarnation[index], self._job.sequences[index]):
            torn = f"actor {index} announced a slot that is not whole: {self.slots.stamp(slot)}"
            raise Lost.by(EnvError(torn, "torn_slot"))
        return msgspec.convert(message["report"], self._report_type)

    def _cut(self, index: int, message: dict[str, Any]) -> None:
        """Single environments of a worker failed; it recreates them and begins anew to fill the same slot."""
        assert self._job is not None
        error = EnvError(message["error"], message["reason"])
        self._restarts[index].next(error)  # raises the error itself once there were too many
        told = f"recreated in {message['delay']:.1f} s: {error}"
        self._job.journal.lost(message["steps"], error.reason, told)
        self._feed.cut(index, error.reason)

    def order(self, index: int, **more: Any) -> None:
        """Have an actor fill one more slot; `more` is said to it along with the order."""
        if index not in self._up:  # it failed, and is not replaced yet, or will not be
            return
        slot = self._arena.free.pop()
        if self._idle(index):
            self._expect(index)
        self._busy.setdefault(index, deque()).append(slot)
        self._last_order[index] = more
        self.staff.tell(index, {"op": "unroll", "slot": slot} | more)

    def _idle(self, index: int) -> bool:
        """Whether an actor has filled all it was given, as far as we know."""
        return all(self.slots.stamp(slot).state == Slots.FULL for slot in self._busy.get(index, ()))

    def _come_back(self, index: int, lost: Lost, orders: int) -> None:
        """The unroll is lost; a replacement will start on the same one, with so many orders."""

        def coming() -> Waiting[None]:
            if (yield from self._replacement(index, lost)):
                for _ in range(orders):
                    self.order(index, **self._last_order[index])

        self._coming[index] = coming()
        self._go_on(index)

    def _go_on(self, index: int) -> tuple[list[channels.Channel], float]:
        """Go on with a replacement as far as that is possible; what it waits for, and how long."""
        try:
            return next(self._coming[index])
        except StopIteration:
            del self._coming[index]
            return [], POLL

    def finish(self) -> None:
        """No more is wanted than what is being filled: nobody is replaced from now on."""
        self._finishing = True
        for index in list(self._coming):
            if index not in self._ending:  # what is lost with one that has not ended yet is still to be counted
                del self._coming[index]
                self.staff.workers[index].abort()

    def release(self, slot: int) -> None:
        self._arena.release(slot, poison=self.config.debug)

    def _overdue(self) -> list[int]:
        """Workers without a sign of life for too long; a request to shut down shortens our patience.

        One that has finished and waits for us to read it gives no sign either, and is not late.
        """
        busy = [index for index in self._busy if index not in self._coming]
        late = [index for index in busy if self._deadlines[index].expired(self._arena.pulse.last(index))]
        if self.signals.requested is not None:
            late += [i for i in busy if i not in late and self._arena.pulse.age(i) > self._hurried]
        return [i for i in late if not self.staff.channel(i).poll()]

    def snapshots(self) -> list[dict[str, Any] | None]:
        """The actors' states for a checkpoint, under one deadline; None where an environment cannot be restored."""
        patience = Patience(self.signals, self.limits.step_deadline, self._hurried, since=time.monotonic())
        states: list[dict[str, Any] | None] = [None] * self.config.actors
        failed: dict[int, Lost] = {}
        asked = sorted(self._up)
        for index in asked:
            self.staff.tell(index, {"op": "snapshot"})
        for index in asked:
            try:
                message = wait_for(self.staff.word(index, patience), self.signals.fileno())
            except Lost as lost:
                failed[index] = lost
                continue
            states[index] = None if message["state"] is None else unpack_tree(message["state"])
            self._pass_on(message["said"])
        for index, cause in failed.items():
            wait_for(self._replacement(index, cause), self.signals.fileno())
        return states

    def _pass_on(self, said: list[str]) -> None:
        """Tell the user what a worker has to say of its snapshot: once, for its peers will say the same."""
        assert self._job is not None
        for text in said:
            if not self._complained:
                self._job.journal.say(text)
            self._complained = True

    def _where(self, index: int) -> str:
        slots = self._busy.get(index)
        if not slots:
            return "" if index in self._up else f" while starting environment {self.config.env}"
        sequence = self._job.sequences[index] if self._job else 0
        return f" in environment {self.config.env}, unroll {sequence}, row {self.slots.rows(slots[0])} of it"
