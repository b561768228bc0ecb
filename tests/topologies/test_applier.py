"""Which gradients the applier takes."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest

from rookery.core.config import GradientConfig
from rookery.topologies.async_grads import SETTLED, Applier


def applier(**limits) -> Applier:
    journal = SimpleNamespace(settle=lambda steps: None)
    config = SimpleNamespace(gradients=GradientConfig(**limits), actors=2)
    return Applier(SimpleNamespace(config=config, journal=journal, resumed_at=None))


def losses(count: int, level: float = 1.0) -> list[float]:
    return list(level + 0.1 * np.random.default_rng(0).standard_normal(count))


def test_old_gradients_are_refused_and_young_ones_are_not():
    taker = applier(max_age=3)
    assert [taker._refuse(age, 1.0) for age in (0, 3, 4)] == ["", "", "stale_gradient"]


def test_a_single_outlier_is_refused_once_the_usual_loss_is_known():
    taker = applier(outlier=6.0)
    assert taker._refuse(0, 100.0) == "", "nobody knows yet what is usual"
    assert not any(taker._refuse(0, loss) for loss in losses(5 * SETTLED))
    assert taker._refuse(0, 5.0) == "outlier_gradient" and taker._refuse(0, 1.0) == ""


def test_without_a_limit_nothing_is_an_outlier():
    taker = applier()
    assert not any(taker._refuse(0, loss) for loss in [*losses(2 * SETTLED), 1e9])


def test_a_loss_that_moves_to_another_level_is_usual_before_long():
    taker = applier(outlier=4.0)
    assert not any(taker._refuse(0, loss) for loss in losses(3 * SETTLED))
    refused = [bool(taker._refuse(0, loss)) for loss in losses(1000, level=3.0)]
    assert refused[0] and not any(refused[500:])


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_leaves_the_usual_one_as_it_is(loss):
    taker = applier(outlier=4.0)
    for value in losses(2 * SETTLED):
        taker._refuse(0, value)
    known = taker._loss, taker._spread
    assert taker._refuse(0, loss) == "" and (taker._loss, taker._spread) == known
