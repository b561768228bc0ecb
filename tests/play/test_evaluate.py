"""Evaluation draws the share of random actions it was asked for, uniformly, for every kind of discrete action."""

from __future__ import annotations

import numpy as np
import pytest

from rookery.core.types import ActionSpec
from rookery.play.evaluate import _mixed

ROWS = 20_000
DISCRETE = ActionSpec("discrete", choices=(5,))
MULTI = ActionSpec("multi", choices=(2, 4))


@pytest.mark.parametrize("epsilon", [0.05, 0.5, 1.0])
def test_the_share_of_random_actions(epsilon):
    mixed = _mixed(np.full(ROWS, 4), epsilon, DISCRETE, np.random.default_rng(0))
    counts = np.bincount(mixed, minlength=5) / ROWS
    assert counts[:4] == pytest.approx(epsilon / 5, abs=4 * np.sqrt(epsilon / 5 / ROWS))


def test_the_branches_of_a_choice_are_drawn_together():
    mixed = _mixed(np.tile([0, 0], (ROWS, 1)), 0.5, MULTI, np.random.default_rng(0))
    assert mixed.shape == (ROWS, 2) and mixed.max(0).tolist() == [1, 3]
    untouched = (mixed == 0).all(1).mean()
    assert untouched == pytest.approx(0.5 + 0.5 / 8, abs=0.02)  # not 0.75 * 0.625: a row is drawn whole
