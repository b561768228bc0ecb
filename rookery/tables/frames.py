"""Numbers for frames, so that a replay memory keeps each one once: stacks and successors become lists of numbers.

An observation of `stack` frames, newest last, shares all but its newest with the one before it in its episode. Numbers
count up from 0 over an actor's life; the all-zero frame, which fills a stack at an episode's start, has the number
`ZERO` and is never kept. Not here: where frames are kept, and for how long (`store.py`).
"""

from __future__ import annotations

import numpy as np

from rookery.core.errors import CheckpointError
from rookery.core.types import EnvSpec, Leaf

ZERO = -1  # number of the all-zero frame


def image_leaves(spec: EnvSpec) -> dict[str, Leaf]:
    return {key: leaf for key, leaf in spec.obs.items() if leaf.kind == "image"}


def frame_shape(leaf: Leaf) -> tuple[int, ...]:
    return leaf.shape[1:] if leaf.stack > 1 else leaf.shape


def most_frames(spec: EnvSpec, unroll: int, lanes: int) -> int:
    """New frames of one unroll, at most, of any image leaf.

    A row that begins an episode brings up to `stack` of them, any other brings one. Row 0 is new only in an actor's
    first unroll and behind a cut, and brings as many there if it is live, and none if it is dead; each further
    beginning follows a dead row, and a dead row a live one.
    """
    stack = max((leaf.stack for leaf in image_leaves(spec).values()), default=0)
    return lanes * ((unroll // 2 + 1) * stack + (unroll + 1) // 2)


class FrameNumbers:
    """Numbers the frames of one image leaf, unroll by unroll."""

    def __init__(self, leaf: Leaf, unroll: int, lanes: int):
        self.stack, self.shape = leaf.stack, frame_shape(leaf)
        self._new = np.zeros((unroll + 1, lanes, leaf.stack), bool)
        self._begins = np.zeros((unroll + 1, lanes), bool)
        self._last = np.zeros((lanes, leaf.stack), np.int64)  # numbers of the last row, which is the next one's row 0
        self.reset()

    def reset(self) -> None:
        """A new life: numbers count from 0 again, and the next unroll's row 0 has not been seen."""
        self.next = 0  # number of the next new frame
        self._fresh = True  # whether the next row 0 has not been seen

    def cut(self) -> None:
        """The next unroll does not follow the last one: its row 0 has not been seen. Numbers count on."""
        self._fresh = True

    def number(self, obs: np.ndarray, live: np.ndarray, frames: np.ndarray, numbers: np.ndarray) -> int:
        """Write new frames to `frames` and the numbers of every row to `numbers`; how many are new.

        obs [T+1, B, *leaf.shape], live [T, B], frames [F, *frame_shape], numbers int64 [T+1, B, stack], contiguous.
        New frames are ordered by row, lane and age, oldest first. `next` stays: see `advance`.
        """
        new, begins = self._new, self._begins
        obs = obs.reshape(*new.shape, *self.shape)
        begins[0] = live[0] if self._fresh else False
        np.logical_not(live, out=begins[1:])  # the row behind a dead one
        new[...] = False
        new[1:, :, -1] = True
        new[0, :, -1] = begins[0]
        older = self._compare(obs) if self.stack > 1 else None
        order = np.flatnonzero(new)
        count = len(order)
        assert count <= len(frames), f"{count} new frames in room for {len(frames)}: a dead row followed a dead row"
        obs.reshape(-1, *self.shape).take(order, axis=0, out=frames[:count], mode="clip")
        numbers.reshape(-1)[order] = np.arange(self.next, self.next + count)
        if not self._fresh:
            numbers[0] = self._last
        else:
            numbers[0, ~live[0]] = ZERO  # a dead row behind a cut ended an episode that was lost: no item refers to it
        if older is not None:
            self._spread(numbers, *older)
        self._last[...] = numbers[-1]
        self._fresh = False
        return count

    def advance(self, count: int) -> None:
        """The next unroll's first new frame comes `count` numbers later."""
        self.next += count

    def _compare(self, obs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mark which older frames of the rows that begin an episode are new; which are zero, which like the next."""
        stacks = obs[self._begins].reshape(-1, self.stack, int(np.prod(self.shape)))
        zero = np.logical_not(stacks[:, :-1].any(axis=2))
        same = (stacks[:, :-1] == stacks[:, 1:]).all(axis=2)
        self._new[self._begins, :-1] = ~(zero | same)
        return zero, same

    def _spread(self, numbers: np.ndarray, zero: np.ndarray, same: np.ndarray) -> None:
        """Numbers of the frames that are not new: [N, stack-1] of rows that begin, then row after row."""
        first = numbers[self._begins]
        for age in range(self.stack - 2, -1, -1):
            np.copyto(first[:, age], first[:, age + 1], where=same[:, age])
            first[zero[:, age], age] = ZERO
        numbers[self._begins] = first
        follows = ~self._begins[:, :, None]
        for row in range(1, len(numbers)):
            np.copyto(numbers[row, :, :-1], numbers[row - 1, :, 1:], where=follows[row])

    def state(self) -> dict[str, np.ndarray]:
        return {"next": np.array([self.next]), "fresh": np.array([self._fresh]), "last": self._last.copy()}

    def load(self, state: dict[str, np.ndarray]) -> None:
        self.next, self._fresh = int(state["next"][0]), bool(state["fresh"][0])
        fill(self._last, state["last"], "frame numbers")
        if not (0 <= self.next < 2**53 and (self._last >= ZERO).all() and (self._last < max(self.next, 1)).all()):
            raise CheckpointError(f"stored frame numbers are beyond {self.next}, the next one: they are not ours")


def fill(array: np.ndarray, stored: np.ndarray, name: str) -> None:
    """Copy stored state into its array; it must fit, not just broadcast."""
    if array.shape != stored.shape or array.dtype != stored.dtype:
        raise CheckpointError(
            f"stored {name} are {stored.dtype} {list(stored.shape)}, expected {array.dtype} {list(array.shape)}: "
            "the checkpoint is of another run, or its config.json was edited"
        )
    array[...] = stored
