"""Opening a stored run: a folder that may be untrusted. `trust.py` checks what it may name."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from rookery.core.errors import UsageError
from rookery.storage.folder import run_of
from rookery.storage.trust import Refused, flags

if TYPE_CHECKING:
    from rookery.core.config import RunConfig


def open_run(path: Path, trust: tuple[str, ...], command: list[str], acts: bool = True) -> RunConfig:
    """The config of a run. What it asks for beyond the list is refused, with the command that would allow it.

    `acts`: its environments will be made, and not only its networks.
    """
    from rookery.run.run import read_config

    folder = run_of(path)
    try:
        return read_config(folder, trust, env="" if acts else None)
    except Refused as refused:
        fix = f"; if you trust it: {shlex.join(command)} {flags(refused.modules)}" if refused.helps else ""
        raise UsageError(f"{folder}: {refused.about}{fix}") from None


def trusted(words: list[str]) -> tuple[str, ...]:
    """The modules behind every `--trust` among the words, before the words can be parsed."""
    found: list[str] = []
    listing = False
    for word in words:
        if word.startswith("--"):
            listing = word == "--trust"
            if word.startswith("--trust="):
                found.append(word.removeprefix("--trust="))
        elif listing:
            found.append(word)
    return tuple(found)
