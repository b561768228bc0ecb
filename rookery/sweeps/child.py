"""`python -m rookery.sweeps.child`: the process that trains one run of a sweep, started by `runner.py`."""

from __future__ import annotations

from typing import Any

from rookery.processes.child import serve


def body(channel: Any, start: dict[str, Any], fds: dict[str, int]) -> None:
    # Loaded here: the process must notice the end of its parent from its first moment on, and torch takes seconds.
    from rookery.sweeps.training import train_one

    train_one(channel, start)


if __name__ == "__main__":
    serve(body)
