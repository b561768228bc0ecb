"""How many runs at a time: cores, memory and threads of this machine, divided among the runs of a sweep."""

from __future__ import annotations

from dataclasses import replace

from rookery.core.config import RunConfig
from rookery.core.machine import Machine, amount

PROCESS = 400 << 20  # bytes that a process of a run takes at least: Python with torch


def cores_of(config: RunConfig) -> int:
    """Cores of this machine that one run keeps busy."""
    if config.topology == "serial" or (config.topology == "allreduce" and config.group.crew == "inline"):
        return config.ranks
    return config.ranks * config.actors


def jobs_for(base: RunConfig, machine: Machine | None = None) -> int:
    """As many runs at a time as the cores and the memory allow; one on a GPU."""
    machine = machine or Machine()
    have, _ = machine.memory()
    return max(1, min(machine.cores() // cores_of(base), have // memory_of(base))) if base.device == "cpu" else 1


def memory_of(config: RunConfig) -> int:
    """Bytes that one run takes at least: its processes, without a replay memory."""
    return PROCESS * (1 if config.topology == "serial" else 1 + cores_of(config))


def memory_note(base: RunConfig, jobs: int, machine: Machine | None = None) -> str:
    """What to say if so many runs at a time may need more memory than there is; else nothing."""
    have, source = (machine or Machine()).memory()
    need = memory_of(base) * jobs
    if need <= have:
        return ""
    return (
        f"{jobs} runs at a time take {amount(need)} of memory or more, and there are {amount(have)} ({source}): "
        "take fewer at a time"
    )


def with_threads(base: RunConfig, jobs: int) -> RunConfig:
    """The cores divided among the runs, if the caller did not say how many threads each computes with."""
    if base.threads:
        return base
    return replace(base, threads=max(1, Machine().cores() // (jobs * base.ranks)))
