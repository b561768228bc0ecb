"""When a memory may be drawn from, and when it may grow: the ratio of draws to insertions, kept within a band.

As the rate limiter of Reverb (Cassirer et al. 2021), but it never blocks: the caller waits.

The debt is what learning lags behind: (inserted - min_size) * samples_per_insert - sampled, in draws.
A batch may be drawn while the debt is at least -slack: the first one exactly when the memory has reached `min_size`,
then one for every batch / samples_per_insert items. Items may come in while the debt is below batch + slack.
So when sampling is refused the debt is negative, when inserting is refused it is positive: never are both.
"""

from __future__ import annotations

import math


class Limiter:
    def __init__(self, min_size: int, batch: int, samples_per_insert: float, slack: float = 0.0):
        if min_size < 1 or batch < 1:
            raise ValueError(f"min_size {min_size} and batch {batch} must be at least 1")
        if not (0 <= samples_per_insert < math.inf and 0 <= slack < math.inf):
            raise ValueError(f"samples_per_insert {samples_per_insert} and slack {slack} must be finite, not negative")
        self.min_size, self.batch = min_size, batch
        self.samples_per_insert, self.slack = samples_per_insert, slack
        self._inserted = self._sampled = 0

    @property
    def debt(self) -> float:
        """Draws that the insertions so far ask for and that have not been made."""
        return (self._inserted - self.min_size) * self.samples_per_insert - self._sampled

    def can_sample(self, size: int) -> bool:
        """Whether a batch may be drawn from a memory of `size` items."""
        return size >= self.min_size and (not self.samples_per_insert or self.debt >= -self.slack)

    def can_insert(self, size: int) -> bool:
        """Whether more items may come in. A memory that is too small to be drawn from may always grow."""
        return size < self.min_size or not self.samples_per_insert or self.debt < self.batch + self.slack

    def inserted(self, count: int) -> None:
        self._inserted += count

    def sampled(self, count: int) -> None:
        self._sampled += count

    def state(self) -> dict[str, float]:
        return {
            "inserted": self._inserted, "sampled": self._sampled, "samples_per_insert": self.samples_per_insert,
        }  # fmt: skip

    def load(self, state: dict[str, float]) -> None:
        """Go on from there. Another ratio holds from now on: what was due by the old one is not to be made up for."""
        self._inserted, self._sampled = int(state["inserted"]), int(state["sampled"])
        if state.get("samples_per_insert", self.samples_per_insert) != self.samples_per_insert:
            self._sampled = max(0, int((self._inserted - self.min_size) * self.samples_per_insert))
