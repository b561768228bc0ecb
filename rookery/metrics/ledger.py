"""The ledger: every environment step ends as trained, evicted, dropped (with a reason) or in flight. It must balance.

With several ranks each keeps a ledger of its own, and they exchange them: what counts for the run is the sum, which all
of them know. One rank's ledger need not balance by itself: after a resume, rank 0 goes on with the run's.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from rookery.core.types import Episode

ROUNDS = 200  # rounds whose times are kept


@dataclass
class Ledger:
    """Environment steps, by their use."""

    collected: int = 0
    trained: int = 0
    evicted: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    in_flight: int = 0

    def drop(self, steps: int, reason: str) -> None:
        if steps:
            self.dropped[reason] = self.dropped.get(reason, 0) + steps

    @property
    def imbalance(self) -> int:
        return self.collected - self.trained - self.evicted - sum(self.dropped.values()) - self.in_flight

    def __add__(self, other: Ledger) -> Ledger:
        both = Ledger(
            self.collected + other.collected, self.trained + other.trained, self.evicted + other.evicted,
            dict(self.dropped), self.in_flight + other.in_flight,
        )  # fmt: skip
        for reason, steps in other.dropped.items():
            both.drop(steps, reason)
        return both

    def as_dict(self) -> dict[str, Any]:
        return {
            "collected": self.collected, "trained": self.trained, "evicted": self.evicted,
            "dropped": dict(self.dropped), "in_flight": self.in_flight,
        }  # fmt: skip


@dataclass
class Round:
    """Seconds that one rank spent on one round, and whether its rollout was cut."""

    rollout: float = 0.0
    learn: float = 0.0
    wait: float = 0.0  # in exchanges: for the others, and for the data to travel
    cut: bool = False


@dataclass
class RankBooks:
    """What one rank tells the others."""

    ledger: Ledger
    restarts: int
    ended: list[Episode]  # since the last time
    round: Round | None  # since the last time; None: no round has ended


class Ranks:
    """What all ranks of a run know, and what this one has to tell."""

    def __init__(self) -> None:
        self.ledger, self.restarts = Ledger(), 0  # of all ranks
        self.ended: list[Episode] = []  # episodes of this rank that it has not told yet
        self.round: Round | None = None  # the same of its last round
        self.cut = False  # whether a rollout of that was cut short
        self._rounds: list[deque[Round]] = []  # by rank

    def take(self, books: list[RankBooks]) -> None:
        self.ledger = sum((each.ledger for each in books), Ledger())
        self.restarts = sum(each.restarts for each in books)
        self._rounds = self._rounds or [deque(maxlen=ROUNDS) for _ in books]
        for rounds, each in zip(self._rounds, books):
            if each.round is not None:
                rounds.append(each.round)

    def summary(self) -> dict[str, Any]:
        """Times of the last rounds, by rank: seconds."""
        return self.stats() | {
            "rollout_s": [[each.rollout for each in rounds] for rounds in self._rounds],
            "wait_s": [[each.wait for each in rounds] for rounds in self._rounds],
            "learn_s": [each.learn for each in self._rounds[0]] if self._rounds else [],
        }

    def stats(self) -> dict[str, Any]:
        """Which rank is the slowest, what share of the time the others lose to it, and how many rollouts were cut."""
        rounds = list(zip(*self._rounds))
        if not rounds:
            return {"size": len(self._rounds)}
        means = [sum(each.rollout for each in column) / len(column) for column in self._rounds]
        longest = [max(each.rollout for each in row) for row in rounds]
        idle = sum(top - sum(each.rollout for each in row) / len(row) for top, row in zip(longest, rounds))
        wall = sum(top + max(each.learn for each in row) for top, row in zip(longest, rounds))
        cut = sum(each.cut for row in rounds for each in row) / (len(rounds) * len(means))
        return {
            "size": len(means), "slowest": max(range(len(means)), key=means.__getitem__),
            "lost": idle / max(1e-9, wall), "cut": cut,
        }  # fmt: skip
