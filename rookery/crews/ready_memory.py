"""What a rank and its environment workers share: for each environment, one action and what came of it.

Two counters of each environment say whose turn it is: `asked` (actions given, by the rank) and `done` (results, by the
worker). While they differ the memory is the worker's. A byte in a pipe wakes who waits: a round trip takes 9 us, and 25
with messages of a channel. It must not load torch: the workers are many, and small.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from rookery.core.types import EnvSpec, Shapes
from rookery.pipes.shm import LINE, Layout, Segment, Slots, _fence


def share(lanes: int, workers: int, index: int) -> range:
    """The environments of one of the workers."""
    return range(index * lanes // workers, (index + 1) * lanes // workers)


def memory_layout(spec: EnvSpec, lanes: int, metrics: int) -> Layout:
    """`metrics`: numbers that an environment tells at the end of an episode."""
    shapes: Shapes = {f"obs/{name}": (leaf.shape, leaf.dtype) for name, leaf in spec.obs.items()}
    shapes |= {"action": (spec.action.shape, spec.action.dtype), "reward": ((), "float32"), "score": ((), "float64")}
    shapes |= {"terminated": ((), "bool"), "truncated": ((), "bool"), "info": ((metrics,), "float64")}
    return Slots.layout(shapes, lanes)


class LaneMemory:
    """Arrays over all environments, [B, ...]; each environment has cache lines of its own."""

    def __init__(self, segment: Segment, layout: Layout | dict[str, Any]):
        layout = msgspec.convert(layout, Layout)
        words = segment.array((layout.count, LINE // 8), "int64")
        self.asked, self.done = words[:, 0], words[:, 1]
        self.columns = {name: _column(segment, layout, name) for name in layout.fields}
        self.obs = {name[4:]: column for name, column in self.columns.items() if name.startswith("obs/")}

    def ask(self, lanes: np.ndarray, action: np.ndarray) -> None:
        """Give these environments an action each."""
        self.columns["action"][lanes] = action
        _fence()  # the data before the word that says it is there
        self.asked[lanes] += 1

    def waits(self, lane: int) -> bool:
        """Whether an action of this environment waits for its worker."""
        if self.asked[lane] == self.done[lane]:
            return False
        _fence()
        return True

    def answer(self, lane: int) -> None:
        """What came of the action is written."""
        _fence()
        self.done[lane] = self.asked[lane]

    def answered(self) -> np.ndarray:
        """[B] whether an environment has nothing to do: what it was asked for last is there to be read."""
        found = self.done == self.asked
        _fence()
        return found

    def forget(self, lanes: np.ndarray) -> None:
        """The worker of these environments is gone."""
        self.done[lanes] = self.asked[lanes]


def _column(segment: Segment, layout: Layout, name: str) -> np.ndarray:
    field, start = layout.fields[name], layout.count * LINE
    kind = np.dtype(field.dtype)
    inner = np.empty(field.shape, kind).strides
    assert segment.buffer is not None
    return np.ndarray((layout.count, *field.shape), kind, segment.buffer, start + field.offset, (layout.stride, *inner))
