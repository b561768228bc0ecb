"""What the journal of a run knows of its evaluations: the newest, the best, the curve, and those that gave no result.

Records of kind "eval" in metrics.jsonl are the source: a resumed run reads its own again. Their `env_steps` are those
of the weights, so where an evaluation runs beside the training, they are older than the records around them. Not here:
who evaluates, and when (`run/evaluation.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

KIND = "eval"
LARGEST = 1e100
SHOWN = ("env_steps", "return_mean", "return_std", "episodes")


class Evaluated:
    def __init__(self) -> None:
        self.done = self.skipped = self.failed = 0
        self.last: dict[str, Any] | None = None
        self.best: dict[str, Any] | None = None
        self.curve: list[tuple[int, float]] = []

    def add(self, record: Mapping[str, Any]) -> None:
        shown = {name: record.get(name) for name in SHOWN}
        self.done, self.last = self.done + 1, shown
        if self.best is None or shown["return_mean"] >= self.best["return_mean"]:  # of equals, the newest
            self.best = shown
        self.curve.append((record["env_steps"], record["return_mean"]))
        if len(self.curve) > 2000:  # as the journal thins its own
            self.curve = self.curve[::2]

    def restore(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Those of the run before it was resumed. The file may be damaged: what is no evaluation is left out."""
        for record in records:
            if sound(record):
                self.add(record)

    def shown(self) -> dict[str, Any] | None:
        """For the panel; None as long as there was none."""
        return None if self.last is None else self.last | {"best": self.best}

    def summary(self) -> dict[str, Any]:
        counts = {"done": self.done, "skipped": self.skipped, "failed": self.failed}
        return {"last": self.last, "best": self.best} | counts

    @property
    def asked(self) -> bool:
        return bool(self.done or self.skipped or self.failed)


def sound(record: Mapping[str, Any]) -> bool:
    """Whether a record of a file is one of an evaluation."""
    steps, mean = record.get("env_steps"), record.get("return_mean")
    whole = isinstance(steps, int) and not isinstance(steps, bool) and 0 <= steps < 2**53
    return whole and isinstance(mean, int | float) and abs(mean) < LARGEST  # NaN is not
