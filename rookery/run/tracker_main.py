"""`python -m rookery.run.tracker_main`: the process of one tracker, started by `tracking.py`.

Whatever a tracker does to its process, it does here: threads, signal handlers, work at exit, waiting for a network.
It prints nothing, since its output could show passwords that are part of an address.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from rookery.processes.child import serve

IDLE = 7 * 24 * 3600.0  # seconds between two records; the end of the parent closes the channel at once
DEADLINE = 60.0  # seconds for the parent to take an answer


def body(channel: Any, start: dict[str, Any], fds: dict[str, int]) -> None:
    from rookery.metrics.tracker import redacted

    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    tracker: Any = None
    while True:
        order = start if tracker is None else channel.recv(IDLE)
        if order["op"] == "stop":
            return
        answer = {"op": "done"}
        try:
            if tracker is None:
                module, _, name = start["tracker"].partition(":")
                tracker = getattr(importlib.import_module(module), name)(**start["arguments"])
                answer |= {"id": tracker.id, "about": redacted(tracker.about)}
            elif order["op"] == "log":
                tracker.log(order["env_steps"], order["wall_time"], order["numbers"])
            else:
                tracker.finish(order["summary"], order["exit_code"])
        except Exception as error:
            text = redacted(str(error)).strip() or "no reason was given"
            answer = {"op": "refused", "why": f"{type(error).__name__}: {text.splitlines()[0][:500]}"}
        channel.send(answer, DEADLINE)
        if tracker is None:
            return


if __name__ == "__main__":
    serve(body)
