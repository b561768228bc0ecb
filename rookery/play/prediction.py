"""What a policy says of an observation besides the action: its value, the action's log-probability, action values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rookery.core.errors import UsageError
from rookery.core.types import Tree


@dataclass(frozen=True)
class Prediction:
    """What `Policy.explain` returns. Arrays have one row for each observation of a batch; of one, they are numbers.

    Values are in the units of the rewards that were learnt from, which a run may have clipped or scaled. Those of PPO,
    A2C, IMPALA and APPO are of the policy that explores; those of DQN and DPG are of the best action known.

    >>> found = rookery.load(run).explain([[0.0, 0.1, 0.0, -0.1]] * 3)
    >>> found.has, found.value.shape
    (('logp', 'value'), (3,))
    >>> found.q
    Traceback (most recent call last):
    rookery.core.errors.UsageError: PPO has no q; it has logp, value
    """

    action: Any  # as the environment takes it
    state: Tree | None = field(repr=False)  # for the next call
    quantities: dict[str, Any]
    algorithm: str

    @property
    def has(self) -> tuple[str, ...]:
        """Names of the quantities that this algorithm knows."""
        return tuple(self.quantities)

    @property
    def value(self) -> Any:
        """The discounted return that is expected of the observation."""
        return self._quantity("value")

    @property
    def logp(self) -> Any:
        """The log-probability of the action; of boxes, the log-density before they are scaled to their bounds."""
        return self._quantity("logp")

    @property
    def q(self) -> Any:
        """The value of every action; of boxes, that of the action taken."""
        return self._quantity("q")

    def _quantity(self, name: str) -> Any:
        if name not in self.quantities:
            raise UsageError(f"{self.algorithm} has no {name}; it has {', '.join(self.has) or 'only actions'}")
        return self.quantities[name]
