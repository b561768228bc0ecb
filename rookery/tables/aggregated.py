"""Batches that others put together: a queue hands over references to unrolls, and one object comes back for each batch.

Aggregators (`roles/aggregator.py`) take turns. When one is lost, another puts its batches together again; what it kept
of earlier unrolls is lost with it. When an unroll is lost, because the node that it was on is gone, the batch is given
up as a whole.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from rookery.core.errors import LearnerError
from rookery.core.types import Arrays, Sample
from rookery.core.unroll import Unroll
from rookery.tables.batch import Load, Loaded, ToDevice, sample_of
from rookery.tables.service import ArgumentLost, Service, ServiceLost
from rookery.tables.table import POLL

EACH = 2  # batches that one aggregator has at once: one under way, and one that waits


@dataclass(eq=False)
class _Asked:
    load: Load
    index: int  # of the aggregator; -1: none is there
    future: Future[Any] | None
    at: float
    life: int = 0  # of that aggregator
    gone: bool = False  # some of its data is


class AggregatedBatches:
    """As `Batches`. `wake` is called, from another thread, when a batch is made; `woken` before it is looked for."""

    direct, look = False, POLL
    wake: Callable[[], None] | None = None
    woken: Callable[[], None] | None = None

    def __init__(self, services: Sequence[Service], deadline: float = 60.0, device: str = "cpu"):
        """`deadline`: seconds that one batch may take, and that all aggregators may be away."""
        self._services, self._deadline = services, deadline
        self._to: Callable[[Unroll], Unroll] | None = None if device == "cpu" else ToDevice(device)
        self.under_way: deque[Load] = deque()
        self._asked: deque[_Asked] = deque()  # of these, in the same order
        self._turn = 0
        self._up_at = time.monotonic()
        self._version = 0  # the newest in a batch
        self._kept = [0] * len(services)  # unrolls in the rings
        self._lags = np.zeros(0, np.int64)  # of the replayed unrolls in the last batch, behind its newest one

    @property
    def room(self) -> bool:
        return len(self.under_way) < EACH * sum(service.up for service in self._services)

    @property
    def ready(self) -> bool:
        self._hear()
        return bool(self._asked) and _answered(self._asked[0])

    def start(self, load: Load) -> None:
        self.under_way.append(load)
        asked = _Asked(load, -1, None, 0.0)
        self._asked.append(asked)
        self._ask(asked)

    def take(self) -> Loaded | None:
        if not self.ready:
            return None
        asked = self._asked.popleft()
        self.under_way.popleft()
        if asked.gone or asked.future is None:
            return Loaded(asked.load, None)
        made = asked.future.result()
        self._version = max(self._version, int(made.arrays["version"][: made.new].max()))
        self._kept[asked.index], self._lags = made.kept, self._version - made.replayed
        return Loaded(asked.load, sample_of(_ours(made.arrays), made.new, asked.load.steps, None, self._to))

    def now(self, load: Load) -> Sample:
        raise AssertionError("batches are made elsewhere")

    def give_back(self, memory: Any) -> None:
        pass

    def stats(self) -> dict[str, float]:
        told = {"aggregators": float(sum(service.up for service in self._services))}
        if not any(self._kept):
            return told
        lags = self._lags if len(self._lags) else np.zeros(1, np.int64)
        return told | {
            "ring": float(sum(self._kept)), "replayed": float(len(self._lags)),
            "replayed_lag_mean": float(lags.mean()), "replayed_lag_max": float(lags.max()),
        }  # fmt: skip

    def close(self) -> None:
        self.under_way.clear()
        self._asked.clear()

    def _ask(self, asked: _Asked) -> None:
        """Give it to the aggregator whose turn it is; if none is there, later."""
        up = [index for index, service in enumerate(self._services) if service.up]
        if not up:
            asked.index, asked.future = -1, None
            return
        asked.index, asked.at = up[self._turn % len(up)], time.monotonic()
        asked.life = self._services[asked.index].life
        self._turn += 1
        parts = [each.arrays if each.reference is None else each.reference for each in asked.load.deliveries]
        actors = [each.actor for each in asked.load.deliveries]
        asked.future = self._services[asked.index].ask("gather", actors, *parts)
        asked.future.add_done_callback(self._rung)

    def _rung(self, future: Future[Any]) -> None:
        if self.wake is not None:
            self.wake()

    def _hear(self) -> None:
        """Notice what was lost, and have it done again."""
        if self.woken is not None:
            self.woken()
        now = time.monotonic()
        for index, service in enumerate(self._services):
            service.look()
            if service.up:
                self._up_at = now
            else:
                self._kept[index] = 0
        if now - self._up_at > self._deadline:
            raise LearnerError(f"no aggregator has been there for {self._deadline:g} s")
        for asked in self._asked:
            if asked.future is None:
                self._ask(asked)
            elif not asked.future.done():
                service = self._services[asked.index]
                if now - asked.at > self._deadline and asked.life == service.life:  # else its calls fail soon
                    service.kill(f"a batch has taken longer than {self._deadline:g} s")
            elif isinstance(error := asked.future.exception(), ArgumentLost):
                asked.gone = True
            elif isinstance(error, ServiceLost):
                self._ask(asked)
            elif error is not None:
                raise error


def _answered(asked: _Asked) -> bool:
    return asked.gone or (asked.future is not None and asked.future.done() and asked.future.exception() is None)


def _ours(arrays: Arrays) -> Arrays:
    """The same memory, without the mark that it is read-only: no other process reads this batch."""
    return {path: np.asarray(_View(array)) if not array.flags.writeable else array for path, array in arrays.items()}


class _View:
    def __init__(self, array: np.ndarray):
        self._array = array
        self.__array_interface__ = array.__array_interface__ | {"data": (array.ctypes.data, False)}
