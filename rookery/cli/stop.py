"""Ctrl-C, SIGTERM and SIGUSR1 while no run listens to them: before it begins, and after it has ended."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from rookery.errors import REQUEUE, RookeryError
from rookery.topologies.signals import CODES


class Requeue(RookeryError):
    exit_code = REQUEUE


@contextmanager
def answered() -> Iterator[None]:
    """They end what is going on, with the exit codes they have in a run."""
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
    raise KeyboardInterrupt if number == signal.SIGINT else Requeue("asked to stop")


@contextmanager
def _handled(handler: Callable[[int, Any], object]) -> Iterator[None]:
    """They go to `handler`, unless they are ignored, as in a background job, or this is not the main thread."""
    main = threading.current_thread() is threading.main_thread()
    mine = [number for number in CODES if main and signal.getsignal(number) != signal.SIG_IGN]
    old = {number: signal.signal(number, handler) for number in mine}
    try:
        yield
    finally:
        for number, before in old.items():
            signal.signal(number, signal.SIG_DFL if before is None else before)
