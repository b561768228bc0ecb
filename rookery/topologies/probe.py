"""What an environment looks like, asked in a process of its own: one that crashes or hangs takes nothing with it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import msgspec

from rookery.errors import EnvError, UsageError
from rookery.types import EnvSpec

DEADLINE = 180.0  # seconds


def probe(env: str, env_kwargs: dict[str, Any], deadline: float = DEADLINE) -> EnvSpec:
    """The spec of an environment; UsageError or EnvError in the child's own words."""
    answer = ask({"what": "spec", "env": env, "env_kwargs": env_kwargs}, deadline)
    return msgspec.convert(answer, EnvSpec)


def ask(question: dict[str, Any], deadline: float) -> Any:
    """Put a question to a child process (`rookery.envs.answer`) and give it `deadline` seconds."""
    command = [sys.executable, "-m", "rookery.envs.answer"]
    question = question | {"path": sys.path}
    try:
        done = subprocess.run(
            command, input=json.dumps(question), capture_output=True, text=True, timeout=deadline, process_group=0
        )  # a group of its own: what is signalled to ours is for us to hear
    except subprocess.TimeoutExpired:
        raise EnvError(
            f"environment {question['env']} gave no answer within {deadline:g} s: it hangs, or needs longer",
            "actor_hung",
        ) from None
    lines = [line for line in done.stdout.splitlines() if line.startswith("rookery-answer ")]
    if not lines:
        tail = "\n".join(done.stderr.splitlines()[-20:])
        raise EnvError(
            f"environment {question['env']} ended its process (exit {done.returncode})\n{tail}", "actor_died"
        )
    answer = json.loads(lines[-1].removeprefix("rookery-answer "))
    if "error" in answer:
        raise (UsageError if answer["code"] == 2 else EnvError)(answer["error"])
    return answer["value"]
