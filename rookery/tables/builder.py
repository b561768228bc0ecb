"""What turns an actor's unrolls into the items of a replay memory, and the shape of the parcels they travel in.

A parcel is a flat dict of arrays, path -> array. "count" holds how many items and how many new frames are in it; of the
other arrays only that many leading rows mean anything. Item columns are those of `nstep.py` and `sequence.py`. Images
stand in them as frame numbers; "frames/<key>" holds the new frames, the first of which has the number
"first_frame/<key>"; a leaf that brings fewer than another leaves numbers unused. A priority of NaN asks for the
largest one so far.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from rookery.core.types import Arrays, DataPlan, EnvSpec, Shapes, Tree
from rookery.core.unroll import Unroll
from rookery.tables import nstep, sequence
from rookery.tables.frames import frame_shape, image_leaves, most_frames
from rookery.tables.window import Priorities, replay_of


class Builder(Protocol):
    def reset(self) -> None:
        """A new life of the actor: what waits is dropped, and frame numbers count from 0 (`ReplayMemory.forget`)."""

    def cut(self, age: np.ndarray) -> None:
        """Rows were lost: the next unroll does not follow the last one. What waits is dropped, frame numbers count on.

        age [B]: rows of each lane's episode that lie before its next row, lost ones too; -1 if that row is a dead one.
        """

    def build(self, unroll: Unroll, out: Arrays) -> None:
        """Fill a parcel with the items that `unroll`, the successor of the one before, completes."""

    @property
    def pending(self) -> int:
        """Environment steps that came in and are in no item yet."""

    skipped: int  # environment steps of which the last unroll showed that they are of no item, behind a cut

    def state(self) -> dict[str, Any]:
        """A tree of arrays: all that is needed to go on exactly."""

    def load(self, state: dict[str, Any]) -> None: ...


def make_builder(spec: EnvSpec, plan: DataPlan, lanes: int, start_priorities: Priorities | None = None) -> Builder:
    """Of the kind that the plan's `Replay` table asks for."""
    kind = sequence.SequenceBuilder if replay_of(plan).sequence else nstep.NStepBuilder
    return kind(spec, plan, lanes, start_priorities)


def parcel_shapes(spec: EnvSpec, plan: DataPlan, lanes: int, state: Tree) -> Shapes:
    """Shape and dtype of every array of a parcel, by path; `state` is an initial state of any number of lanes."""
    if replay_of(plan).sequence:
        items = sequence.item_shapes(spec, plan, lanes, state)
    else:
        items = nstep.item_shapes(spec, plan, lanes)
    shapes: Shapes = {"count": ((2,), "int64"), **items}
    for key, leaf in image_leaves(spec).items():
        shapes[f"frames/{key}"] = ((most_frames(spec, plan.unroll, lanes), *frame_shape(leaf)), leaf.dtype)
        shapes[f"first_frame/{key}"] = ((1,), "int64")
    return shapes
