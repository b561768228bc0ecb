"""How the end of a worker reads: in its own words where it has said any, else as what was seen of it."""

from __future__ import annotations

from typing import Any

from rookery.errors import CheckpointError, EnvError, NumericError, RookeryError, StorageError, UsageError
from rookery.topologies.supervise import Worker


def told(message: dict[str, Any]) -> RookeryError:
    """A worker's failure as the error it was over there."""
    kind = {2: UsageError, 5: NumericError, 6: CheckpointError, 7: StorageError}.get(message["exit_code"])
    if kind is not None:
        return kind(message["error"])
    text = message["error"] if message["exit_code"] == 3 else message["traceback"]
    return EnvError(text, message.get("reason") or "actor_failed")


def died(worker: Worker, index: int, where: str) -> EnvError:
    return EnvError(f"actor {index} {worker.describe_exit()}{where}\n{worker.log_tail(20)}".rstrip(), "actor_died")


def hung(worker: Worker, index: int, env: str, where: str, seconds: float, leaving: bool) -> EnvError:
    """Ends the worker: that leaves the stack of the stuck process in its log."""
    worker.abort()
    verdict = "is too slow for a user who wants to leave" if leaving else "hung"
    return EnvError(
        f"environment {env} {verdict}: actor {index} gave no sign of life for {seconds:.1f} s{where}; the "
        f"stack of the stuck process is in its log\n{worker.log_tail(30)}".rstrip(),
        "actor_hung",
    )
