"""Whether the stored state of an actor is one that this actor could have: checked before anything is restored from it.

What an environment makes of its own part only the environment knows; if it cannot, that is said where it is tried
(`producer.py`). What a builder of items holds is checked where it is loaded (`replay/`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rookery.core import tree
from rookery.core.errors import CheckpointError
from rookery.core.types import EnvSpec, Tree

MOST = 1 << 53  # of anything that is counted


def check_state(snapshot: Any, spec: EnvSpec, lanes: int, state: Tree, sequence: int, builds: bool) -> None:
    """`state`: a recurrent state of as many lanes; `sequence`: unrolls the actor has delivered; `builds`: items too."""
    _need("it", isinstance(snapshot, dict))
    wanted = {"env", "obs", "state", "live", "episode", "total", "length", "sequence"}
    _need("parts", wanted | ({"builder", "pending"} if builds else set()) <= snapshot.keys())
    _need("number of unrolls", type(snapshot["sequence"]) is int and snapshot["sequence"] == sequence)
    _need("steps held back", not builds or (type(snapshot["pending"]) is int and 0 <= snapshot["pending"] < MOST))
    obs = snapshot["obs"]
    _need("observations", isinstance(obs, dict) and obs.keys() == spec.obs.keys())
    for key, leaf in spec.obs.items():
        _check_array(f"observation {key}", obs[key], (lanes, *leaf.shape), leaf.dtype)
        if leaf.kind in ("discrete", "multi"):
            _need(f"observation {key}", leaf.admits(obs[key]))
    own = {path: leaf.cpu().numpy() for path, leaf in tree.flatten(state).items() if path}
    _check_tree(snapshot["state"], own)
    _check_array("live lanes", snapshot["live"], (lanes,), "bool")
    _check_array("returns", snapshot["total"], (lanes,), "float64")
    for name in ("episode", "length"):
        _check_array(name, snapshot[name], (lanes,), "int64")
        _need(name, bool((snapshot[name] >= 0).all() and (snapshot[name] < MOST).all()))
    kept = snapshot["builder"].get("states") if builds and isinstance(snapshot["builder"], dict) else None
    if builds:
        _check_last_row(snapshot)
    if kept:  # start states of sequences: [lanes, any number, ...]
        _check_tree(kept, {f"state/{path}": leaf for path, leaf in own.items()}, inner=2)


def _check_last_row(snapshot: dict[str, Any]) -> None:
    """Lanes whose last row, as the builder has it, ended an episode are those that are not live."""
    try:
        rows = snapshot["builder"]["window"]["rows"]
        ends = rows["terminated"] | rows["truncated"]
        holds = not len(ends) or bool((ends[-1] == ~snapshot["live"]).all())
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError("the stored state of an actor does not fit this run: its items") from error
    _need("live lanes", holds)


def _check_tree(given: Any, wanted: Mapping[str, np.ndarray], inner: int = 0) -> None:
    """`inner`: axes of what is given that are not looked at; what is wanted has one for the lanes instead."""
    _need("recurrent state", isinstance(given, dict))
    flat = {path: leaf for path, leaf in tree.flatten(given).items() if path}
    _need("recurrent state", flat.keys() == wanted.keys())
    for path, leaf in wanted.items():
        _need(f"recurrent state {path}", isinstance(flat[path], np.ndarray) and flat[path].ndim >= inner)
        shape = (*flat[path].shape[:inner], *leaf.shape[1:]) if inner else leaf.shape
        _check_array(f"recurrent state {path}", flat[path], shape, str(leaf.dtype))


def _check_array(name: str, given: Any, shape: tuple[int, ...], dtype: str) -> None:
    _need(name, isinstance(given, np.ndarray) and given.shape == shape and given.dtype == np.dtype(dtype))
    _need(name, given.dtype.kind != "f" or bool(np.isfinite(given).all()))


def _need(what: str, holds: bool) -> None:
    if not holds:
        raise CheckpointError(f"the stored state of an actor does not fit this run: {what}")
