"""What one actor hands over: unrolls as they are, or the items of a replay memory, which it builds from them itself.

An Ape-X actor computes its n-step transitions and their start priorities (Horgan et al. 2018, algorithm 1); a PPO
actor hands over what it saw. Either way it fills arrays that it is given, and knows nothing of where they lie.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np

from rookery.algorithms.base import Algorithm
from rookery.core.errors import CheckpointError, EnvError
from rookery.core.types import ActorReport, Arrays, DataPlan, EnvSpec, Shapes
from rookery.core.unroll import as_unroll, empty_unroll, unroll_shapes
from rookery.envs.lanes import Lanes
from rookery.nets.modules import Nets
from rookery.roles.actor import Actor
from rookery.storage.codec import encode_tree
from rookery.tables.builder import make_builder, parcel_shapes

MAX_STATE = 255 << 20  # bytes of one actor's environments; with the rest it must fit into a message of 256 MiB


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=3)


class Producer:
    """`say` takes what the user should know and what does not stop the run.

    `recover` is told of environments that failed and can be recreated alone: it counts what is lost and waits, or
    raises the error where there were too many. Without it the first failure ends `fill`.
    """

    recover: Callable[[EnvError], None] | None = None

    def __init__(
        self, algorithm: Algorithm, nets: Nets, lanes: Lanes, seed: int, index: int = 0,
        say: Callable[[str], None] = _warn,
    ):  # fmt: skip
        self.actor = Actor(algorithm, nets, lanes, seed, index)
        self.index, self.plan, self._builder = index, self.actor.plan, None
        self._say, self._said = say, False
        if self.plan.table.builds_items:
            state = algorithm.initial_state(nets, 1)
            self._scratch = empty_unroll(unroll_shapes(lanes.spec, self.plan, lanes.count, state))
            self._builder = make_builder(lanes.spec, self.plan, lanes.count, algorithm.start_priorities)

    def begin(self, sequence: int, life: str, snapshot: dict[str, Any] | None = None) -> None:
        """Start with unroll number `sequence`: where a snapshot ended, or with new episodes in a life of that name.

        A life is named "sequence.incarnation".
        """
        self.actor.sequence = sequence
        self._incarnation = life.rpartition(".")[2]
        if snapshot is not None:
            self._restore(snapshot)
            return
        self.actor.reset(life)
        if self._builder is not None:
            self._builder.reset()

    def _restore(self, snapshot: dict[str, Any]) -> None:
        """CheckpointError, whatever the environment or the builder makes of it: to try again would not help."""
        pending = 0
        try:
            self.actor.restore(snapshot)
            if self._builder is not None:
                self._builder.load(snapshot["builder"])
                pending = int(self._builder.pending)
        except (Exception, SystemExit) as error:
            what = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
            raise CheckpointError(
                f"environment {self.actor.lanes.spec.id} cannot go on from the checkpoint (actor {self.index}): "
                f"{what}. Use an earlier checkpoint: move the newest one away"
            ) from error
        if pending != snapshot.get("pending", 0):
            raise CheckpointError(
                f"the checkpoint counts {snapshot['pending']} steps that actor {self.index} holds back, and there are "
                f"{pending}. Use an earlier checkpoint: move the newest one away"
            )

    def fill(self, arrays: Arrays, version: int, tick: Callable[[int], object] | None = None) -> ActorReport:
        """Take the next unroll and fill the arrays with what comes of it. `tick(row)` is called before each step.

        If an environment fails on the way, it is recreated and the unroll is started again, from where the others are.
        """
        while True:
            try:
                if self.actor.broken:
                    self._mend()
                return self._fill(arrays, version, tick)
            except EnvError as error:
                if not error.mendable or self.recover is None:
                    raise
                self.recover(error)

    def _mend(self) -> None:
        actor = self.actor
        # Not the lives before this one: a resumed run meets the same fault with the same seeds.
        actor.mend(f"{actor.sequence}.{self._incarnation}.{actor.attempt}")
        if self._builder is not None:
            self._builder.cut(actor.episodes.age)

    def _fill(self, arrays: Arrays, version: int, tick: Callable[[int], object] | None) -> ActorReport:
        if self._builder is None:
            return self.actor.unroll(as_unroll(arrays), version, tick)
        report = self.actor.unroll(self._scratch, version, tick)
        started = perf_counter()
        self._builder.build(self._scratch, arrays)
        report.pending, report.skipped = int(self._builder.pending), self._builder.skipped
        report.total_s += perf_counter() - started
        return report

    def snapshot(self) -> dict[str, Any] | None:
        """What a checkpoint needs to go on exactly; None where the environments cannot be restored.

        A state that cannot be read, stored or sent costs new episodes after resuming, and not the run.
        """
        try:
            snapshot = self.actor.snapshot()
            if snapshot is None:
                return None
            _, tensors = encode_tree(snapshot["env"])
            size = sum(tensor.nbytes for tensor in tensors.values())
            if size > MAX_STATE:
                raise ValueError(f"{size:,} bytes, more than {MAX_STATE:,}")
        except Exception as error:  # the environment's own code, or what it gave
            self.complain(error)
            return None
        if self._builder is not None:
            snapshot["builder"], snapshot["pending"] = self._builder.state(), int(self._builder.pending)
        return snapshot

    def complain(self, error: Exception) -> None:
        """Say that a state goes without; once: the next checkpoint would say the same."""
        if not self._said:
            self._said = True
            self._say(
                f"environment {self.actor.lanes.spec.id}: its get_state gives nothing that can be stored "
                f"({type(error).__name__}: {error}); checkpoints go without, and resuming begins new episodes"
            )


def handover_shapes(spec: EnvSpec, plan: DataPlan, lanes: int, state: Any) -> Shapes:
    """Shapes of the arrays that an actor fills; `state` is an initial state of any number of lanes."""
    shapes = parcel_shapes if plan.table.builds_items else unroll_shapes
    return shapes(spec, plan, lanes, state)


def empty_arrays(shapes: Shapes) -> Arrays:
    return {path: np.zeros(shape, dtype) for path, (shape, dtype) in shapes.items()}
