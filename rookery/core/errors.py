"""Every error that a user can see, each with the exit code that is part of the interface.

An error says what happened, where (environment, episode, step) and what to do next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class RookeryError(Exception):
    """Base of all errors that end a run with a message instead of a traceback."""

    exit_code = 1


class UsageError(RookeryError):
    """The request itself cannot be met: unknown name, impossible combination."""

    exit_code = 2


class EnvError(RookeryError):
    """The environment broke its contract: raised, hung, died, or returned what cannot be used."""

    exit_code = 3

    def __init__(self, message: str, reason: str = "env_error"):
        super().__init__(message)
        self.reason = reason  # the reason under which the ledger counts the steps lost with it
        self.steps = 0  # how many those are, where the caller that raises it knows
        self.mendable = False  # whether single environments failed that can be recreated while the others continue


class LearnerError(RookeryError):
    exit_code = 4


class NumericError(RookeryError):
    """Losses or gradients that stay non-finite."""

    exit_code = 5

    def __init__(self, message: str, skips: Sequence[dict[str, Any]] = ()):
        super().__init__(message)
        self.skips = list(skips)  # updates that were refused, the last one included; none if the weights are at fault
        self.evidence: dict[str, Any] = {}  # what the last of them was made from, where the learner has it


class CheckpointError(RookeryError):
    exit_code = 6


class StorageError(RookeryError):
    """The disk space or shared memory that a run needs is not available."""

    exit_code = 7


REQUEUE = 75  # SIGTERM / SIGUSR1 / SIGHUP: checkpointed, to be started again
INTERRUPT = 130  # Ctrl-C: checkpointed
