"""`python -m rookery.run.evaluator_main`: the process that evaluates while a run trains, started by `evaluators.py`.

It loads what `evaluators.py` has written, verified like any checkpoint, plays, and answers. It has one torch thread and
a low priority: where there is no core for it, actors and learner come first.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from rookery.processes.child import serve

NICE = 5
IDLE = 7 * 24 * 3600.0  # seconds between two evaluations; the end of the parent closes the channel at once
DEADLINE = 60.0  # seconds for the parent to take an answer


def body(channel: Any, start: dict[str, Any], fds: dict[str, int]) -> None:
    from dataclasses import asdict

    import torch

    from rookery.algorithms.registry import parents_config
    from rookery.play.evaluate import evaluate_as_set
    from rookery.play.policy import Policy
    from rookery.run.evaluators import reason
    from rookery.storage import checkpoint, folder
    from rookery.storage.stored import decode_spec

    torch.set_num_threads(1)
    with contextlib.suppress(OSError):  # not before all is loaded, which delays the first evaluation
        os.nice(NICE)
    config, run = parents_config(start["config"]), Path(start["folder"])
    spec = decode_spec(folder.read(run, "spec.json"), run / "spec.json")
    while (order := channel.recv(IDLE))["op"] != "stop":
        try:
            found = evaluate_as_set(Policy(config, spec, checkpoint.load(Path(order["policy"]))), config)
            answer: dict[str, Any] = {"op": "played", "evaluation": asdict(found)}
        except Exception as error:
            answer = {"op": "refused", "why": reason(error)}
        channel.send(answer, DEADLINE)


if __name__ == "__main__":
    serve(body)
