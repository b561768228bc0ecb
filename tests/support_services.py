"""Runs on a Ray cluster that last long enough for a service of theirs to be killed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import gymnasium

from rookery.envs.scripted import Counter

SLOW: dict[str, Any] = {"env": "support_services:slow", "preset": "vector"}


def slow(seconds: float = 0.001) -> gymnasium.Env:
    """An environment whose steps take so long."""
    env = Counter(lengths=(20,))
    step = env.step

    def step_slowly(action: Any) -> Any:
        time.sleep(seconds)
        return step(action)

    env.step = step_slowly  # type: ignore[method-assign]
    return env


def trains(folder: Path) -> bool:
    """Whether the journal of that run tells of updates."""
    journal = folder / "metrics.jsonl"
    return journal.exists() and '"kind":"train"' in journal.read_text()
