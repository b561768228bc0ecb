"""How a message names what a user could set: as a flag on the command line, as a keyword of Python elsewhere.

    setting("algo.lr", 1e-4)        # --algo.lr 0.0001        or algo={"lr": 0.0001}
    setting("algo.lr")              # --algo.lr               or algo.lr

The command line says so in its environment, so that the processes that it starts know it too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

VARIABLE, FLAGS = "ROOKERY_INTERFACE", "flags"


def by_flags() -> bool:
    """Whether the user is at the command line."""
    return os.environ.get(VARIABLE) == FLAGS


@contextmanager
def command_line() -> Iterator[None]:
    """Messages of this process and of those it starts name flags."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = FLAGS
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(VARIABLE, None)
        else:
            os.environ[VARIABLE] = before


def setting(path: str, value: Any = None) -> str:
    """A field of a run by its dotted path, with a value to give it or without."""
    if by_flags():
        flag = path.replace("_", "-")
        if isinstance(value, bool):
            return f"--{flag}" if value else f"--no-{flag}"
        shown = f"{value:g}" if isinstance(value, float) else value
        return f"--{flag}" if value is None else f"--{flag} {shown}"
    if value is None:
        return path
    first, *inner = path.split(".")
    text = repr(value)
    for name in reversed(inner):
        text = f'{{"{name}": {text}}}'
    return f"{first}={text}"


def settings(**values: Any) -> str:
    """Several fields, to be given together."""
    return (" " if by_flags() else ", ").join(setting(path, value) for path, value in values.items())
