"""What a torso of the user's must not do, found out before training: layers that act otherwise than they learn, widths.

A row must give the same numbers when it is acted on and when it is learnt from, or PPO's ratio does not start at 1. Not
here: how the class is found and made (`torso.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from rookery.core.errors import RookeryError, UsageError
from rookery.core.frames import with_frames
from rookery.core.types import EnvSpec

ROWS = 3
REASON = "a row must give the same numbers when it is acted on and when it is learnt from"


def check_own(torso: Any, spec: EnvSpec, name: str) -> None:
    """UsageError if the torso has batch normalisation or dropout, or if its output is not what it says it is."""
    _check_layers(torso, name)
    obs = {key: torch.zeros(ROWS, *leaf.shape, dtype=_dtype(leaf.dtype)) for key, leaf in spec.obs.items()}
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        first, again = _run(torso, obs, name), _run(torso, obs, name)
    expected = (ROWS, torso.features)
    if not isinstance(first, torch.Tensor):
        raise UsageError(f"torso {name!r} returned a {type(first).__name__}, expected a tensor of shape [N, features]")
    if tuple(first.shape) != expected or not first.is_floating_point():
        raise UsageError(
            f"torso {name!r} returned {first.dtype} of shape {list(first.shape)} for {ROWS} observations, expected "
            f"floats of shape {list(expected)}: its attribute `features` is {torso.features}"
        )
    if not torch.allclose(first, again, equal_nan=True):
        raise UsageError(
            f"torso {name!r} gives other numbers when it is given the same observations again: {REASON}, so there can "
            "be no dropout, noise or memory in it"
        )


def _check_layers(torso: nn.Module, name: str) -> None:
    for path, layer in torso.named_modules():
        where = f"torso {name!r} has {type(layer).__name__}" + (f" ({path})" if path else "")
        running = getattr(layer, "track_running_stats", False) and isinstance(
            layer, nn.modules.instancenorm._InstanceNorm
        )
        if isinstance(layer, _BatchNorm) or running:
            raise UsageError(
                f"{where}: {REASON}, and its numbers depend on the batch; use nn.LayerNorm or nn.GroupNorm"
            )
        share = layer.p if isinstance(layer, nn.modules.dropout._DropoutNd) else getattr(layer, "dropout", 0.0)
        if isinstance(share, int | float) and share > 0:
            raise UsageError(f"{where} with dropout {share:g}: {REASON}; remove it, or set it to 0")


def _run(torso: Any, obs: dict[str, torch.Tensor], name: str) -> Any:
    try:
        return torso(dict(obs))
    except RookeryError:
        raise
    except Exception as error:
        shapes = ", ".join(f"{key}: {list(x.shape)} {x.dtype}" for key, x in obs.items())
        words = f"torso {name!r} raised {type(error).__name__} for observations {shapes}: {error}"
        raise UsageError(with_frames(words, error)) from error


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype
