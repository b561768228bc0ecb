"""Masks of legal actions as arrays: [..., sum(choices)] bool, the choices of all branches of an action in a row.

Where something is chosen at random, and where masks come in. How networks apply them is in `ops/legal.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def possible(mask: np.ndarray, choices: Sequence[int]) -> np.ndarray:
    """[...] bool: whether an action can be chosen at all, which takes a legal choice in every branch."""
    if len(choices) == 1:
        return np.logical_or.reduce(mask, axis=-1)
    return np.logical_and.reduce(np.logical_or.reduceat(mask, _starts(choices), axis=-1), axis=-1)


def all_if_none(mask: np.ndarray, choices: Sequence[int]) -> np.ndarray:
    """The mask, where branches in which nothing is legal are legal as a whole."""
    some = np.logical_or.reduceat(mask, _starts(choices), axis=-1)
    return mask | np.repeat(~some, choices, axis=-1)


def includes(mask: np.ndarray, action: np.ndarray, choices: Sequence[int]) -> np.ndarray:
    """[...] bool: whether actions [..., *shape] are legal; a branch in which nothing is legal forbids nothing."""
    index = action.reshape(*mask.shape[:-1], len(choices)) + _starts(choices)
    return np.logical_and.reduce(np.take_along_axis(all_if_none(mask, choices), index, -1), axis=-1)


def nth(mask: np.ndarray, draw: np.ndarray) -> np.ndarray:
    """[B] int64, a legal choice of each row of mask [B, n]: draw [B] in [0, 1) gives each the same share."""
    count = np.cumsum(mask, 1)
    # A draw is less than 1, but its product with a count may be rounded up to it.
    place = np.minimum((draw * count[:, -1]).astype(np.int64), count[:, -1] - 1)
    return (count > place[:, None]).argmax(1)


def random_legal(mask: np.ndarray, choices: Sequence[int], dice: np.random.Generator) -> np.ndarray:
    """Legal actions [B, branches], each as likely as any other, for mask [B, sum(choices)]."""
    parts = np.split(all_if_none(mask, choices), _starts(choices)[1:], axis=1)
    return np.stack([nth(part, dice.random(len(mask))) for part in parts], 1)


def _starts(choices: Sequence[int]) -> np.ndarray:
    """Where the choices of each branch begin."""
    return np.cumsum([0, *choices[:-1]])
