"""Opening a stored run: a folder that may have come from a stranger."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from rookery.errors import CheckpointError, UsageError
from rookery.folder import exists, read

if TYPE_CHECKING:
    from rookery.config import RunConfig


def folder_of(path: Path) -> Path:
    """The run folder of a run folder or of one of its checkpoints."""
    for folder in (path, path.parent.parent):
        if exists(folder, "config.json"):
            return folder
    raise CheckpointError(f"{path} is not a run folder: it has no config.json")


def open_run(path: Path, trust: tuple[str, ...], command: list[str]) -> RunConfig:
    """The config of a run. Code outside Rookery that it names is refused, with the command that would allow it."""
    folder = folder_of(path)
    if untrusted := [module for module in outside(folder) if not _allowed(module, trust)]:
        more = " ".join(f"--trust {shlex.quote(module)}" for module in untrusted)
        raise UsageError(
            f"the run would import code outside Rookery: {', '.join(untrusted)}; if you trust it: "
            f"{shlex.join(command)} {more}"
        )
    from rookery.run import read_config

    return read_config(folder, trust)


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


def outside(folder: Path) -> list[str]:
    """Modules that a run's config would have us import, besides our own."""
    try:
        config = json.loads(read(folder, "config.json"))
        names = [config["algorithm"], config["env"], config["net"]["module"]]
        modules = [str(name).partition(":")[0] for name in names if ":" in str(name)]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{folder / 'config.json'} cannot be read: {type(error).__name__}: {error}") from error
    return [module for module in dict.fromkeys(modules) if module.split(".")[0] != "rookery"]


def _allowed(module: str, trust: tuple[str, ...]) -> bool:
    return any(module == name or module.startswith(name + ".") for name in trust)
