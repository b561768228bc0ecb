"""`python -m rookery.crews.answer`: a worker that answers one question about an environment, and ends.

The child's side of `probe.py`. It must not load torch: a probe should cost tenths of a second.
"""

from __future__ import annotations

import traceback
from types import SimpleNamespace
from typing import Any

import msgspec

from rookery.core.config import AtariConfig, NetConfig
from rookery.core.errors import EnvError, UsageError
from rookery.processes.child import serve


def answer(question: dict[str, Any]) -> Any:
    from rookery.envs.check import check
    from rookery.envs.make import look, registering

    if question["what"] == "registers":
        return registering(question["env"], question["modules"])
    config = SimpleNamespace(
        env=question["env"], env_kwargs=question["env_kwargs"], atari=AtariConfig(), net=NetConfig()
    )
    if question["what"] == "check":
        return check(config, question["steps"])
    if question["what"] == "cost":
        from rookery.envs.cost import step_seconds

        found: list[float | None] = [None]
        spec = look(config, lambda lanes: found.append(step_seconds(lanes)))
        return {"spec": spec, "step_s": found[-1]}
    return look(config)


def body(channel: Any, question: dict[str, Any], fds: dict[str, int]) -> None:
    try:
        said = {"value": msgspec.to_builtins(answer(question))}
    except (UsageError, EnvError) as error:
        said = {"error": str(error), "code": error.exit_code}
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        words = f"environment {question['env']} raised when it was made: {type(error).__name__}: {error}"
        said = {"error": f"{words}\n{traceback.format_exc()}", "code": 3}
    channel.send({"op": "answer"} | said, timeout=60.0)


if __name__ == "__main__":
    serve(body)
