"""What algorithms that learn from a replay memory share: statistics of drawn items, and remarks on their metrics."""

from __future__ import annotations

import torch

from rookery.core import tree
from rookery.core.reduce import Reduce
from rookery.core.types import Sequences, Transitions
from rookery.core.wording import setting
from rookery.nets.normalize import ObsNormalizer

CLIPPED = 0.05  # share of a value distribution's mass at its ends that is worth a warning


def observe_items(normalizer: ObsNormalizer, items: Transitions | Sequences, reduce: Reduce) -> None:
    """Statistics of what is drawn: every step counts as often as it is trained on."""
    if not normalizer.keys:
        return
    if isinstance(items, Sequences):
        normalizer.update(tree.map(lambda x: x[:-1], items.obs), items.live, reduce)
    else:
        normalizer.update(items.obs, torch.ones_like(items.reward, dtype=torch.bool), reduce)


class ClippedReturns:
    """Says once that v_min and v_max are too narrow for the returns."""

    def __init__(self, v_min: float, v_max: float):
        self.v_min, self.v_max, self._said = v_min, v_max, False

    def __call__(self, metrics: dict[str, float]) -> list[str]:
        share = metrics.get("mass_at_ends", 0.0)
        if self._said or not share > CLIPPED:
            return []
        self._said = True
        return [
            f"v_min {self.v_min:g} and v_max {self.v_max:g} clip the returns: {share:.0%} of the target's mass "
            f"lies at the ends; widen them ({setting('algo.v_min')}, {setting('algo.v_max')}) or scale the rewards"
        ]
