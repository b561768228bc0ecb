"""What the training loop itself costs: unrolls per second through the parent, with environments and a learner that do
nothing, as the number of actors grows.

    .venv/bin/python benchmarks/plumbing.py [--unrolls 4000]

Each row is one crew and one table. `parent` is the processor time of the parent process per unroll (inline: the time
without acting, so measure on a quiet machine). It should not grow with the number of actors. A round hands all unrolls
of all actors over at once, a queue with lag in batches of 8.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch

import rookery
from rookery.algorithms.registry import build_algorithm
from rookery.core.config import RunConfig
from rookery.core.types import StepReport
from rookery.crews.inline import InlineCrew
from rookery.crews.process import ProcessCrew
from rookery.metrics.journal import Journal
from rookery.processes.signals import Signals
from rookery.processes.threads import Threads
from rookery.roles.learner import Learner
from rookery.tables.queue import LagQueue, RoundQueue
from rookery.topologies import loop
from rookery.topologies.job import Job

UNROLL = 4
INLINE, PROCESSES = (2, 16, 64, 256), (2, 8, 32)


class Null(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self) -> None:
        self._obs = np.zeros(4, np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        return self._obs, {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        return self._obs, 0.0, False, False, {}


def make() -> Null:
    return Null()


class NullTrainer:
    """Every batch makes a new version of the same weights."""

    def __init__(self, learner: Learner):
        self.version, self.updates, self._weights = 0, 0, learner.read()

    def step(self, batch: Any, progress: float, tell: bool = True) -> StepReport:
        self.version += 1
        return StepReport({})

    def read(self) -> torch.Tensor:
        return self._weights

    def ensure_finite(self) -> None:
        pass


class Quiet:
    def write(self, record: dict[str, Any]) -> None:
        pass

    update = write


def measure(config: RunConfig, crew: InlineCrew | ProcessCrew, folder: Path, signals: Signals, lag: int, count: int):
    """Unrolls per second, and microseconds of the parent's processor time for one."""
    algorithm = build_algorithm(config, crew.spec)
    learner, threads = Learner(algorithm, config.seed), Threads(config)
    journal = Journal(config, Quiet(), Quiet())
    job = Job(config, algorithm, learner, journal, folder, signals, threads, crew.spec)
    table = LagQueue(config.actors, min(8, config.actors), lag) if lag else RoundQueue(config.actors)
    setup = loop.prepare(job, table, job.shapes(), learner.published.size)
    if isinstance(crew, InlineCrew):
        crew.open(setup, learner, threads, in_order=not lag)
    else:
        crew.open(setup)
    turns, acted = loop.Loop(job, crew, table, NullTrainer(learner)), 0.0

    def go(unrolls: int) -> None:
        until = journal.env_steps + unrolls * UNROLL
        while journal.env_steps < until:
            turns.supply()
            turns.collect()
            turns.learn()

    told = journal.told

    def watched(actor: int, report: Any, *more: Any) -> None:
        nonlocal acted
        acted += report.total_s
        told(actor, report, *more)

    journal.told = watched
    go(max(200, 2 * config.actors))
    acted, wall, cpu = 0.0, time.perf_counter(), time.process_time()
    go(count)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    threads.restore()
    return count / wall, (wall - acted if isinstance(crew, InlineCrew) else cpu) / count * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--unrolls", type=int, default=4000)
    args = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    print(f"{time.strftime('%Y-%m-%d')}, commit {commit}, {args.unrolls} unrolls of {UNROLL} steps\n")
    print("| crew | actors | table | unrolls/s | parent µs/unroll |\n|---|---|---|---|---|", flush=True)
    for kind, counts in (("inline", INLINE), ("processes", PROCESSES)):
        for actors in counts:
            for lag in (0, 4):
                algo = {"unroll": UNROLL, "epochs": 1, "minibatches": 1}
                config = rookery.configure(
                    "ppo", "plumbing:make", preset="vector", actors=actors, envs_per_actor=1, env_steps=10**9,
                    topology="serial" if kind == "inline" else "local", algo=algo, net={"hidden": (8,)}, quiet=True,
                    supervisor={"spare": False}, threads=1,
                )  # fmt: skip
                with tempfile.TemporaryDirectory() as folder, Signals() as signals:
                    inline = kind == "inline"
                    crew = InlineCrew(config, signals) if inline else ProcessCrew(config, Path(folder), signals)
                    with crew:
                        rate, cost = measure(config, crew, Path(folder), signals, lag, args.unrolls)
                table = f"lag {lag}" if lag else "rounds"
                print(f"| {kind} | {actors} | {table} | {rate:,.0f} | {cost:.0f} |", flush=True)


if __name__ == "__main__":
    sys.modules["plumbing"] = sys.modules["__main__"]  # the environment's module, here as in the workers
    main()
