"""The error of a worker that ended: its own message if it sent one, else what the parent observed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rookery.core.errors import CheckpointError, EnvError, NumericError, RookeryError, StorageError, UsageError
from rookery.processes.worker import ABORT_WAIT, Worker


class Lost(Exception):
    """A worker cannot continue. `error()` says why; call it once the worker has ended: then its log is complete.

    `patience`: seconds for it to end by itself before it is aborted, so that it can end with its own exit code.
    """

    def __init__(self, error: Callable[[], EnvError], patience: float = ABORT_WAIT):
        super().__init__()
        self.error, self.patience = error, patience

    @classmethod
    def by(cls, error: EnvError) -> Lost:
        return cls(lambda: error)


def told(message: dict[str, Any]) -> RookeryError | Lost:
    """A worker's failure as the error it raised; Lost if a replacement may succeed."""
    kind = {2: UsageError, 5: NumericError, 6: CheckpointError, 7: StorageError}.get(message["exit_code"])
    if kind is not None:
        return kind(message["error"])
    text = message["error"] if message["exit_code"] == 3 else message["traceback"]
    return Lost.by(EnvError(text, message.get("reason") or "actor_failed"))


def died(worker: Worker, index: int, where: str) -> EnvError:
    return EnvError(f"actor {index} {worker.describe_exit()}{where}\n{worker.log_tail(20)}".rstrip(), "actor_died")


def hung(worker: Worker, index: int, env: str, where: str, seconds: float, leaving: bool) -> EnvError:
    """For a worker that was aborted: that leaves the stack of the stuck process in its log."""
    verdict = "is too slow for the shutdown that was requested" if leaving else "hung"
    return EnvError(
        f"environment {env} {verdict}: actor {index} gave no sign of life for {seconds:.1f} s{where}; the "
        f"stack of the stuck process is in its log\n{worker.log_tail(30)}".rstrip(),
        "actor_hung",
    )
