"""`python -m rookery.crews.actor_main`: the process of one actor, started by `pool.py`."""

from __future__ import annotations

from typing import Any

from rookery.processes.child import serve


def body(channel: Any, start: dict[str, Any], fds: dict[str, int]) -> None:
    # Loaded here: the process must notice the end of its parent from its first moment on, and torch takes seconds.
    from rookery.crews.actor_process import ActorProcess
    from rookery.crews.buffers import AttachedBuffers

    ActorProcess(channel, start, AttachedBuffers(fds)).run()


if __name__ == "__main__":
    serve(body)
