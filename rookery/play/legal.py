"""The mask of legal actions that a policy acts by: from the observation, or given beside it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rookery.core.errors import UsageError
from rookery.core.legal import all_if_none
from rookery.core.types import MASK, EnvSpec
from rookery.envs.spaces import Mismatch, as_mask


def mask_rows(spec: EnvSpec, obs: Any, given: Any, rows: int, single: bool = False) -> dict[str, np.ndarray]:
    """The mask of `rows` observations, as an entry of them; nothing if the policy has learnt without masks.

    `given` [rows, n], or [n] if `single`: what a caller says besides; None: it is in the observations, or everything
    is legal.
    """
    if not spec.masked:
        if given is not None:
            raise UsageError(f"action_mask was given, and this policy has learnt without masks ({spec.id})")
        return {}
    if isinstance(obs, dict) and MASK in obs:
        given = obs[MASK]
    choices = spec.action.choices
    given = given.detach().cpu().numpy() if isinstance(given, torch.Tensor) else given
    if given is None:
        if spec.mask_from == "observation":
            raise UsageError(f"the policy reads {MASK!r} of an observation, and was given none")
        return {MASK: np.ones((rows, sum(choices)), bool)}
    try:
        given = as_mask([given] if single else given, (rows, sum(choices)), f"an {MASK}")
        return {MASK: all_if_none(given, choices)}
    except Mismatch as error:
        raise UsageError(f"the policy was given {str(error).removeprefix('returned ')}") from error
