"""What every crew promises: actors that fill unrolls when they are told to, are watched, and are replaced if they fail.

The training loop (`topologies/loop.py`) orders, takes what has arrived and publishes weights. It does not know whether
the actors are objects in its own process (`inline.py`) or processes (`process.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from rookery.algorithms.base import Algorithm
from rookery.core.types import Delivery, EnvSpec, Failure, Shapes

States = list[dict[str, Any] | None]  # of the actors, for a checkpoint; None where one cannot be restored


@dataclass(frozen=True)
class Setup:
    """What a crew must know before its actors begin."""

    algorithm: Algorithm
    shapes: Shapes  # of the arrays that one order fills
    floats: int  # of the weights that travel
    ahead: int  # unrolls that one actor may have ordered or waiting
    sequences: list[int]  # unrolls that each actor has delivered before
    states: States  # to go on from; empty: new episodes
    failed: Callable[[Failure], None]  # is told of every actor, or environment of one, that failed and is replaced
    say: Callable[[str], None]  # takes what the user should know and what does not stop the run


class Crew(Protocol):
    parallel: int  # actors that act at the same time
    version: int | None  # of the weights that were published last
    sequences: list[int]  # unrolls that each actor has delivered
    openings: deque[int]  # actors with room for one more order, the one that waits longest first
    cut: Callable[[], bool] | None  # asked while unrolls are filled, if set: whether to cut them short

    @property
    def spec(self) -> EnvSpec: ...

    @property
    def ordered(self) -> int:
        """Unrolls that were ordered and have not arrived."""
        ...

    @property
    def busy(self) -> bool:
        """Whether something may still arrive."""
        ...

    def order(self, actor: int, progress: float) -> None:
        """Have an actor fill one more unroll; `progress` is the share of the run that lies behind."""
        ...

    def arrived(self, patience: float) -> Iterator[Delivery]:
        """What has been filled by now, waiting for the first at most so many seconds; to be taken to the end.

        Failures are told in between, in the order in which they happened.
        """
        ...

    def publish(self, read: Callable[[], torch.Tensor], version: int) -> None:
        """Have actors use these weights from their next unroll on."""
        ...

    def snapshots(self) -> States:
        """The states of the actors, none of which has an order."""
        ...

    def finish(self) -> None:
        """Nothing more will be ordered: no actor is replaced from now on."""
        ...
