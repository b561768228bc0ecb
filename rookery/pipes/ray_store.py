"""Ray as a transport: calls of one Ray actor as a channel, weights and arrays in the object store, heartbeats.

Weights are put into the object store once per version; an order carries a reference, and each node fetches the object
once. What an actor has filled comes back as one object, whose arrays are views of the store here (read-only, no copy);
it is freed with the last view. Nothing waits: answers arrive on a thread of Ray's and ring a bell.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch

from rookery.core.errors import EnvError, UsageError
from rookery.core.machine import amount
from rookery.core.parcel import filled
from rookery.core.types import Arrays, Shapes
from rookery.pipes.bell import Alarm
from rookery.pipes.channel import ChannelClosed

BEAT = 1.0  # seconds between two questions whether an actor is alive
FETCH = 60.0  # seconds that weights may take from the learner's node
SMALL = 100_000  # bytes up to which Ray sends an object with the message, and not through its store
BRIEF = ("version", "lane", "live", "count", "steps")  # arrays that a table decides by, where the others stay away
WORK, WATCH, LIFE = "work", "watch", "life"  # groups of threads in an actor: orders; heartbeats; a call that never ends
GROUPS = {WORK: 1, WATCH: 2, LIFE: 1}


class RayChannel:
    """The messages to and from one Ray actor, as `pipes.channel.Channel` has them for a process.

    An order is a call, and its answer a list of messages. Answers are heard in the order of the calls. One more call
    never ends while the actor lives: when it fails, the actor is gone, whether it had orders or not.
    """

    def __init__(self, actor: Any):
        self.actor = actor
        self.where: dict[str, Any] = {}  # what the actor has said of its node and its versions; empty until it runs
        self.beats, self.filling, self.rows = 0, -1, 0  # at the last heartbeat: which slot it fills, and how far it is
        self._alarm, self._lock = Alarm(), threading.Lock()  # calls may end after we have closed
        self._pending: deque[Future] = deque()
        self._in: deque[dict[str, Any]] = deque()
        self._ended = ""
        self._beat: Future | None = None
        self._asked = 0.0
        self._call(WATCH, actor.about).add_done_callback(self._placed)
        self._call(LIFE, actor.life).add_done_callback(self._gone)

    @staticmethod
    def _call(group: str, method: Any, *args: Any) -> Future:
        return method.options(concurrency_group=group).remote(*args).future()

    def fileno(self) -> int:
        return self._alarm.fileno()

    def send(self, message: dict[str, Any], timeout: float) -> None:
        if self._ended:
            raise ChannelClosed(self._ended)
        weights = message.pop("weights", None)
        answer = self._call(WORK, self.actor.hear, message, weights)
        with self._lock:
            self._pending.append(answer)
        answer.add_done_callback(self._answered)

    def recv(self, timeout: float) -> dict[str, Any]:
        """The next message; it must be there (`poll`)."""
        if self._in:
            return self._in.popleft()
        raise ChannelClosed(self._ended or "no message is there")

    def poll(self) -> bool:
        if not self._in and not self._ended:
            self._alarm.hush()  # what comes from now on rings again
        return bool(self._in or self._ended)

    def ask_beat(self) -> None:
        """Have the numbers of the last heartbeat renewed, at most once in BEAT seconds."""
        now = time.monotonic()
        if now - self._asked >= BEAT and (self._beat is None or self._beat.done()) and not self._ended:
            self._asked = now
            self._beat = self._call(WATCH, self.actor.beat)
            self._beat.add_done_callback(self._beaten)

    def ask_cut(self, sequence: int) -> None:
        self._call(WATCH, self.actor.cut, sequence)

    def ask_stacks(self) -> Future:
        return self._call(WATCH, self.actor.stacks)

    def close(self) -> None:
        """Ends the actor too: its messages are not read any more."""
        import ray

        with contextlib.suppress(Exception):  # gone, or there is no cluster any more
            ray.kill(self.actor)
        with self._lock:
            self._end("the channel was closed on our side")
            self._in.clear()
        self._alarm.close()

    @property
    def ended(self) -> bool:
        return bool(self._ended)

    @property
    def why(self) -> str:
        """Why it has ended, in Ray's words."""
        return self._ended

    # On a thread of Ray's

    def _answered(self, answer: Future) -> None:
        with self._lock:
            while self._pending and self._pending[0].done():
                first = self._pending.popleft()
                error = first.exception()
                if error is None:
                    self._in.extend(first.result())
                else:
                    self._end(reason(error))
        self._alarm.ring()

    def _placed(self, about: Future) -> None:
        error = about.exception()
        if error is None:
            self.where = about.result()
        else:
            self._end(reason(error))
        self._alarm.ring()

    def _gone(self, life: Future) -> None:
        error = life.exception()
        with self._lock:
            self._end("it has ended" if error is None else reason(error))
        self._alarm.ring()

    def _beaten(self, beat: Future) -> None:
        if beat.exception() is None:
            self.beats, self.filling, self.rows = beat.result()

    def _end(self, why: str) -> None:
        self._ended = self._ended or why


