"""The memory that a crew and its workers share: slots for unrolls, the weights, and a heartbeat of each worker.

Descriptors exist from the start, so that processes can be started with them; the memory behind them once it is known
how large everything is.
"""

from __future__ import annotations

from typing import Any

import msgspec

from rookery.core.types import Shapes
from rookery.pipes.shm import Pulse, Segment, Slots, WeightBoard


class SharedBuffers:
    slots: Slots
    board: WeightBoard
    pulse: Pulse

    def __init__(self) -> None:
        self._segments = {name: Segment.reserve(name) for name in ("slots", "weights", "pulse")}
        self.free: list[int] = []  # slots
        self.described: dict[str, Any] = {}  # what a worker must know to find its way in it

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
        self.described = {f"{name}_size": size for name, size in sizes.items()}
        self.described["layout"] = msgspec.to_builtins(layout)

    def release(self, slot: int, poison: bool) -> None:
        self.slots.release(slot, poison=poison)
        self.free.append(slot)

    def close(self) -> None:
        """Free the memory now, although arrays and this object may still be referred to."""
        for segment in self._segments.values():
            segment.close()
        for name in ("slots", "board", "pulse"):
            self.__dict__.pop(name, None)
