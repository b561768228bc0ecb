"""The moving window over finished episodes that "the return" of a run means: mean and deviation of the last hundred.

Recomputed from the window each time, so that a resumed run shows the same digits; no running sums, no drift.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping
from typing import Any


class ReturnWindow:
    def __init__(self, size: int = 100):
        self.size = size
        self.episodes = 0  # of the whole run
        self._returns: deque[float] = deque(maxlen=size)
        self._lengths: deque[int] = deque(maxlen=size)
        self._infos: dict[str, deque[float]] = {}  # what environments told of their episodes, by name

    def add(self, total: float, length: int, info: Mapping[str, float] | None = None) -> None:
        self._returns.append(float(total))
        self._lengths.append(int(length))
        self.episodes += 1
        for name, value in (info or {}).items():
            self._infos.setdefault(name, deque(maxlen=self.size)).append(float(value))

    def __len__(self) -> int:
        """Episodes in the window."""
        return len(self._returns)

    @property
    def full(self) -> bool:
        """A target return counts only when the window is full."""
        return len(self) == self.size

    @property
    def return_mean(self) -> float | None:
        return _mean(self._returns)

    @property
    def return_std(self) -> float | None:
        mean = self.return_mean
        if mean is None:
            return None
        return math.sqrt(math.fsum((total - mean) ** 2 for total in self._returns) / len(self._returns))

    @property
    def length_mean(self) -> float | None:
        return _mean(self._lengths)

    @property
    def info_means(self) -> dict[str, float]:
        return {name: math.fsum(values) / len(values) for name, values in self._infos.items()}

    def to_dict(self) -> dict[str, Any]:
        return {
            "size": self.size,
            "episodes": self.episodes,
            "returns": list(self._returns),
            "lengths": list(self._lengths),
            "infos": {name: list(values) for name, values in self._infos.items()},
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> ReturnWindow:
        window = cls(state["size"])
        window._returns.extend(state["returns"])
        window._lengths.extend(state["lengths"])
        for name, values in state.get("infos", {}).items():  # checkpoints of earlier versions have none
            window._infos[name] = deque(values, maxlen=window.size)
        window.episodes = state["episodes"]
        return window


def _mean(values: Collection[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
