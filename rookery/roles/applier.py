"""The learner's role where others compute the gradients: it owns the weights and the one optimiser, and applies.

It looks like a learner to the training loop; what it is handed is a gradient instead of a batch.
"""

from __future__ import annotations

import torch

from rookery.core.errors import NumericError
from rookery.core.types import StepReport
from rookery.roles.learner import Learner
from rookery.roles.weights import AllWeights
from rookery.tables.gradients import Gradient


class Applier:
    def __init__(self, learner: Learner):
        self.learner, self._weights = learner, AllWeights(learner)
        self.size, self.floats = self._weights.gradients, self._weights.size  # of a gradient, and of the weights

    @property
    def version(self) -> int:
        return self.learner.version

    @property
    def updates(self) -> int:
        return self.learner.updates

    def step(self, batch: Gradient, progress: float, tell: bool = True) -> StepReport:
        try:
            norms = self.learner.accept(batch.vector, progress)
        except NumericError as error:
            error.evidence = {"gradient": batch.vector}
            raise
        return StepReport(batch.metrics | {name: float(norm) for name, norm in norms.items()})

    def read(self) -> torch.Tensor:
        return self._weights.read()

    def ensure_finite(self) -> None:
        self.learner.ensure_finite()
