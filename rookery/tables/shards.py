"""Several replay memories that draw as one, for a memory that is too large, or too busy, for one process.

Each shard holds the items of some actors. How many items of a batch a shard draws follows from its share of the whole
mass, so item i is expected n * P(i) times, with the P(i) of a single memory (Schaul et al. 2016); importance weights
are computed here, from masses and probabilities that come with the items. So is the ratio of draws to insertions
(`limiter.py`), over all shards. New priorities go back to the shard that drew the item, by its id.

Nothing waits: shards are asked, and answers are heard by the next call (`wake` is called, from another thread, when one
comes). Parcels that shards have not taken in yet are not released, so actors never run far ahead. A lost shard costs
its items, which are counted; until another takes its place, its actors' items go to the other shards.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from rookery.core.errors import LearnerError, UsageError
from rookery.core.types import Delivery, Replay, Sample, Sequences, Transitions
from rookery.tables.drawn import as_batch, importance_weights
from rookery.tables.front import Front
from rookery.tables.service import Service, ServiceLost
from rookery.tables.shard import Answer, Books, Part
from rookery.tables.table import POLL, Losses, Plain

AHEAD = 3  # unrolls per actor that runs ahead
PUBLISH = 0.1  # seconds between two publications of weights
END = 30.0  # seconds for what was asked to be answered at the end

Done = Callable[[Answer | None], None]  # is told of the answer; None: the shard is gone


class _Asked(NamedTuple):
    future: Future[Answer]
    life: int  # of the shard that was asked
    at: float
    done: Done


@dataclass
class _Place:
    """One shard after the other, as this table knows it."""

    index: int
    handle: Service
    life: int = 0
    up: bool = True  # at the last look
    books: Books = field(default_factory=Books)
    asked: deque[_Asked] = field(default_factory=deque)
    stats: dict[str, float] = field(default_factory=dict)
    before: tuple[int, int] = (0, 0)  # items evicted and gone in earlier lives


class _Piece(NamedTuple):
    """What one shard has drawn for a batch."""

    shard: int
    life: int
    part: Part
    share: float  # of the whole mass that its items were drawn from


@dataclass(eq=False)
class _Draw:
    """A batch under way."""

    progress: float
    pieces: list[_Piece] = field(default_factory=list)
    asked: int = 0  # shards that have not answered
    missing: int = 0  # items that a shard should have drawn, and was lost or empty
    size: int = 0  # of the memory
    lowest: float = 0.0  # smallest P(i) in it
    batch: Future[Transitions | Sequences] | None = None

    @property
    def fresh(self) -> int:
        return sum(piece.part.fresh for piece in self.pieces)


class ShardedReplay(Plain):
    rounds, ahead, publish_every = False, AHEAD, PUBLISH
    small_updates, paced_by_env = True, True
    wake: Callable[[], None] | None = None  # called from another thread when there is something to hear
    woken: Callable[[], None] | None = None  # called before answers are heard

    def __init__(self, handles: Sequence[Service], plan: Replay, actors: int, seed: int, deadline: float = 60.0):
        """`deadline`: seconds that a shard may take to answer, and that all may be away."""
        if plan.memory.sampler == "rank":
            raise UsageError(
                "sampler 'rank' needs the order of all items, which parts of a memory do not know: use "
                "algo.replay.sampler proportional, or algo.replay.shards 1"
            )
        self.config, self.front = plan.memory, Front(plan.memory, actors, seed)
        self._sequences, self._deadline = plan.sequence > 0, deadline
        self._places = [_Place(index, handle) for index, handle in enumerate(handles)]
        self._losses = Losses()
        self._inserting = 0  # environment steps in parcels that were handed to a shard, which has not answered
        self._ahead = 0  # steps in items that were drawn and not trained on yet
        self._inserted = self._sampled = 0  # items, since this process started
        self._draws: deque[_Draw] = deque()
        self._maker = ThreadPoolExecutor(1, "shards")  # puts batches together
        self._progress = 0.0
        self._stopped = False
        self._up_at = time.monotonic()  # when a shard was last there

    def __len__(self) -> int:
        return sum(place.books.size for place in self._places)

    @property
    def steps(self) -> int:
        return sum(place.books.steps_waiting for place in self._places) + self._inserting + self._ahead

    @property
    def due(self) -> bool:
        """What a ratio still asks for. Without one there is no end to it, and nothing is due."""
        if self._stopped or not self.config.samples_per_insert:
            return False
        return bool(self._draws) or (self.front.limiter.debt > 0 and self._can_sample())

    @property
    def settled(self) -> bool:
        return True

    @property
    def patience(self) -> float:
        return 0.0 if self._ready else POLL

    @property
    def _ready(self) -> bool:
        return any(draw.batch is not None and draw.batch.done() for draw in self._draws)

    def _size(self) -> int:
        """The size that the ratio waits for: where items have had to go, a shard is as full as it gets."""
        full = all(place.books.full for place in self._places if place.handle.up)
        return max(len(self), self.config.min_size) if full and len(self) else len(self)

    def _can_sample(self) -> bool:
        return self.front.limiter.can_sample(self._size()) and self._mass() > 0

    def _mass(self) -> float:
        return sum(place.books.mass for place in self._places if self._here(place))

    def _here(self, place: _Place) -> bool:
        """Whether the shard whose books these are can be asked."""
        return place.handle.up and place.handle.life == place.life

    # In

    def wants(self, actor: int, going: bool) -> bool:
        return going and self.front.limiter.can_insert(self._size()) and any(p.handle.up for p in self._places)

    def ordered(self, actor: int, version: int) -> None:
        pass

    def insert(self, delivery: Delivery) -> None:
        self.hear()
        count = int(delivery.arrays["count"][0])
        steps = int(delivery.arrays["steps"][:count].sum())

        def taken(answer: Answer | None) -> None:
            self._inserting -= steps
            if answer is None:
                self._losses.drop(steps, "shard")  # it is gone, or the actor is before its parcel was fetched
            delivery.release()

        self._inserting += steps
        self._inserted += count
        self.front.limiter.inserted(count)
        home, largest = self._home(delivery.actor), max(place.books.largest for place in self._places)
        parcel = delivery.arrays if delivery.reference is None else delivery.reference
        self._ask(home, taken, "insert", parcel, delivery.actor, largest)

    def _home(self, actor: int) -> _Place:
        """The shard of this actor. If it is away: the one with the fewest actors, from now on."""
        home = self._places[self.front.homes[actor]]
        if home.handle.up:
            return home
        up = [place for place in self._places if place.handle.up]
        if not up:
            return home  # what it is asked fails, and is counted
        own = min(self._places, key=lambda place: (place.index - actor) % len(self._places))
        counts = np.bincount(self.front.homes, minlength=len(self._places))
        other = own if own.handle.up else min(up, key=lambda place: counts[place.index])
        self.front.homes[actor] = other.index
        self._ask(other, _ignore, "forget", actor)  # of the frames it has had there before, some are missing
        return other

    def _settle_back(self, place: _Place) -> None:
        """A shard is there again, empty: its own actors come back to it."""
        for actor in range(place.index, len(self.front.homes), len(self._places)):
            if self.front.homes[actor] != place.index:
                self.front.homes[actor] = place.index
                self._ask(place, _ignore, "forget", actor)

    def lost(self, actor: int) -> int:
        self._ask(self._places[self.front.homes[actor]], _ignore, "forget", actor)
        return 0

    # Out

    def next(self, version: int, progress: float) -> Sample | None:
        self._progress = progress
        self.hear()
        if self._stopped:
            return None
        self._draw_ahead()
        for draw in self._draws:
            if draw.batch is not None and draw.batch.done():
                self._draws.remove(draw)
                self._ahead -= draw.fresh
                batch = draw.batch.result()
                return Sample(batch, batch.version.numpy(), draw.fresh, draw.pieces)
        return None

    def _draw_ahead(self) -> None:
        for draw in self._draws:
            if draw.missing and not draw.asked:
                self._draw(draw, draw.missing)
        while len(self._draws) < self.config.prefetch and self._can_sample():
            draw = _Draw(self._progress)
            self._draws.append(draw)
            self._sampled += self.config.batch
            self.front.limiter.sampled(self.config.batch)
            self._draw(draw, self.config.batch)

    def _draw(self, draw: _Draw, count: int) -> None:
        """Have so many items drawn: the mass of all shards is cut into as many equal ranges, with one in each."""
        here = [place for place in self._places if self._here(place) and place.books.mass > 0]
        draw.missing = 0 if here else count
        if not here:
            return
        ends = np.cumsum([place.books.mass for place in here])
        total = ends[-1]
        points = (np.arange(count) + self.front.rng.random(count)) * (total / count)
        counts = np.bincount(np.searchsorted(ends, points, "right").clip(max=len(here) - 1), minlength=len(here))
        draw.size, draw.lowest = len(self), min(place.books.lowest for place in here) / total
        for place, part, mass in zip(here, counts.tolist(), np.diff(ends, prepend=0.0)):
            if part:
                draw.asked += 1
                self._ask(place, self._drawn(draw, place, part, float(mass / total)), "draw", part)

    def _drawn(self, draw: _Draw, place: _Place, count: int, share: float) -> Done:
        life = place.handle.life

        def done(answer: Answer | None) -> None:
            draw.asked -= 1
            if answer is None or answer.value is None:
                draw.missing += count
            else:
                draw.pieces.append(_Piece(place.index, life, answer.value, share))
                self._ahead += answer.value.fresh
            if not draw.asked:
                if draw.missing:
                    self._draw(draw, draw.missing)
                else:
                    draw.batch = self._maker.submit(self._made, draw)
                    draw.batch.add_done_callback(self._rung)

        return done

    def _made(self, draw: _Draw) -> Transitions | Sequences:
        """The batch of a draw; in a thread of its own."""
        probability = np.concatenate([piece.part.probability * piece.share for piece in draw.pieces])
        lowest = min(draw.lowest, float(probability.min()))  # a priority may have become smaller meanwhile
        weight = importance_weights(self.config, probability, draw.progress, draw.size, lambda: lowest)
        columns = {}
        for path in draw.pieces[0].part.columns:
            by_time = self._sequences and path.partition("/")[0] not in ("state", "version")
            columns[path] = np.concatenate([piece.part.columns[path] for piece in draw.pieces], axis=int(by_time))
        for piece in draw.pieces:
            piece.part.columns.clear()  # they may be views of memory that others wait for
        return as_batch(columns, weight, self._sequences)

    def update(self, sample: Sample, priorities: np.ndarray | None, version: int) -> None:
        if priorities is not None:
            self._set_priorities(sample.keys, priorities)
        if self.config.remover == "soft" and version % self.config.remove_every == 0:
            for place in filter(self._here, self._places):
                self._ask(place, _ignore, "trim")

    def _set_priorities(self, pieces: Sequence[_Piece], priorities: np.ndarray) -> None:
        begin = 0
        for piece in pieces:
            place, keys = self._places[piece.shard], piece.part.keys
            own, begin = priorities[begin : begin + len(keys.slot)], begin + len(keys.slot)
            if self._here(place) and piece.life == place.life:
                self._ask(place, _ignore, "update", keys.slot, keys.id, own)

    # What shards are asked, and answer

    def ask_each(self, op: str, args: Callable[[int], tuple[Any, ...]]) -> list[Future[Answer]]:
        """Ask every shard; `args(index)`. The answers are for the caller, the books in them for `hear`."""
        for place in self._places:
            self._ask(place, _ignore, op, *args(place.index))
        return [place.asked[-1].future for place in self._places]

    def _ask(self, place: _Place, done: Done, op: str, *args: Any) -> None:
        life, future = place.handle.life, place.handle.ask(op, *args)
        place.asked.append(_Asked(future, life, time.monotonic(), done))
        future.add_done_callback(self._rung)

    def _rung(self, future: Future) -> None:
        if self.wake is not None:
            self.wake()

    def hear(self) -> None:
        """Take the answers that have come, in order; notice what was lost."""
        if self.woken is not None:
            self.woken()
        now = time.monotonic()
        for place in self._places:
            place.handle.look()
            while place.asked and place.asked[0].future.done():
                self._answered(place, place.asked.popleft())
            if place.handle.life != place.life and not place.asked:
                self._lose(place, place.handle.life)
            late = bool(place.asked) and now - place.asked[0].at > self._deadline
            if late and place.asked[0].life == place.handle.life:  # else it was ended, and its calls fail soon
                place.handle.kill(f"it has not answered for {self._deadline:g} s")
            was_up, place.up = place.up, self._here(place)
            if place.up:
                self._up_at = now
            if place.up and not was_up:
                self._settle_back(place)
        if now - self._up_at > self._deadline:
            raise LearnerError(f"no part of the replay memory has been there for {self._deadline:g} s")

    def _answered(self, place: _Place, asked: _Asked) -> None:
        if asked.life > place.life:
            self._lose(place, asked.life)
        try:
            answer = asked.future.result()
        except ServiceLost:
            asked.done(None)
            return
        if asked.life == place.life:
            self._losses.evicted += answer.books.steps_evicted - place.books.steps_evicted
            place.books = answer.books
        asked.done(answer)

    def _lose(self, place: _Place, life: int) -> None:
        """The items of that shard are gone, with the steps that were never drawn."""
        books = place.books
        self._losses.drop(books.steps_waiting, "shard")
        place.before = place.before[0] + books.evicted + books.size, place.before[1] + books.gone
        place.books, place.life = Books(), life

    # Books

    def losses(self) -> Losses:
        return self._losses.taken()

    def stats(self) -> dict[str, float]:
        """Ages and priorities are as the shards told after the last call."""
        told = [place for place in self._places if place.stats and place.books.size]
        for place in filter(self._here, self._places):
            self._ask(place, partial(_keep, place), "stats")
        size = len(self)
        found = {
            "size": size, "inserted": self._inserted, "sampled": self._sampled,
            "sample_insert_ratio": self._sampled / max(self._inserted, 1),
            "gone": sum(place.before[1] + place.books.gone for place in self._places),
            "evicted": sum(place.before[0] + place.books.evicted for place in self._places),
            "shards": sum(place.handle.up for place in self._places),
            "shards_lost": sum(place.life for place in self._places),
        }  # fmt: skip
        if told:
            found["age_mean"] = sum(place.stats["age_mean"] for place in told) / len(told)
            for key in ("age_max", "priority_max"):
                found[key] = max(place.stats[key] for place in told)
            known = sum(place.stats["size"] for place in told)
            found["priority_mean"] = sum(place.stats["priority_mean"] * place.stats["size"] for place in told) / known
        return found

    def stop(self) -> None:
        self._stopped = True

    def close(self) -> None:
        """What was asked is answered first, so that the books are those of the end."""
        until = time.monotonic() + END
        while (left := until - time.monotonic()) > 0:
            self.hear()
            if not (waiting := [asked.future for place in self._places for asked in place.asked]):
                break
            wait(waiting, min(left, POLL), "FIRST_COMPLETED")
        self._maker.shutdown()


def _ignore(answer: Answer | None) -> None:
    pass


def _keep(place: _Place, answer: Answer | None) -> None:
    place.stats = {} if answer is None else answer.value
