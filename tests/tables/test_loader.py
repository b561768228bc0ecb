"""Threads that draw ahead: what they draw is taken once, and what goes wrong in them is not lost."""

from __future__ import annotations

from itertools import count

import pytest

from rookery.tables.loader import Loader


def taken(loader: Loader, many: int) -> list[int]:
    got = []
    while len(got) < many:
        got += [sample for sample in [loader.get(5.0)] if sample is not None]
    return got


@pytest.mark.parametrize("threads", [1, 3])
def test_every_batch_is_handed_out_once(threads):
    numbers = count()
    loader = Loader(lambda: next(numbers), 2, threads)
    got = taken(loader, 50)
    loader.close()
    drawn = next(numbers)
    assert len(set(got)) == 50 and max(got) < drawn and drawn - 50 <= 2 + threads, "no more than it may draw ahead"
    loader.check()


def test_an_error_reaches_whoever_asks_for_the_next_batch():
    numbers = iter([1, 2])
    loader = Loader(lambda: next(numbers), 8, 1)
    with pytest.raises(StopIteration):
        while True:
            loader.get(0.1)
    loader.close()


def test_an_error_behind_the_last_batch_is_not_lost():
    loader = Loader(lambda: 1 / 0, 2, 1)
    loader.close()
    with pytest.raises(ZeroDivisionError):
        loader.check()
