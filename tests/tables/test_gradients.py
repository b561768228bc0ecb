"""Which gradients are applied, in which order, and what is counted of those that are not."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rookery.core.config import GradientConfig
from rookery.core.types import Delivery, GradientReport
from rookery.tables.gradients import SETTLED, GradientTable


def table(**limits) -> GradientTable:
    return GradientTable(2, GradientConfig(**limits))


def losses(count: int, level: float = 1.0) -> list[float]:
    return list(level + 0.1 * np.random.default_rng(0).standard_normal(count))


def test_old_gradients_are_refused_and_young_ones_are_not():
    taker = table(max_age=3)
    assert [taker.refusal(age, 1.0) for age in (0, 3, 4)] == ["", "", "stale_gradient"]


def test_a_single_outlier_is_refused_once_the_usual_loss_is_known():
    taker = table(outlier=6.0)
    assert taker.refusal(0, 100.0) == "", "nobody knows yet what is usual"
    assert not any(taker.refusal(0, loss) for loss in losses(5 * SETTLED))
    assert taker.refusal(0, 5.0) == "outlier_gradient" and taker.refusal(0, 1.0) == ""


def test_without_a_limit_nothing_is_an_outlier():
    taker = table()
    assert not any(taker.refusal(0, loss) for loss in [*losses(2 * SETTLED), 1e9])


def test_a_loss_that_moves_to_another_level_is_usual_before_long():
    taker = table(outlier=4.0)
    assert not any(taker.refusal(0, loss) for loss in losses(3 * SETTLED))
    refused = [bool(taker.refusal(0, loss)) for loss in losses(1000, level=3.0)]
    assert refused[0] and not any(refused[500:])


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_leaves_the_usual_one_as_it_is(loss):
    taker = table(outlier=4.0)
    for value in losses(2 * SETTLED):
        taker.refusal(0, value)
    known = taker._loss, taker._spread
    assert taker.refusal(0, loss) == "" and (taker._loss, taker._spread) == known


def delivery(actor: int, version: int = 0, value: float = 1.0, released: list | None = None, **report) -> Delivery:
    said = GradientReport(steps=4, gradient=True, version=version, loss=1.0, fresh=3, metrics={"q": value})
    for name, number in report.items():
        setattr(said, name, number)
    arrays = {"gradient": np.full(2, value, np.float32)}
    return Delivery(actor, 0, arrays, said, lambda: released.append(actor) if released is not None else None)


def test_gradients_are_applied_in_the_order_of_arrival_and_their_memory_is_given_back_afterwards():
    waiting, released = table(), []
    waiting.insert(delivery(1, value=1.0, released=released))
    waiting.insert(delivery(0, value=2.0, released=released))
    assert len(waiting) == 2 and waiting.due and waiting.patience == 0.0 and waiting.steps == 6
    for value in (1.0, 2.0):
        sample = waiting.next(5, 0.0)
        assert sample.batch.vector.tolist() == [value] * 2 and sample.fresh == 3 and sample.versions.tolist() == [0]
        assert sample.batch.metrics == {"q": value, "gradients_dropped": 0.0}
        before = list(released)
        waiting.update(sample, None, 6)
        assert len(released) == len(before) + 1, "not before it was applied"
    assert released == [1, 0] and waiting.next(5, 0.0) is None and not waiting.due


def test_a_stale_one_is_passed_over_counted_and_given_back():
    waiting, released = table(max_age=2), []
    waiting.insert(delivery(0, version=1, released=released))
    waiting.insert(delivery(1, version=3, released=released))
    sample = waiting.next(4, 0.0)
    assert sample.versions.tolist() == [3] and sample.batch.metrics["gradients_dropped"] == 0.5 and released == [0]
    assert waiting.losses().dropped == {"stale_gradient": 3} and waiting.losses().dropped == {}


def test_what_the_workers_hold_is_in_flight_and_lost_with_them():
    waiting, released = table(), []
    waiting.insert(delivery(0, gradient=False, waiting=7, evicted=2, released=released))
    waiting.insert(delivery(1, gradient=False, waiting=5, evicted=0, released=released))
    assert waiting.steps == 12 and waiting.losses().evicted == 2 and released == [0, 1] and not waiting.due
    assert waiting.lost(0) == 7 and waiting.steps == 5
    waiting.insert(delivery(0, gradient=False, waiting=1, evicted=1))
    assert waiting.losses().evicted == 1, "its successor counts from 0"


def test_a_worker_that_could_draw_more_is_asked_though_no_more_steps_are_taken():
    waiting = table()
    waiting.insert(delivery(0, gradient=False, more=True))
    assert waiting.wants(0, False) and not waiting.wants(1, False) and waiting.wants(1, True)
    assert waiting.due and waiting.patience > 0, "its gradient is still to come"
    waiting.lost(0)
    assert not waiting.wants(0, False) and not waiting.due


def test_after_a_request_to_shut_down_only_what_has_come_is_applied():
    waiting = table()
    waiting.insert(delivery(0, more=True))
    waiting.stop()
    assert waiting.due and waiting.next(0, 0.0) is not None
    assert not waiting.due and not waiting.wants(0, False)
