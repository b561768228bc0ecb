"""The contract every algorithm fulfils. An algorithm knows tensors, never processes.

Acting: `act` maps a batch of observations to actions. Learning: `prepare` turns a batch of unrolls into what the
losses need (PPO: advantages), `minibatches` cuts it, `losses` scores one piece. What happens between a gradient and
its application (nothing, an all-reduce, a send to an applier) is the learner's and the topology's affair.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import nn

from rookery.config import NetConfig
from rookery.types import ActOutput, DataPlan, EnvSpec, LossOutput, Tree

Reduce = Callable[[torch.Tensor], torch.Tensor]  # sum over ranks; the identity in one process


class Algorithm(ABC):
    Config: ClassVar[type]
    published: tuple[str, ...]  # entries of nets() that actors receive: all that `act` uses
    groups: ClassVar[dict[str, tuple[str, ...]]]  # parameter group -> entries of nets(); one optimiser and loss each
    stop_above: float = math.inf  # LossOutput.stop beyond this ends the update
    max_grad_norm: float = math.inf  # clip of each group's gradient norm

    def __init__(self, config: Any, net: NetConfig, spec: EnvSpec, lanes: int):
        self.config, self.net, self.spec, self.lanes = config, net, spec, lanes

    @abstractmethod
    def nets(self) -> nn.ModuleDict: ...

    @abstractmethod
    def plan(self) -> DataPlan: ...

    @abstractmethod
    def initial_state(self, nets: nn.ModuleDict, lanes: int) -> Tree:
        """Recurrent state at an episode's start, leaves [lanes, ...]; {} without recurrence."""

    @abstractmethod
    def act(self, nets: nn.ModuleDict, obs: Tree, state: Tree, explore: torch.Generator | None) -> ActOutput:
        """One step for a batch of environments, without gradient; greedy when `explore` is None."""

    @abstractmethod
    def losses(self, nets: nn.ModuleDict, batch: Any) -> LossOutput: ...

    def prepare(self, nets: nn.ModuleDict, batch: Any, reduce: Reduce) -> Any:
        return batch

    def minibatches(self, batch: Any, rng: torch.Generator) -> Iterator[Any]:
        yield batch

    def after_update(self, nets: nn.ModuleDict, batch: Any, reduce: Reduce) -> None:  # noqa: B027 - nothing by default
        """Target networks, statistics: what follows an update on `batch` and precedes publishing."""

    @abstractmethod
    def optimizers(self, parameters: dict[str, nn.Parameter]) -> dict[str, torch.optim.Optimizer]:
        """One optimiser per group, each over one flat parameter."""

    def work(self, nets: nn.ModuleDict) -> float:
        """Multiply-adds of one minibatch's forward pass, roughly: how large a piece of work the learner has."""
        return math.inf

    def schedule(self, progress: float) -> dict[str, float]:
        """Learning rate per group at a share of the run in [0, 1]; also where other schedules are set."""
        return {}
