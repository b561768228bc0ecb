"""`python -m rookery.run.rank_main`: the process of one rank, started by `ranks.py`."""

from __future__ import annotations

from typing import Any

from rookery.processes.child import serve


def body(channel: Any, start: dict[str, Any], fds: dict[str, int]) -> None:
    # Loaded here: the process must notice the end of its parent from its first moment on, and torch takes seconds.
    from rookery.run.ranks import serve_rank

    serve_rank(channel, start)


if __name__ == "__main__":
    serve(body)
