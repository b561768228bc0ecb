"""Masks as arrays, against plain loops."""

from __future__ import annotations

import numpy as np
import pytest
from support_masks import masks

from rookery.core.legal import all_if_none, includes, nth, possible, random_legal

SHAPES = [(4,), (3, 5), (2, 2, 2), (1, 6)]


def parts(row: np.ndarray, choices: tuple[int, ...]) -> list[np.ndarray]:
    return np.split(row, np.cumsum(choices)[:-1])


@pytest.mark.parametrize("choices", SHAPES)
def test_an_action_is_possible_if_every_branch_has_a_legal_choice(choices):
    mask = np.random.default_rng(0).random((50, 4, sum(choices))) < 0.4
    expected = [[all(part.any() for part in parts(row, choices)) for row in rows] for rows in mask]
    assert possible(mask, choices).tolist() == expected
    filled = all_if_none(mask, choices)
    for row, full in zip(mask.reshape(-1, sum(choices)), filled.reshape(-1, sum(choices))):
        for part, now in zip(parts(row, choices), parts(full, choices)):
            assert now.all() if not part.any() else (now == part).all()


@pytest.mark.parametrize("choices", SHAPES)
def test_what_is_included(choices):
    rng = np.random.default_rng(1)
    mask = rng.random((200, sum(choices))) < 0.5
    action = np.stack([rng.integers(n, size=200) for n in choices], 1)
    expected = [
        all(part[a] or not part.any() for part, a in zip(parts(row, choices), each))
        for row, each in zip(mask, action.tolist())
    ]
    assert includes(mask, action, choices).tolist() == expected and 0 < sum(expected) < 200
    if len(choices) == 1:
        assert includes(mask, action[:, 0], choices).tolist() == expected


def test_a_draw_is_divided_evenly_between_what_is_legal_also_at_its_ends():
    mask = np.array([[False, True, False, True, True]] * 6)
    largest = np.nextafter(np.float32(1), np.float32(0))
    draw = np.array([0.0, 0.33, 0.34, 0.66, 0.67, largest], np.float32)
    assert nth(mask, draw).tolist() == [1, 1, 3, 3, 4, 4]


@pytest.mark.parametrize("choices", SHAPES)
def test_random_actions_are_legal_and_uniform(choices):
    rng = np.random.default_rng(2)
    one = masks(1, choices, rng)
    rows = 6000
    action = random_legal(np.repeat(one, rows, 0), choices, rng)
    for branch, part in enumerate(parts(one[0], choices)):
        share = np.bincount(action[:, branch], minlength=len(part)) / rows
        assert np.abs(share - part / part.sum()).max() < 0.03 and (share[~part] == 0).all()
