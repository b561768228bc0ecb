"""An object elsewhere that a table asks for something: a part of a memory, or one that puts batches together.

It carries out what it is asked in the order in which it was asked. It may be lost, and another may take its place.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol


class ServiceLost(Exception):
    """It is gone, with all it held."""


class ArgumentLost(ServiceLost):
    """It is there, but something that was handed to it by reference is gone."""


class Service(Protocol):
    life: int  # how many in this place were lost; the next one knows nothing of them

    @property
    def up(self) -> bool:
        """Whether there is one now."""
        ...

    def ask(self, op: str, *args: Any) -> Future[Any]:
        """Call the method `op`. The future fails with `ServiceLost` when it is gone."""
        ...

    def look(self) -> None:
        """Called again and again: a loss is reported, and what was lost is replaced. Does not wait."""
        ...

    def kill(self, why: str) -> None:
        """End one that does not answer; it is lost then."""
        ...


class LocalService:
    """An object in this process, with a thread of its own. It is not replaced when it is killed."""

    def __init__(self, target: Any):
        self._target, self.life, self.up = target, 0, True
        self._thread = ThreadPoolExecutor(1, "service")

    def ask(self, op: str, *args: Any) -> Future[Any]:
        return self._thread.submit(self._call, self.life, getattr(self._target, op), args)

    def _call(self, life: int, method: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        answer = method(*args) if self.up else None
        if not self.up or life != self.life:
            raise ServiceLost("it was killed")
        return answer

    def look(self) -> None:
        pass

    def kill(self, why: str) -> None:
        self.life, self.up = self.life + 1, False

    def close(self) -> None:
        self._thread.shutdown()
