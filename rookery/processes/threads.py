"""One thread budget for all processes of a run.

By default every process starts a thread per core; eight processes with eight threads each on eight cores are slower
than one. So: children compute with one thread, and the learner with as many as the actors leave it.
Acting always uses one torch thread, also in the serial topology: sums taken in another order round differently, and
serial and local are to agree bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

from rookery.core.config import RunConfig
from rookery.core.machine import Machine

SMALL = 2e8  # multiply-adds of a minibatch's forward pass; below, threads wait for each other longer than they work


@dataclass(frozen=True)
class Budget:
    """Torch threads of the two phases."""

    acting: int
    learning: int


def available_cores() -> int:
    """Cores this process may use, by affinity and cgroup quota."""
    return Machine().cores()


def budget(cores: int, actors: int, topology: str, synchronous: bool = True) -> Budget:
    """Threads for `actors` actors and a learner on `cores` cores.

    A synchronous learner computes while the actors wait, and may use every core; an asynchronous one shares.
    """
    if topology == "serial" or synchronous:
        return Budget(acting=1, learning=max(1, cores))
    return Budget(acting=1, learning=max(1, cores - actors))


def limit_child_env() -> dict[str, str]:
    """Environment variables that hold the numeric libraries of a child to one thread, before they are loaded."""
    names = ("OMP", "MKL", "OPENBLAS", "BLIS", "NUMEXPR")
    return {f"{name}_NUM_THREADS": "1" for name in names} | {"VECLIB_MAXIMUM_THREADS": "1"}


class Threads:
    """Switches torch between acting and learning. The number is one of the calling thread: use it where you compute."""

    def __init__(self, config: RunConfig, synchronous: bool = True):
        import torch  # not at the top: the supervisor of children must not pay for it

        self._torch, self._config, self._small = torch, config, False
        self._found = torch.get_num_threads()
        self.share(synchronous)

    def share(self, synchronous: bool) -> None:
        """Divide the cores again: asynchronous actors leave the learner fewer."""
        config = self._config
        cores = config.threads or max(1, available_cores() // config.ranks)
        self.budget = budget(cores, config.actors, config.topology, synchronous)
        if self._small:
            self.budget = Budget(self.budget.acting, 1)

    def acting(self) -> None:
        self._use(self.budget.acting)

    def learning(self) -> None:
        self._use(self.budget.learning)

    def fit(self, work: float) -> None:
        """Learn with one thread if a minibatch (`work` in multiply-adds) is too small to be worth sharing out."""
        self._small = work < SMALL
        if self._small:
            self.budget = Budget(self.budget.acting, 1)

    def restore(self) -> None:
        """Set the number that was found at the start: the process may continue with other work."""
        self._use(self._found)

    def _use(self, count: int) -> None:
        if count != self._torch.get_num_threads():
            self._torch.set_num_threads(count)
