"""Environments of different speed, for the crew that acts for those that are ready."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rookery.envs.scripted import Counter

BEHIND = 5  # steps of environment 0 for each of environment 1
PATIENCE = 2.0  # seconds: longer only where environment 0 does not step


class Paced(Counter):
    """Environment i of a run has episodes of 3 + i steps.

    With `clock`, a file, environment 1 takes a step when environment 0 has taken 5: slow by count and not by time.
    With `broken`, environment 1 fails at that step of each episode.
    """

    metadata = {"episode_metrics": ("lane",)}  # noqa: RUF012

    def __init__(self, clock: str, broken: int):
        super().__init__(ends=("terminated", "truncated"))
        self.clock, self.broken, self.lane = Path(clock) if clock else None, broken, 0

    def number_lanes(self, first: int) -> None:
        self.lane, self.lengths = first, (3 + first,)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.clock is not None:
            self._keep_pace(self.clock)
        if self.lane == 1 and self.broken and self.t + 1 == self.broken:
            raise ValueError("out of cheese")
        *result, _ = super().step(action)
        return (*result, {"lane": float(self.lane)})

    def _keep_pace(self, clock: Path) -> None:
        """The length of the file is the number of steps that environment 0 has taken."""
        if self.lane == 0:
            with clock.open("ab") as file:
                file.write(b".")
        elif self.lane == 1:
            clock.touch()
            wanted, until = clock.stat().st_size + BEHIND, time.monotonic() + PATIENCE
            while clock.stat().st_size < wanted and time.monotonic() < until:
                time.sleep(0.001)


def paced(clock: str = "", broken: int = 0) -> Paced:
    return Paced(clock, broken)
