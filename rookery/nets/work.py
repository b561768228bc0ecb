"""How large a piece of work a network is: threads are chosen by it (`Algorithm.work`)."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import nn

from rookery.core.types import EnvSpec


def multiply_adds(spec: EnvSpec, rows: float, parameters: Iterable[nn.Parameter]) -> float:
    """Of a forward pass, roughly: one per row and parameter. Infinite with images: a CNN uses a parameter often."""
    if any(leaf.kind == "image" for leaf in spec.obs.values()):
        return math.inf
    return rows * sum(p.numel() for p in parameters)
