"""The folder of a run: named, opened for one process alone, cleared of a run that never began."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rookery.algorithms.registry import encode_config
from rookery.core.config import RunConfig
from rookery.core.errors import CheckpointError, RookeryError, StorageError, UsageError
from rookery.core.wording import setting
from rookery.run.history import Changed, with_history
from rookery.run.init_from import check_apart, keep
from rookery.storage import checkpoint
from rookery.storage import folder as folders
from rookery.storage.claim import claimed
from rookery.storage.trust import resume_command


def folder_name(config: RunConfig) -> str:
    env = re.sub(r"[^A-Za-z0-9]+", "-", config.env).strip("-")
    name = f"runs/{config.recipe}-{env}-{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = (name if n == 1 else f"{name}-{n}" for n in itertools.count(1))
    return next(each for each in names if not os.path.exists(each))


@contextmanager
def rank_folder(config: RunConfig, again: bool, changes: Changed | None = None) -> Iterator[Path]:
    """The folder of a run under torchrun, on rank 0: a new one, or that of the group that was started before.

    `changes`: what a resume has changed, for the history.
    """
    if again and not config.out:
        raise UsageError(
            f"torchrun has started the ranks again, and without {setting('out')} there is no folder to go on in"
        )
    config = replace(config, out=config.out or folder_name(config))
    folder = folders.real(config.out)
    if again and folders.exists(folder, "config.json"):
        folders.check(folder)
        with claimed(folder):
            folders.sweep(folder)
            stored = folders.read(folder, "config.json")
            if changes:
                steps = max(checkpoint.all_steps(folder / "checkpoints"), default=0)
                folders.store(folder, "config.json", encode_config(with_history(config, steps, changes)))
            try:
                yield folder
            except (UsageError, CheckpointError):  # it cannot be resumed like this: as it was, it still can
                folders.store(folder, "config.json", stored)
                raise
        return
    check_apart(config, folder)
    with opened(folder):
        keep(config, folder)  # first: a folder with a config.json can be resumed
        folders.store(folder, "config.json", encode_config(config))
        yield folder


@contextmanager
def opened(folder: Path, overwrite: bool = False) -> Iterator[None]:
    """A new folder for a run, which no other process uses. `overwrite`: the place of one that failed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"cannot write the run folder {folder}: {error.strerror or error}") from error
    folders.check(folder)
    with claimed(folder):
        if folders.exists(folder, "config.json"):
            if not overwrite:
                raise UsageError(f"{folder} already holds a run; {_ways_out(folder)}")
            if folders.exists(folder, "summary.json"):
                raise UsageError(
                    f"{folder} holds a run that ended without an error, and such a run is not overwritten: "
                    "remove the folder yourself, or choose another"
                )
            folders.clear(folder)
        yield


def _ways_out(folder: Path) -> str:
    """What to do about a run that is in the way."""
    try:
        fields = json.loads(folders.read(folder, "config.json"))
    except (RookeryError, ValueError, RecursionError):
        fields = {}
    ways = f"resume it ({resume_command(folder, fields)}), choose another {setting('out')}"
    if folders.exists(folder, "summary.json"):
        return ways.replace(", choose", " or choose")
    return f"{ways}, or have it deleted, since it did not end properly ({setting('overwrite', True)})"


def clear_folder(folder: Path, before: set[str] | None) -> None:
    """Remove what a run that never began has written, and nothing that was there before (None: no folder)."""
    if before is None:
        shutil.rmtree(folder, ignore_errors=True)
        return
    for path in folder.iterdir():
        if path.name in before:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
