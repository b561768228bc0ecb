"""What several ranks tell each other before they train: who is ready, who wants to stop, and the books of each.

All ranks make the same decision from one exchange. They train at the same time: if one rank has no batch yet, the
others wait; if a rank will get no more batches, the run ends on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from rookery.core.errors import LearnerError
from rookery.core.reduce import Reduce
from rookery.crews.crew import States
from rookery.crews.states import pack_state, unpack_state
from rookery.metrics.journal import Journal
from rookery.metrics.ledger import RankBooks


class Decision(NamedTuple):
    stopping: int  # exit code of the shutdown that was requested; 0: none was
    going: bool  # more environment steps are to be taken
    checkpoint: bool  # one is due
    ready: bool = True  # every rank has something to train on
    spent: bool = False  # some rank will not have anything to train on any more
    changes: Mapping[str, float] = MappingProxyType({})  # step sizes that a callback has set, by parameter group


@dataclass
class Ballot:
    stopping: int
    checkpoint: bool
    ready: bool
    spent: bool
    books: RankBooks
    stop: str = ""  # why a callback ends the run
    reached: tuple[int, float] | None = None  # the target, by an evaluation
    changes: dict[str, float] = field(default_factory=dict)


@dataclass
class Saved:
    """A rank's part of a checkpoint."""

    sequences: list[int]
    states: list[Any]
    books: RankBooks
    weights: int  # digest


def vote(
    reduce: Reduce, journal: Journal, stopping: int, checkpoint: bool, held: int | None, spent: bool, stop: str = "",
    changes: Mapping[str, float] = MappingProxyType({}),
) -> Decision:  # fmt: skip
    """Exchange this, and the books; the decision is the same on every rank. `held`: steps this rank will train on."""
    books = journal.own(held or 0)
    ballot = Ballot(stopping, checkpoint, held is not None, spent, books, stop, journal.reached, dict(changes))
    ballots = _exchanged(reduce, ballot, Ballot)
    journal.agree([each.books for each in ballots])
    journal.stop_reason = journal.stop_reason or next((each.stop for each in ballots if each.stop), "")
    journal.reach(next((each.reached for each in ballots if each.reached is not None), None))
    stopping = max(each.stopping for each in ballots)
    return Decision(
        stopping=stopping,
        going=not stopping and journal.finished() is None,
        checkpoint=any(each.checkpoint for each in ballots),
        ready=all(each.ready for each in ballots),
        spent=any(each.spent for each in ballots),
        changes={group: lr for each in ballots for group, lr in each.changes.items()},
    )


def gather_states(
    reduce: Reduce, journal: Journal, states: States, sequences: list[int], weights: int
) -> tuple[States, list[int]]:
    """The states of the actors of all ranks and the unrolls that they have delivered; the books are exchanged too.

    LearnerError on all ranks if the digests of their weights differ.
    """
    packed = [None if state is None else pack_state(state) for state in states]
    parts = _exchanged(reduce, Saved(sequences, packed, journal.own(), weights), Saved)
    if other := next((rank for rank, part in enumerate(parts) if part.weights != parts[0].weights), 0):
        raise LearnerError(
            f"the weights of rank {other} are not those of rank 0 any more: ranks apply the same gradients, so they "
            "compute differently. Use the same processors and versions of torch on all machines; the last checkpoint, "
            "at which they were equal, is kept"
        )
    journal.agree([part.books for part in parts])
    whole: States = [None if state is None else unpack_state(state) for part in parts for state in part.states]
    return whole, [number for part in parts for number in part.sequences]


def _exchanged(reduce: Reduce, own: Any, kind: Any) -> list[Any]:
    return [msgspec.msgpack.decode(part, type=kind) for part in reduce.gather(msgspec.msgpack.encode(own))]
