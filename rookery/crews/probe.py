"""What an environment looks like, asked in a process of its own: one that crashes or hangs takes nothing with it.

The answer comes over the worker's channel, which nothing that the environment starts can hold open; what it prints goes
to a file that is bounded. What it has started ends with the probe.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from rookery.core.errors import EnvError, UsageError
from rookery.core.types import EnvSpec
from rookery.pipes import channel as channels
from rookery.pipes.channel import ChannelClosed
from rookery.processes.orphans import guarded
from rookery.processes.signals import Signals, Stopped
from rookery.processes.worker import Worker, abort_all, await_end, stop_all

MODULE = "rookery.crews.answer"
DEADLINE = 180.0  # seconds
LEAVE = 2.0  # seconds for the process to end by itself once it has answered
LOOK = 1.0  # seconds between two looks at the size of its output


def probe(
    env: str, env_kwargs: dict[str, Any], deadline: float = DEADLINE, signals: Signals | None = None
) -> EnvSpec:  # fmt: skip
    """The spec of an environment; UsageError or EnvError with the child's message."""
    answer = ask({"what": "spec", "env": env, "env_kwargs": env_kwargs}, deadline, signals)
    return msgspec.convert(answer, EnvSpec)


def timed(env: str, env_kwargs: dict[str, Any], signals: Signals | None = None) -> tuple[EnvSpec, float | None]:
    """The spec, and the seconds that a step takes; None if environments are stepped together, or cannot play."""
    answer = ask({"what": "cost", "env": env, "env_kwargs": env_kwargs}, DEADLINE, signals)
    return msgspec.convert(answer["spec"], EnvSpec), answer["step_s"]


@guarded()
def ask(question: dict[str, Any], deadline: float, signals: Signals | None = None) -> Any:
    """Put a question to a child process (`answer.py`) and give it `deadline` seconds; `signals` may end it earlier."""
    with tempfile.TemporaryDirectory(prefix="rookery-probe-") as folder:
        worker = Worker.start(MODULE, "probe", question, {}, Path(folder) / "output.log")
        try:
            answer = _answer(worker, question["env"], deadline, signals)
            await_end([worker], LEAVE)
        finally:
            abort_all([worker])
            stop_all([worker], 0.0)
    if "error" in answer:
        raise (UsageError if answer["code"] == 2 else EnvError)(answer["error"])
    return answer["value"]


def _answer(worker: Worker, env: str, deadline: float, signals: Signals | None) -> dict[str, Any]:
    until = time.monotonic() + deadline
    wake = None if signals is None else signals.fileno()
    while not channels.wait([worker.channel], max(0.0, min(LOOK, until - time.monotonic())), wake):
        if signals is not None and signals.requested is not None:
            raise Stopped(signals.requested)
        if time.monotonic() >= until:
            abort_all([worker])
            words = f"environment {env} gave no answer within {deadline:g} s: it hangs, or needs longer"
            raise EnvError(f"{words}\n{worker.log_tail(30)}".rstrip(), "actor_hung")
        worker.alive()  # collects one that has ended, though a process it has started may hold its channel
        if worker.log is not None:
            worker.log.shorten()
    try:
        answer = worker.channel.recv(0.0)
    except ChannelClosed:
        await_end([worker], LEAVE)
        raise EnvError(
            f"environment {env} ended its process (exit {worker.exitcode})\n{worker.log_tail(20)}", "actor_died"
        ) from None
    if answer["op"] == "failed":
        raise EnvError(f"environment {env} ended its process: {answer['error']}", "actor_died")
    return answer
