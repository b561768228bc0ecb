"""Observations as a user has them, by the names that networks know: nested dicts and tuples are followed.

    entries({"arm": (angle, speed)}, spec)      # {"arm.0": angle, "arm.1": speed}

One observation or a batch: what is in the entries is not looked at here, but for integers, which an environment may
count from elsewhere than 0 (`counted`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rookery.core.errors import UsageError
from rookery.core.types import EnvSpec, Leaf


def entries(obs: Any, spec: EnvSpec, leave_out: tuple[str, ...] = ()) -> dict[str, Any]:
    """Each entry of an observation by its name in `spec`; UsageError for one that is not there.

    `obs`: nested as the environment has it, or a dict by these names; bare if there is a single entry without a key.
    """
    names = [name for name in spec.obs if name not in leave_out]
    if names == ["obs"] and not isinstance(obs, Mapping):
        return {"obs": obs}
    return {name: _entry(obs, name) for name in names}


def counted(name: str, values: np.ndarray, leaf: Leaf) -> np.ndarray:
    """Integers [..., *shape] of the environment, counted from 0, or UsageError; other kinds as they are."""
    if leaf.kind not in ("discrete", "multi"):
        return values
    values = values.astype(np.int64)
    if leaf.starts:
        values = values - np.reshape(leaf.starts, leaf.shape)
    check_integers(name, values, leaf)
    return values


def check_integers(name: str, values: np.ndarray, leaf: Leaf) -> None:
    """UsageError for integers, counted from 0, that are outside their space: networks have no input for them."""
    if leaf.kind in ("discrete", "multi") and not leaf.admits(values):
        counts = leaf.n if leaf.kind == "discrete" else list(leaf.counts)
        first = f", counted from {list(leaf.starts)}" if leaf.starts else ""
        raise UsageError(f"observation {name!r} is outside its space of {counts} values{first}")


def _entry(obs: Any, name: str) -> Any:
    try:
        return _pick(obs, name)
    except (KeyError, IndexError, TypeError, ValueError):
        kind = type(obs).__name__
        has = f"a dict of {', '.join(map(str, obs))}" if isinstance(obs, Mapping) else f"a {kind}"
        has = f"a tuple of {len(obs)}" if isinstance(obs, tuple) else has
        raise UsageError(f"the policy reads {name!r} of an observation, and was given {has}") from None


def _pick(obs: Any, name: str) -> Any:
    if not isinstance(obs, Mapping):
        place, _, rest = name.partition(".")
        return _pick(obs[int(place)], rest) if rest else obs[int(place)]
    if name in obs:
        return obs[name]
    for key, inner in obs.items():
        known = str(key).replace("/", ".")  # as `envs/spaces.py` names them
        if known == name:
            return inner
        if name.startswith(f"{known}."):
            return _pick(inner, name[len(known) + 1 :])
    raise KeyError(name)
