"""The state of a policy from one step to the next, as callers give it back: checked, and zeroed where episodes begin.

Trees of arrays with one row for each observation of the batch. All of them are zero at the start of an episode.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rookery.core import tree
from rookery.core.errors import UsageError
from rookery.core.types import Tree


def forgotten(state: Tree, starts: np.ndarray) -> Tree:
    """The state [B, ...], zero in the rows where `starts` [B] says that an episode begins."""

    def kept(x: Any) -> Any:
        keep = ~starts.reshape(-1, *[1] * (x.ndim - 1))
        return x * (torch.from_numpy(keep) if isinstance(x, torch.Tensor) else keep)

    return tree.map(kept, state)


def check_state(state: Tree, fresh: Tree, count: int) -> None:
    """UsageError unless `state` has the form of `fresh`, which is one of a batch of `count`."""
    given, wanted = ({path: tuple(np.shape(x)) for path, x in tree.flatten(each).items()} for each in (state, fresh))
    if given == wanted:
        return
    rows = {shape[0] for shape in given.values() if shape}
    if given.keys() == wanted.keys() and len(rows) == 1 and rows != {count}:
        raise UsageError(
            f"the state has {rows.pop()} rows, and there are {count} observations: a state belongs to the batch that "
            "it was returned for; None begins episodes"
        )
    raise UsageError("the state is not one that this policy has returned; None begins episodes")


def starts_of(episode_start: Any, count: int) -> np.ndarray:
    """Of each row [B], whether an episode begins there."""
    if episode_start is None:
        return np.zeros(count, bool)
    return per_row("episode_start", episode_start, count, np.bool_)


def per_row(name: str, given: Any, count: int, dtype: Any) -> np.ndarray:
    """A number for each row of a batch [B]; a single one counts for all."""
    values = np.asarray(given.cpu() if isinstance(given, torch.Tensor) else given)
    if values.shape not in ((), (count,)):
        raise UsageError(f"{name} has shape {values.shape}; give one number, or ({count},): one for each observation")
    return np.broadcast_to(values.astype(dtype), (count,))
