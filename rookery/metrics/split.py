"""Where the time goes: seconds per stage, as shares of the wall clock, and one line of advice drawn from them.

The stages are fixed, so that every run, topology and plot has the same seven. Measuring costs two clock
reads per stage and allocates nothing; it is always on. This file is arithmetic: it starts no thread and reads no file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from rookery.core.config import RunConfig
from rookery.core.wording import setting, settings

STAGES = ("env", "inference", "learn", "transfer", "wait", "evaluate", "other")


class Split:
    """Seconds per stage of one thread. Stages may nest: an inner stage's time is not the outer's."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self._stages = {name: _Stage(self, name) for name in STAGES}
        self._open: list[list[float]] = []  # [start, seconds spent in inner stages] of the stages we are in
        self._clock = clock

    def stage(self, name: str) -> _Stage:
        """`with split.stage("learn"): …`"""
        return self._stages[name]

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] += seconds

    def shares(self, wall: float) -> dict[str, float]:
        return shares(self.seconds, wall)


class _Stage:
    """One reusable context manager per stage: entering one is two list operations and a clock read."""

    __slots__ = ("_name", "_split")

    def __init__(self, split: Split, name: str):
        self._split, self._name = split, name

    def __enter__(self) -> None:
        self._split._open.append([self._split._clock(), 0.0])

    def __exit__(self, *_: object) -> None:
        split = self._split
        start, inner = split._open.pop()
        elapsed = split._clock() - start
        split.seconds[self._name] += elapsed - inner
        if split._open:
            split._open[-1][1] += elapsed


def shares(seconds: Mapping[str, float], wall: float) -> dict[str, float]:
    """Shares of `wall` that sum to 1; what was not measured is "other". Overlapping stages are scaled to fit."""
    known = {name: max(0.0, seconds.get(name, 0.0)) for name in STAGES}
    total = max(wall, sum(known.values()))
    if total <= 0:
        return dict.fromkeys(STAGES, 0.0) | {"other": 1.0}
    known["other"] += total - sum(known.values())
    return {name: value / total for name, value in known.items()}


def advice(shares: Mapping[str, float], config: RunConfig, cores: int) -> str:
    """What limits the run and what to try, in one line; empty as long as nothing was measured."""
    known = {name: share for name, share in shares.items() if name in STAGES and share and share > 0}
    if not known:
        return ""
    limit = max(known, key=lambda name: known[name])
    verb = "limits the run" if known[limit] >= 0.4 else "takes the largest share"
    return f"{_WORDS[limit]} {verb} ({known[limit]:.0%}): try {_remedy(limit, config, cores)}"


def _remedy(limit: str, config: RunConfig, cores: int) -> str:
    actors, lanes = config.actors, config.envs_per_actor
    replay = getattr(config.algo, "replay", None)
    match limit:
        case "env" if cores > 1 and config.topology == "serial":
            return settings(topology="local", actors=cores)
        case "env" if actors < cores:
            return setting("actors", min(2 * actors, cores))
        case "env":
            return f"a lighter environment ({cores} core{'s are' if cores > 1 else ' is'} already at work on it)"
        case "inference":
            return f"{setting('envs_per_actor', 2 * lanes)} (one forward pass serves more) or a smaller network"
        case "learn":
            fewer = "fewer epochs"
            if replay is not None:
                ratio = replay.samples_per_insert
                fewer = f"a smaller {setting('algo.replay.batch')}"
                fewer = setting("algo.replay.samples_per_insert", ratio / 2) if ratio else fewer
            if config.device == "cpu" and not config.compile:
                return f"{fewer}, a smaller network, {setting('compile', True)}, or {setting('device', 'cuda')}"
            return f"{fewer} or a smaller network"
        case "transfer":
            return "a longer unroll, or smaller observations (uint8 frames)"
        case "wait" if actors > cores:
            return f"{setting('actors', cores)} ({actors} actors share {cores} core{'s' if cores > 1 else ''})"
        case "wait":
            return f"{setting('envs_per_actor', 2 * lanes)} (slow and fast environments even out)"
        case "evaluate":
            return (
                f"{setting('topology', 'local')}, where another process evaluates, or a larger {setting('eval.every')}"
            )
    return "a profiler, such as py-spy: the measured stages are not the cause"


_WORDS = {
    "env": "the environment",
    "inference": "inference",
    "learn": "learning",
    "transfer": "moving data",
    "wait": "waiting for the slowest actor",
    "evaluate": "evaluation between updates",
    "other": "unmeasured work",
}