def reason(error: BaseException) -> str:
    """The lines of a Ray error that say what happened, without its advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line.partition(" Some common causes")[0] for line in lines if "actor is dead because" in line]
    return told[0] if told else " ".join(lines[:3]) or type(error).__name__


class RayPulse:
    """Signs of life, as `pipes.shm.Pulse` has them: here they are asked for now and then."""

    def __init__(self, channels: dict[int, RayChannel]):
        self._channels = channels
        self._own: dict[int, int] = {}  # beats of ours: an order was given
        self._seen: dict[int, tuple[object, float]] = {}
        self._cut: dict[int, int] = {}

    def beat(self, index: int) -> None:
        self._own[index] = self._own.get(index, 0) + 1

    def last(self, index: int) -> object:
        """Differs from the last answer if there was a sign of life in between."""
        channel = self._channels[index]
        channel.ask_beat()
        sign = (self._own.get(index, 0), id(channel), channel.beats)
        if self._seen.get(index, (None,))[0] != sign:
            self._seen[index] = sign, time.monotonic()
        return sign

    def age(self, index: int) -> float:
        """Seconds since the last sign of life, as far as we know."""
        self.last(index)
        return time.monotonic() - self._seen[index][1]

    def cut(self, index: int, sequence: int) -> None:
        if self._cut.get(index) != sequence:
            self._cut[index] = sequence
            self._channels[index].ask_cut(sequence)


class RayStore:
    """What a crew and its Ray actors share, as `crews.buffers.SharedBuffers` has it for processes."""

    def __init__(self) -> None:
        self.channels: dict[int, RayChannel] = {}  # of each actor; the launcher keeps it
        self.pulse = RayPulse(self.channels)
        self.free: list[int] = []
        self.by_reference = False  # arrays stay where they were filled, and references to them are delivered
        self.publish_s = 0.0  # seconds that publications have taken
        self.bytes_in = 0  # bytes of arrays that have arrived
        self._weights: Any = None
        self._version = -1
        self._told: dict[int, int] = {}  # version that each actor was last sent
        self._actor: dict[int, int] = {}  # that fills a slot

    def fds(self) -> dict[str, int]:
        return {}

    def open(self, shapes: Shapes, count: int, floats: int, workers: int) -> None:
        slot = sum(int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in shapes.values())
        # Each actor may hold another version of the weights, and one more is being put.
        check_store(0 if slot <= SMALL or self.by_reference else count * slot, 4 * floats * (workers + 2))
        self.free = list(range(count))
        self._shapes = {path: (tuple(shape), str(np.dtype(dtype))) for path, (shape, dtype) in shapes.items()}

    def describe(self, index: int) -> dict[str, Any]:
        """What a worker that comes up must know."""
        self._told.pop(index, None)
        return {"shapes": self._shapes, "by_reference": self.by_reference}

    def publish(self, vector: torch.Tensor, version: int) -> None:
        import ray

        started = time.perf_counter()
        reference = ray.put(vector.numpy())
        self._weights = reference if vector.nbytes <= SMALL else [reference]  # in a list, it is fetched when it is used
        self._version = version
        self.publish_s += time.perf_counter() - started

    def order(self, actor: int, slot: int) -> dict[str, Any]:
        self._actor[slot] = actor
        if self._told.get(actor) == self._version:
            return {"version": self._version}
        self._told[actor] = self._version
        return {"version": self._version, "weights": self._weights}

    def full(self, slot: int) -> bool:
        return False  # its end is known when its answer is

    def take(self, slot: int, actor: int, incarnation: int, sequence: int, message: dict[str, Any]) -> Arrays:
        stamp = (message["slot"], message["incarnation"], message["sequence"])
        if stamp != (slot, incarnation, sequence):
            raise EnvError(f"actor {actor} delivered {stamp} instead of {(slot, incarnation, sequence)}", "torn_slot")
        self.bytes_in += message["bytes"]
        if (channel := self.channels[actor]).filling == slot:  # what the last heartbeat said was of this unroll
            channel.filling = -1
        return message["arrays"]

    def rows(self, slot: int) -> int:
        """Rows that were filled at the last heartbeat."""
        channel = self.channels[self._actor[slot]]
        return channel.rows if channel.filling == slot else 0

    def steps(self, slot: int, lanes: int) -> int:
        """Environment steps in what was filled at the last heartbeat; every row counts as one of each environment."""
        return self.rows(slot) * lanes

    def release(self, slot: int, poison: bool) -> None:
        self.free.append(slot)

    def close(self) -> None:
        self._weights = None


class RemoteBuffers:
    """The actor's end of a `RayStore`."""

    def __init__(self) -> None:
        self.beats, self.slot, self.row = 0, -1, 0
        self._weights: Any = None  # that were offered, and not pulled yet
        self._version = -1
        self._cut = -1

    def open(self, index: int, memory: dict[str, Any]) -> None:
        self._shapes, self._by_reference = memory["shapes"], memory["by_reference"]

    def offer(self, weights: Any, order: dict[str, Any]) -> None:
        """Weights that came with an order, or a reference in a list; None where they are those of the last one."""
        if weights is not None:
            self._weights, self._version = weights, order["version"]

    def pull(self, vector: torch.Tensor, order: dict[str, Any]) -> int:
        """Into a vector that holds those of the last time."""
        weights, self._weights = self._weights, None  # the object store may free them
        if isinstance(weights, list):
            import ray

            weights = ray.get(weights[0], timeout=FETCH)
        if weights is not None:
            np.copyto(vector.numpy(), weights)
        return self._version

    def begin(self, slot: int, incarnation: int, sequence: int, version: int) -> Arrays:
        self.slot, self.row = slot, 0
        self._arrays = {path: np.zeros(shape, dtype) for path, (shape, dtype) in self._shapes.items()}
        self._stamp = {"incarnation": incarnation, "sequence": sequence}
        return self._arrays

    def progress(self, slot: int, row: int) -> None:
        self.row = row

    def finish(self, slot: int) -> dict[str, Any]:
        arrays, more = filled(self._arrays), dict[str, Any]()
        size = sum(array.nbytes for array in arrays.values())
        if self._by_reference:
            import ray

            more = {"reference": ray.put(arrays)}
            arrays = {path: array for path, array in arrays.items() if path in BRIEF}
        self._arrays, self.slot, self.row = {}, -1, 0
        return self._stamp | {"arrays": arrays, "bytes": size} | more

    def beat(self) -> None:
        self.beats += 1

    def cut(self, sequence: int) -> None:
        self._cut = sequence

    def is_cut(self, sequence: int) -> bool:
        return sequence == self._cut


def check_store(unrolls: int, weights: int) -> None:
    """UsageError if what may be in flight does not fit into the object store of this node."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    node = next(node for node in ray.nodes() if node["NodeID"] == here)
    need, have = unrolls + weights, int(node["Resources"].get("object_store_memory", 0))
    if need > have:
        raise UsageError(
            f"Ray's object store on this node is too small: need {amount(need)} ({amount(unrolls)} of unrolls, "
            f"{amount(weights)} of weights), have {amount(have)}. Use fewer actors, smaller unrolls, or a larger store "
            "(ray.store_gib, or `ray start --object-store-memory`)"
        )
