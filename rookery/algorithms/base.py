"""The contract every algorithm fulfils. An algorithm knows tensors, never processes.

Acting: `act` maps a batch of observations to actions. Learning: `prepare` turns a batch of unrolls into what the
losses need (PPO: advantages), `minibatches` cuts it, `losses` scores one piece. What happens between a gradient and
its application (nothing, an all-reduce, a send to an applier) is up to the learner and the topology.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from rookery.core.config import NetConfig
from rookery.core.ranges import within
from rookery.core.reduce import Reduce
from rookery.core.types import ActOutput, DataPlan, EnvSpec, Explore, LossOutput, Tree
from rookery.nets.modules import Nets
from rookery.nets.optimizer import Optimizer


class Algorithm(ABC):
    Config: ClassVar[type]
    published: tuple[str, ...]  # entries of nets() that actors receive: all that `act` uses
    groups: ClassVar[dict[str, tuple[str, ...]]]  # parameter group -> entries of nets(); one optimiser and loss each
    stop_above: float = math.inf  # LossOutput.stop beyond this ends the update
    max_grad_norm: float = math.inf  # clip of each group's gradient norm
    # Why workers cannot compute gradients on pulled weights; nothing: they can, and target networks follow in `pulled`.
    not_remote: str = ""

    def __init__(self, config: Any, net: NetConfig, spec: EnvSpec, lanes: int):
        """`lanes` is the number of environments of the whole run, those of all ranks."""
        self.config, self.net = within(config, "algo."), within(net, "net.")
        self.spec, self.lanes = spec, lanes

    @abstractmethod
    def nets(self) -> Nets: ...

    @abstractmethod
    def plan(self) -> DataPlan: ...

    @abstractmethod
    def initial_state(self, nets: Nets, lanes: int) -> Tree:
        """Recurrent state at an episode's start, leaves [lanes, ...]; {} without recurrence."""

    @abstractmethod
    def act(self, nets: Nets, obs: Tree, state: Tree, explore: Explore | None) -> ActOutput:
        """One step for a batch of environments, without gradient; greedy when `explore` is None."""

    def quantities(self, nets: Nets, obs: Tree, state: Tree, output: ActOutput) -> dict[str, torch.Tensor]:
        """What is known of observations [B, ...] and of what `act` returned for them, for people who ask for it.

        "logp" [B]: of the actions; "value" [B]: of the observations; "q": values of every action [B, A], or of the
        action taken [B] if actions are boxes. `state` is the one that `act` was given.
        """
        return {}

    @abstractmethod
    def losses(self, nets: Nets, batch: Any) -> LossOutput: ...

    def prepare(self, nets: Nets, batch: Any, reduce: Reduce) -> Any:
        return batch

    def minibatches(self, batch: Any, rng: torch.Generator, reduce: Reduce) -> Iterator[Any]:
        """The pieces of a prepared batch, as many on every rank; None: this rank has no rows in that one.

        `rng` has the same state on every rank.
        """
        yield batch

    def after_update(self, nets: Nets, version: int) -> None:  # noqa: B027
        """Target networks and published numbers, before publishing. Also where gradients come from workers.

        `version` counts the updates of the whole run, this one included.
        """

    def observe(self, nets: Nets, batch: Any, reduce: Reduce) -> None:  # noqa: B027
        """Statistics of the observations of a batch that was trained on; follows `after_update` where it was drawn."""

    def pulled(self, nets: Nets, before: int, now: int) -> None:  # noqa: B027
        """Nets that compute gradients elsewhere took weights of version `now`: target networks follow."""

    def start_priorities(self, items: dict[str, np.ndarray]) -> np.ndarray | None:
        """Priorities [M] of new items as the actor that made them sees them; None: the largest priority so far.

        `items` holds the columns of the items (see `tables/nstep.py`, `tables/sequence.py`) and, for every entry of
        the plan's extras, that value at the item's own rows and at its last one.
        """
        return None

    @abstractmethod
    def optimizers(self, parameters: dict[str, nn.Parameter]) -> dict[str, Optimizer]:
        """One optimiser per group, each over one flat parameter."""

    def work(self, nets: Nets) -> float:
        """Multiply-adds of one minibatch's forward pass, roughly: how large a piece of work the learner has."""
        return math.inf

    def schedule(self, progress: float) -> dict[str, float]:
        """Learning rate per group at a share of the run in [0, 1]; also where other schedules are set."""
        return {}

    def remarks(self, metrics: dict[str, float]) -> list[str]:
        """What a user should know about the metrics of an update; the same remark is made only once."""
        return []
