"""Gradients that workers have computed, waiting to be applied in the order of arrival (Gorila, Nair et al. 2015; A3C).

A gradient that was computed on weights that are too old, or whose loss is an outlier, is dropped and counted. The
replay memories stay with the workers; what they hold, and what left them, is counted here by their reports.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

import numpy as np
import torch

from rookery.core.config import GradientConfig
from rookery.core.types import Delivery, GradientReport, Sample
from rookery.tables.table import POLL, Losses, Plain

SETTLED = 100  # gradients before the usual loss is known well enough to call another one an outlier


class Gradient(NamedTuple):
    vector: torch.Tensor  # the parameter groups one after the other
    metrics: dict[str, float]


class GradientTable(Plain):
    rounds = False

    def __init__(self, actors: int, limits: GradientConfig, paced_by_env: bool = True):
        """`paced_by_env`: as the same plan has it in one process, or one worker alone would not repeat such a run."""
        self.limits, self.paced_by_env = limits, paced_by_env
        self._waiting: deque[Delivery] = deque()
        self._more = [False] * actors  # whether a worker could draw another batch without acting
        self._held = [0] * actors  # steps in each worker's memory that were not trained on yet
        self._evicted = [0] * actors  # steps that left it untrained, as the present worker counts
        self._losses = Losses()
        self._loss = self._spread = 0.0  # moving mean and mean deviation of the loss
        self._seen = self._taken = self._refused = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def steps(self) -> int:
        return sum(self._held) + sum(_report(delivery).fresh for delivery in self._waiting)

    @property
    def due(self) -> bool:
        return bool(self._waiting) or any(self._more)

    @property
    def settled(self) -> bool:
        return True

    @property
    def patience(self) -> float:
        return 0.0 if self._waiting else POLL

    def wants(self, actor: int, going: bool) -> bool:
        """While there are steps to take, and then as long as the worker can draw what is due for those it took."""
        return going or self._more[actor]

    def ordered(self, actor: int, version: int) -> None:
        pass

    def insert(self, delivery: Delivery) -> None:
        actor, report = delivery.actor, _report(delivery)
        self._losses.evicted += report.evicted - self._evicted[actor]
        self._evicted[actor], self._held[actor], self._more[actor] = report.evicted, report.waiting, report.more
        if report.gradient:
            self._waiting.append(delivery)
        else:  # the worker only acted
            delivery.release()

    def next(self, version: int, progress: float) -> Sample | None:
        while self._waiting:
            delivery = self._waiting.popleft()
            report = _report(delivery)
            if not (reason := self.refusal(version - report.version, report.loss)):
                self._taken += 1
                metrics = report.metrics | {"gradients_dropped": self._refused / (self._taken + self._refused)}
                vector = delivery.arrays["gradient"]  # a copy where it is read-only: it is clipped in place
                gradient = Gradient(torch.from_numpy(vector if vector.flags.writeable else vector.copy()), metrics)
                return Sample(gradient, np.array([report.version]), report.fresh, delivery)
            self._refused += 1
            self._losses.drop(report.fresh, reason)
            delivery.release()
        return None

    def refusal(self, age: int, loss: float) -> str:
        """Why a gradient is not applied, or nothing."""
        if age > self.limits.max_age:
            return "stale_gradient"
        if not math.isfinite(loss):
            return ""  # the learner refuses it by itself
        limit = self._loss + self.limits.outlier * self._spread
        outlier = self.limits.outlier > 0 and self._seen >= SETTLED and loss > limit
        # Outliers count too, cut to the limit: if the loss stays up there, that is the usual loss before long.
        loss = min(loss, limit) if outlier else loss
        rate = 1 / min(SETTLED, self._seen + 1)
        self._spread += rate * (abs(loss - self._loss) - self._spread)
        self._loss += rate * (loss - self._loss)
        self._seen += 1
        return "outlier_gradient" if outlier else ""

    def update(self, sample: Sample, priorities: np.ndarray | None, version: int) -> None:
        sample.keys.release()

    def lost(self, actor: int) -> int:
        """Its memory went with it."""
        held, self._held[actor] = self._held[actor], 0
        self._evicted[actor], self._more[actor] = 0, False
        return held

    def losses(self) -> Losses:
        return self._losses.taken()

    def stop(self) -> None:
        self._more = [False] * len(self._more)  # the workers' memories are not part of checkpoints


def _report(delivery: Delivery) -> GradientReport:
    assert isinstance(delivery.report, GradientReport), delivery.report
    return delivery.report
