"""Steps per second of collecting: environments that step on their own (VER) against a process per environment.

    python benchmarks/ver.py --seconds 20

GridNav with a feed-forward policy, steps that take 2 ms on average: all alike, widely spread, and one environment of
eight ten times slower. Only collecting is timed: rollouts of 64 steps per environment, no learning. `processes` is
`ProcessCrew` with one actor for each environment, where every rollout waits for the slowest; `ready` is `ReadyCrew`.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from rookery.algorithms.registry import build_algorithm
from rookery.crews.crew import Setup
from rookery.crews.process import ProcessCrew
from rookery.crews.ready import ReadyCrew
from rookery.processes.signals import Signals
from rookery.roles.learner import Learner
from rookery.roles.producer import handover_shapes
from rookery.run.run import configure

LANES, UNROLL, DELAY = 8, 64, 0.002
CASES = {"alike": {}, "spread": {"delay_spread": 1.0}, "one 10x slower": {"slow": 10.0}}


def measure(kind: str, kwargs: dict[str, Any], seconds: float) -> float:
    """Environment steps per second."""
    ready = kind == "ready"
    config = configure(
        "ppo", "rookery/GridNav-v0", preset="pixels", quiet=True, env_kwargs={"delay": DELAY} | kwargs,
        actors=1 if ready else LANES, envs_per_actor=LANES if ready else 1,
        algo={"unroll": UNROLL, "stretch": 4 if ready else 1, "minibatches": 1},
    )  # fmt: skip
    made = ReadyCrew if ready else ProcessCrew
    with tempfile.TemporaryDirectory() as folder, Signals() as signals, made(config, Path(folder), signals) as crew:
        algorithm = build_algorithm(config, crew.spec)
        learner = Learner(algorithm, 1)
        state = algorithm.initial_state(learner.nets, 1)
        shapes = handover_shapes(crew.spec, algorithm.plan(), config.envs_per_actor, state)
        floats, actors = learner.published.size, config.actors
        crew.open(Setup(algorithm, shapes, floats, 1, [0] * actors, [], print, print))
        crew.publish(learner.read, 0)
        _round(crew)  # warm up
        steps, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            steps += _round(crew)
        return steps / (time.perf_counter() - began)


def _round(crew: Any) -> int:
    """One rollout of every actor."""
    steps, waiting = 0, len(crew.openings)
    while crew.openings:
        crew.order(crew.openings.popleft(), 0.0)
    deliveries = []
    while len(deliveries) < waiting:
        deliveries += crew.arrived(1.0)
    for delivery in deliveries:
        steps += delivery.report.steps
        delivery.release()
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    seconds = parser.parse_args().seconds
    print(f"{LANES} environments, {UNROLL} steps each per rollout, {DELAY * 1000:g} ms per step on average")
    for case, kwargs in CASES.items():
        plain, ready = (measure(kind, kwargs, seconds) for kind in ("processes", "ready"))
        print(f"{case:16s} processes {plain:7.0f} steps/s, ready {ready:7.0f} steps/s: {ready / plain:.2f}x")


if __name__ == "__main__":
    main()
