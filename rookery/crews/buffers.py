"""The memory that a crew and its workers share: slots for unrolls, the weights, and a heartbeat of each worker.

Descriptors exist from the start, so that processes can be started with them; the memory behind them once it is known
how large everything is.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from rookery.core.errors import EnvError
from rookery.core.types import Arrays, Shapes
from rookery.core.unroll import as_unroll, live_steps
from rookery.pipes.shm import Pulse, Segment, Slots, WeightBoard


class SharedBuffers:
    slots: Slots
    board: WeightBoard
    pulse: Pulse

    def __init__(self) -> None:
        self._segments = {name: Segment.reserve(name) for name in ("slots", "weights", "pulse")}
        self.free: list[int] = []  # slots
        self._described: dict[str, Any] = {}

    def fds(self) -> dict[str, int]:
        return {name: segment.fd for name, segment in self._segments.items()}

    def open(self, shapes: Shapes, count: int, floats: int, workers: int) -> None:
        """Room for `count` slots of these shapes, `floats` of weights and so many workers."""
        layout = Slots.layout(shapes, count)
        sizes = {"slots": layout.size, "weights": WeightBoard.size(floats), "pulse": Pulse.size(workers)}
        for name, segment in self._segments.items():
            segment.allocate(sizes[name])
        self.slots = Slots(self._segments["slots"], layout)
        self.board = WeightBoard(self._segments["weights"])
        self.pulse = Pulse(self._segments["pulse"])
        self.free = list(range(count))
        self._described = {f"{name}_size": size for name, size in sizes.items()}
        self._described["layout"] = msgspec.to_builtins(layout)

    def describe(self, index: int) -> dict[str, Any]:
        """What a worker must know to find its way in it."""
        return self._described

    def publish(self, vector: torch.Tensor, version: int) -> None:
        self.board.publish(vector.numpy(), version)

    def order(self, actor: int, slot: int) -> dict[str, Any]:
        """What an order says besides: nothing, the worker finds it all in shared memory."""
        return {}

    def full(self, slot: int) -> bool:
        return self.slots.stamp(slot).state == Slots.FULL

    def take(self, slot: int, actor: int, incarnation: int, sequence: int, message: dict[str, Any]) -> Arrays:
        """The arrays that a worker announces, if they are what they should be."""
        if not self.slots.valid(slot, actor, incarnation, sequence):
            stamp = self.slots.stamp(slot)
            raise EnvError(f"actor {actor} announced a slot that is not whole: {stamp}", "torn_slot")
        return self.slots.arrays(slot)

    def rows(self, slot: int) -> int:
        """Rows that were filled so far."""
        return self.slots.rows(slot)

    def steps(self, slot: int, lanes: int) -> int:
        """Environment steps in what was filled so far.

        Where a slot takes finished items its rows are not in it: every row then counts as a step of each environment.
        """
        rows, arrays = self.slots.rows(slot), self.slots.arrays(slot)
        return live_steps(as_unroll(arrays), rows) if "logp" in arrays else rows * lanes

    def release(self, slot: int, poison: bool) -> None:
        self.slots.release(slot, poison=poison)
        self.free.append(slot)

    def close(self) -> None:
        """Free the memory now, although arrays and this object may still be referred to."""
        for segment in self._segments.values():
            segment.close()
        for name in ("slots", "board", "pulse"):
            self.__dict__.pop(name, None)


class AttachedBuffers:
    """The same memory as a worker sees it."""

    def __init__(self, fds: dict[str, int]):
        self._fds = fds

    def open(self, index: int, memory: dict[str, Any]) -> None:
        segments = {name: Segment.attach(fd, memory[f"{name}_size"]) for name, fd in self._fds.items()}
        self.index = index
        self.slots = Slots(segments["slots"], memory["layout"])
        self._board = WeightBoard(segments["weights"])
        self._pulse = Pulse(segments["pulse"])

    def pull(self, vector: torch.Tensor, order: dict[str, Any]) -> int:
        return self._board.pull(vector.numpy())

    def begin(self, slot: int, incarnation: int, sequence: int, version: int) -> Arrays:
        self.slots.begin(slot, self.index, incarnation, sequence, version)
        return self.slots.arrays(slot)

    def progress(self, slot: int, row: int) -> None:
        self.slots.progress(slot, row)

    def finish(self, slot: int) -> dict[str, Any]:
        self.slots.finish(slot)
        return {}

    def beat(self) -> None:
        self._pulse.beat(self.index)

    def is_cut(self, sequence: int) -> bool:
        return self._pulse.is_cut(self.index, sequence)
