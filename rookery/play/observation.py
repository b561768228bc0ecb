"""Observations as a user has them, by the names that networks know: nested dicts and tuples are followed.

    entries({"arm": (angle, speed)}, spec)      # {"arm.0": angle, "arm.1": speed}

    read({"arm": (angle, speed)}, spec)         # as rows for the networks, and whether it was a single observation

Integers that an environment counts from elsewhere than 0 are counted from 0 in the rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

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


class Read(NamedTuple):
    rows: dict[str, np.ndarray]  # [B, ...] by name, contiguous, as networks take them
    size: int  # B
    single: bool  # one observation without an axis for the batch; B is 1


def read(obs: Any, spec: EnvSpec, leave_out: tuple[str, ...] = ()) -> Read:
    """One observation or a batch of them, as the environment has them: arrays, tensors or lists, nested in any way.

    Which of both is seen by the shapes: a batch has one axis more. UsageError for any other shape.
    """
    given = {name: _array(name, value) for name, value in entries(obs, spec, leave_out).items()}
    batch = {name: len(x) for name, x in given.items() if x.ndim and x.shape[1:] == spec.obs[name].shape}
    for name, value in given.items():
        shape = spec.obs[name].shape
        if name not in batch and value.shape != shape:
            several = f"({', '.join(map(str, ('B', *shape)))})"
            raise UsageError(
                f"observation {name!r} has shape {value.shape}; one observation has {shape}, a batch of B has {several}"
            )
    single = not batch
    if not single and (len(batch) < len(given) or len(set(batch.values())) > 1):
        sizes = (f"{name!r} of {batch[name]}" if name in batch else f"{name!r} of none" for name in given)
        raise UsageError(f"the entries of an observation are batches of different sizes: {', '.join(sizes)}")
    size = 1 if single else next(iter(batch.values()))
    if not size:
        raise UsageError("the batch of observations is empty")
    rows = {name: _row(name, value[None] if single else value, spec.obs[name]) for name, value in given.items()}
    return Read(rows, size, single)


def _array(name: str, value: Any) -> np.ndarray:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        return (value.float() if value.dtype == torch.bfloat16 else value).numpy()  # numpy has no bfloat16
    try:
        array = np.asarray(value)
    except (TypeError, ValueError) as error:
        if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):
            raise UsageError("this is a tuple of an observation and an info: `obs, info = env.reset()`") from error
        raise UsageError(f"{name!r} cannot be read as an array: {error}") from error
    if array.dtype.kind not in "biuf":
        raise UsageError(f"{name!r} cannot be read as an array of numbers: it holds {array.dtype}")
    return array


def _row(name: str, values: np.ndarray, leaf: Leaf) -> np.ndarray:
    if np.dtype(leaf.dtype).kind in "iu" and values.dtype.kind == "f" and (values != np.floor(values)).any():
        raise UsageError(f"observation {name!r} has fractions; the policy has learnt from integers ({leaf.dtype})")
    if leaf.kind in ("discrete", "multi"):
        values = values.astype(np.int64) - (np.reshape(leaf.starts, leaf.shape) if leaf.starts else 0)
        _check_integers(name, values, leaf)
    elif leaf.dtype == "uint8" and values.dtype != np.uint8 and (values.min() < 0 or values.max() > 255):
        raise UsageError(f"observation {name!r} has numbers outside 0 to 255; the policy has learnt from uint8")
    return np.ascontiguousarray(values, leaf.dtype)


def _check_integers(name: str, values: np.ndarray, leaf: Leaf) -> None:
    """UsageError for integers, counted from 0, that are outside their space: networks have no input for them."""
    if not leaf.admits(values):
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
