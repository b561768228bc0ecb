"""What the user should know when a run starts, besides errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rookery.core.config import RunConfig
from rookery.core.errors import StorageError
from rookery.metrics.journal import Journal
from rookery.metrics.rewind import rewind
from rookery.nets.torso import bf16_is_emulated
from rookery.processes.threads import available_cores
from rookery.storage.checkpoint import Checkpoint


def rank_notes(config: RunConfig) -> list[str]:
    cores = available_cores()
    if config.ranks <= cores:
        return []
    return [f"{config.ranks} ranks share {cores} cores: more ranks than cores do not make a run faster"]


def rewound(folder: Path, saved: Checkpoint | None, journal: Journal) -> tuple[list[str], list[dict[str, Any]]]:
    """Records of steps that will be taken again leave metrics.jsonl. What to say of it, and evaluations that stay."""
    try:
        moved, where, wall_s, evaluated = rewind(folder, -1 if saved is None else saved.env_steps)
    except StorageError as error:  # records must not stop a run
        return [str(error)], []
    journal.not_before(wall_s)
    since = "the start of the run" if saved is None else "the checkpoint"
    told = [f"{moved} records of steps after {since} are in {where} now: these steps are taken again"] if moved else []
    return told, evaluated


def warnings_of(config: RunConfig) -> list[str]:
    if config.net.precision == "bf16" and bf16_is_emulated(config.device):
        return ["this processor has no bf16 arithmetic: bf16 is emulated here, about ten times slower than fp32"]
    return []
