"""One unroll of every actor: who was told to fill one, who has delivered, and when the round is complete.

The deliveries of a round are handed out together, in the order of the actors, so that what follows does not depend on
the order of arrival.
"""

from __future__ import annotations

from rookery.core.types import Delivery


class Rounds:
    def __init__(self, actors: int):
        self._actors = actors
        self._ordered: set[int] = set()
        self.delivered: dict[int, Delivery] = {}

    @property
    def open(self) -> bool:
        return bool(self._ordered or self.delivered)

    @property
    def complete(self) -> bool:
        return len(self.delivered) == self._actors

    def wants(self, actor: int, going: bool) -> bool:
        """A round that has begun is completed, whether or not another one follows."""
        return (going or self.open) and actor not in self._ordered and actor not in self.delivered

    def order(self, actor: int) -> None:
        self._ordered.add(actor)

    def deliver(self, delivery: Delivery) -> None:
        assert delivery.actor in self._ordered, f"unroll {delivery.sequence} of actor {delivery.actor} was not ordered"
        self._ordered.discard(delivery.actor)
        self.delivered[delivery.actor] = delivery

    def lost(self, actor: int) -> None:
        self._ordered.discard(actor)

    def take(self) -> list[Delivery]:
        """What was delivered, by actor; the next round may begin."""
        taken = [self.delivered[actor] for actor in sorted(self.delivered)]
        self.delivered = {}
        return taken
