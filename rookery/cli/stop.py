"""Ctrl-C and SIGTERM while no run listens to them: before it begins, and after it has ended."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from rookery.errors import REQUEUE, RookeryError


class Requeue(RookeryError):
    exit_code = REQUEUE


@contextmanager
def answered() -> Iterator[None]:
    """Both end what is going on, with the exit codes they have in a run."""
    with _handled(_stop):
        yield


@contextmanager
def deferred() -> Iterator[None]:
    """Around the loading of libraries: raised into an import, a signal may be lost in it, so it is heard afterwards."""
    came: list[int] = []
    with _handled(lambda number, frame: came.append(number)):
        yield
    if came:
        _stop(came[0])


def _stop(number: int, frame: object = None) -> NoReturn:
    raise Requeue("asked to stop") if number == signal.SIGTERM else KeyboardInterrupt


@contextmanager
def _handled(handler: Callable[[int, Any], object]) -> Iterator[None]:
    """The two go to `handler`, unless they are ignored, as in a background job, or this is not the main thread."""
    main = threading.current_thread() is threading.main_thread()
    mine = [n for n in (signal.SIGINT, signal.SIGTERM) if main and signal.getsignal(n) != signal.SIG_IGN]
    old = {number: signal.signal(number, handler) for number in mine}
    try:
        yield
    finally:
        for number, before in old.items():
            signal.signal(number, signal.SIG_DFL if before is None else before)
