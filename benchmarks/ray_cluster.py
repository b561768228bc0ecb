"""Topology ray_cluster against local and against RLlib on the same cores, and what Ray costs per unroll.

    .venv/bin/python benchmarks/ray_cluster.py ppo-cartpole appo-pong apex-pong plumbing --rounds 3 --out ray.json
    .venv/bin/python benchmarks/ray_cluster.py --quick --out quick.json      # does everything still run?

Not called `ray.py`: every script in this folder that imports Ray would then import that file.

ppo-cartpole, appo-pong, apex-pong: the settings of `throughput.py` (`cartpole-local`, `appo-pong`, `apex`), 2 actors,
under topologies local and ray_cluster (a cluster that is started for the run), and RLlib in its stock setting and
tuned (`rllib_ppo.py`, `rllib_appo.py`). All of a task alternate, each in a process of its own. A ratio is Rookery on
Ray over the other: that of the medians, and in parentheses those of the rounds. Bars: 0.8 of local on Pong, 5 times
RLlib's stock setting.
- driver: the processor time of the driver (loop, learner, Ray's threads), of all that the run and its cluster have used
- publish: a version of the weights is handed over; pulled: from there until an actor has it; order: the part of that
  behind the order, without the unroll that the actor had to finish before. Median (90th percentile)
- bytes: arrays that have arrived at the driver, per environment step

plumbing: environments and learner do nothing (`plumbing.py`), 2 to 64 Ray actors share the CPUs, and as many
processes for comparison. `driver` is the processor time of the driver per unroll, with Ray's threads in it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import children
import throughput
from children import Failed

HERE = Path(__file__).resolve().parent
RLLIB_BAR = 5.0
LAGS = (0, 4)  # of the plumbing: rounds, and a queue with lag


@dataclass(frozen=True)
class Task:
    recipe: str
    settings: str  # a task of throughput.py
    env_steps: int
    local_bar: float = 0.0  # the ratio to local to reach; 0: none is set
    rival: str = ""  # its script
    rival_steps: int = 0  # measured of a rival; it is slower
    quick: int = 0  # steps of a smoke run


TASKS = {
    "ppo-cartpole": Task("ppo", "cartpole-local", 400_000, 0.0, "rllib_ppo.py cartpole", 60_000, 60_000),
    "appo-pong": Task("appo", "appo-pong", 60_000, 0.8, "rllib_appo.py pong", 20_000, 10_000),
    "apex-pong": Task("apex_dqn", "apex", 30_000, 0.8, quick=6_000),
}
CASES = ("local", "ray", "rllib", "rllib-tuned")


def measure(task: Task, case: str, args: argparse.Namespace) -> dict[str, Any]:
    if case.startswith("rllib"):
        script, *words = task.rival.split()
        steps = task.quick // 4 if args.quick else int(task.rival_steps * args.length)
        command = [throughput.RLLIB / "bin/python", HERE / script, *words, "--env-steps", str(steps)]
        command += ["--stock"] if case == "rllib" else []
    else:
        steps = task.quick if args.quick else int(task.env_steps * args.length)
        words = throughput.TASKS[task.settings].words
        if "--topology" in words:
            at = words.index("--topology")
            words = words[:at] + words[at + 2 :]
        topology = "ray_cluster" if case == "ray" else "local"
        command = [sys.executable, HERE / "ray_run.py", "train", task.recipe, *words, "--topology", topology]
        command += ["--env-steps", str(steps)]
    return json.loads(children.run(command, args.limit).splitlines()[-1])


def plumb(crew: str, actors: int, lag: int, args: argparse.Namespace) -> dict[str, Any]:
    words = [crew, actors, 300 if args.quick else args.unrolls, lag, args.limit]
    command = [sys.executable, HERE / "ray_run.py", "plumbing", *map(str, words)]
    return json.loads(children.run(command, 2 * args.limit).splitlines()[-1])


class Results:
    """All results of all rounds, in a file that is complete after each of them."""

    def __init__(self, args: argparse.Namespace):
        self._out, self.failures = args.out, 0
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=HERE)
        self.head = f"{time.strftime('%Y-%m-%d %H:%M')}, commit {commit.stdout.strip()}, {os.cpu_count()} cores"
        self.all: dict[str, Any] = {"head": self.head, "command": sys.argv[1:], "load": [], "runs": {}, "table": []}

    def of(self, *key: Any) -> list[dict[str, Any]]:
        return self.all["runs"].get(" ".join(map(str, key)), [])

    def take(self, measured: Any, *key: Any) -> None:
        """Measure and write; a failure is reported, and the others go on."""
        name, load = " ".join(map(str, key)), os.getloadavg()[0]
        try:
            self.all["runs"].setdefault(name, []).append(measured())
        except Failed as failure:
            self.failures += 1
            self.all.setdefault("failed", []).append([name, str(failure)])
            print(f"{name} failed: {failure}", file=sys.stderr, flush=True)
        self.all["load"].append([name, load])  # before it: on a quiet machine it is that of the run before
        self.write()

    def print(self, row: str) -> None:
        self.all["table"].append(row)
        print(row, flush=True)
        self.write()

    def write(self) -> None:
        if self._out:
            self._out.write_text(json.dumps(self.all, indent=1) + "\n")


def median(runs: list[dict[str, Any]], name: str) -> float:
    return statistics.median(run[name] for run in runs)


def spread(runs: list[dict[str, Any]], name: str) -> str:
    values = [run[name] for run in runs]
    return f"{statistics.median(values):,.0f} ({min(values):,.0f} to {max(values):,.0f})"


def latency(runs: list[dict[str, Any]], name: str) -> str:
    found = [run[name] for run in runs if run.get(name)]
    return f"{median(found, 'median'):.2f} ({median(found, 'p90'):.2f})" if found else ""


def ratio(ours: list[dict[str, Any]], others: list[dict[str, Any]], bar: float) -> str:
    """Of the medians, and of each round."""
    if not ours or not others:
        return ""
    value = median(ours, "steps_per_s") / median(others, "steps_per_s")
    rounds = [mine["steps_per_s"] / other["steps_per_s"] for mine, other in zip(ours, others)]
    text = f"**{value:.2f}×** ({min(rounds):.2f} to {max(rounds):.2f})"
    return f"{text}; bar {bar:g}×: {'reached' if value >= bar else 'missed'}" if bar else text


def train(names: list[str], results: Results, args: argparse.Namespace) -> None:
    results.print(
        "| task | | steps/s | updates/s | Rookery on Ray is | driver, of all CPU | driver µs/step | cores in use "
        "| publish ms | pulled ms | order ms | bytes/step |\n|---|---|---|---|---|---|---|---|---|---|---|---|"
    )
    for name in names:
        task = TASKS[name]
        cases = [case for case in CASES if case in args.against or case == "ray"]
        cases = [case for case in cases if task.rival or not case.startswith("rllib")]
        for _ in range(args.rounds):
            for case in cases:
                results.take(lambda task=task, case=case: measure(task, case, args), name, case)
        for case in cases:
            if runs := results.of(name, case):
                results.print(row(name, case, runs, results.of(name, "ray"), task))


def row(name: str, case: str, runs: list[dict[str, Any]], on_ray: list[dict[str, Any]], task: Task) -> str:
    bar = {"local": task.local_bar, "rllib": RLLIB_BAR}.get(case, 0.0)
    cells = [name, case, spread(runs, "steps_per_s")]
    cells += [f"{median(runs, 'updates_per_s'):.2f}" if "updates_per_s" in runs[0] else ""]
    cells += ["" if case == "ray" else ratio(on_ray, runs, bar)]
    if case.startswith("rllib"):
        cells += [""] * 7
    else:
        cells += [f"{median(runs, 'driver_share'):.0%}", f"{median(runs, 'driver_us_per_step'):.1f}"]
        cells += [f"{median(runs, 'busy_cores'):.2f}"]
        cells += [latency(runs, each) for each in ("publish_ms", "pull_ms", "order_ms")]
        cells += [f"{median(runs, 'bytes_per_step'):,.0f}" if case == "ray" else ""]
    return f"| {' | '.join(cells)} |"


def plumbing(results: Results, args: argparse.Namespace) -> None:
    results.print("| crew | actors | table | unrolls/s | driver µs/unroll |\n|---|---|---|---|---|")
    for actors in args.actors:
        for _ in range(args.rounds):
            for lag in LAGS:
                for crew in args.crews:
                    key = ("plumbing", crew, actors, lag)
                    results.take(lambda at=key: plumb(at[1], at[2], at[3], args), *key)
        for crew in args.crews:
            for lag in LAGS:
                if runs := results.of("plumbing", crew, actors, lag):
                    table, speed = f"lag {lag}" if lag else "rounds", spread(runs, "unrolls_per_s")
                    results.print(f"| {crew} | {actors} | {table} | {speed} | {spread(runs, 'driver_us')} |")
    for crew in args.crews:
        for lag in LAGS:
            costs = {count: results.of("plumbing", crew, count, lag) for count in args.actors}
            means = [(count, median(runs, "driver_us")) for count, runs in costs.items() if runs]
            if len(means) > 1:
                (few, least), (many, most) = means[0], means[-1]
                table = f"lag {lag}" if lag else "rounds"
                results.print(f"\n{crew}, {table}: {most / least:.2f} times the cost with {many} actors as with {few}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = [*TASKS, "plumbing"]
    parser.add_argument("parts", nargs="*", choices=[*parts, []], help="all of them if none is named")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--length", type=float, default=1.0, help="times as many environment steps in each run")
    parser.add_argument("--against", nargs="*", choices=CASES, default=list(CASES), help="what else is measured")
    parser.add_argument("--actors", nargs="+", type=int, default=[2, 8, 32, 64], help="of the plumbing")
    parser.add_argument("--crews", nargs="+", choices=["ray", "processes"], default=["ray", "processes"])
    parser.add_argument("--unrolls", type=int, default=4000, help="of the plumbing, in each run")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds that one run may take")
    parser.add_argument("--out", type=Path, help="JSON file for the results of all rounds")
    parser.add_argument("--quick", action="store_true", help="one short round, the plumbing with 2 and 8 actors")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.actors = 1, [2, 8]
    chosen = args.parts or parts
    tasks = [name for name in chosen if name in TASKS]
    if any(TASKS[name].rival for name in tasks) and any(case.startswith("rllib") for case in args.against):
        throughput.rival_environment(throughput.RLLIB)
    results = Results(args)
    with children.adopted():
        try:
            results.print(f"{results.head}, {args.rounds} rounds, alternating; medians (min to max)\n")
            if tasks:
                train(tasks, results, args)
            if "plumbing" in chosen:
                results.print("")
                plumbing(results, args)
        except KeyboardInterrupt:
            print("interrupted; what was measured is in the file", file=sys.stderr)
            return 130
    return 1 if results.failures else 0


if __name__ == "__main__":
    sys.exit(main())
