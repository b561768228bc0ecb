"""Rookery's replay memory against cpprb and torchrl: the same calls in the same loop, in one run, taking turns.

    .venv/bin/python benchmarks/replay.py [transitions frames] [--rounds 3] [--items 1000000] [--frame-items 1000000]

Proportional replay, alpha 0.6, beta 0.4. sample: a batch of 512 with importance weights; update: 512 new priorities for
the batch just drawn; pair: both, since a memory may leave work of one to the other; add: 50 items that push the oldest
out. Transitions have two observations of 4 floats; frames are 84x84, stacks of 4, two of them an item. Every memory is
full, runs in a process and an environment of its own and in one thread (`rival_replay.py` has the loop). A number is
the median over rounds of a round's median in microseconds; bold is cpprb's median over this one.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

from rookery.core.machine import Machine

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RIVALS = ("cpprb", "torchrl")
BARS = {"sample": 3.0, "update": 3.0, "add": 1.0}
OPERATIONS = {"sample": "sample(512)", "update": "update(512)", "pair": "sample + update", "add": "add(50)"}
MEMORIES = {
    "rookery": "Rookery",
    "rookery-memory": "Rookery, weights over the memory",
    "cpprb": "cpprb",
    "cpprb-plain": "cpprb, frames not shared",
    "torchrl": "torchrl",
}
ENTRANTS = {
    "transitions": ["rookery", "cpprb", "rookery-memory", "torchrl"],
    "frames": ["rookery", "cpprb", "rookery-memory", "cpprb-plain", "torchrl"],
}
NAIVE = ("cpprb-plain", "torchrl")  # no frame is shared
CALLS = {"transitions": 1_000, "frames": 100}
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")


class NotMeasured(Exception):
    """Says why."""


def package(memory: str) -> str:
    return memory.partition("-")[0]


def rival_environment(name: str) -> None:
    """Created at first use; a pip that fails is a rival that cannot be measured."""
    venv = ROOT / f".venv-{name}"
    if (venv / ".installed").exists():
        return
    print(f"installing {name} in {venv.name}", file=sys.stderr, flush=True)
    try:
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        pip = [venv / "bin/pip", "install", "-q", "-c", HERE / "requirements-replay.txt", name]
        subprocess.run(pip, check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        raise NotMeasured(_why(error.stderr or str(error))) from error
    (venv / ".installed").touch()


def one_round(memory: str, data: str, items: int, calls: int) -> dict[str, float]:
    name = package(memory)
    python = sys.executable if name == "rookery" else ROOT / f".venv-{name}/bin/python"
    command = [python, HERE / "rival_replay.py", memory, data, "--items", str(items), "--calls", str(calls)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=3600, env=os.environ | ONE_THREAD)
    except subprocess.TimeoutExpired as error:
        raise NotMeasured("it did not end within an hour") from error
    if done.returncode < 0:
        raise NotMeasured(f"ended by {signal.Signals(-done.returncode).name}")
    if done.returncode:
        raise NotMeasured(_why(done.stderr))
    return json.loads(done.stdout.splitlines()[-1])


def _why(text: str) -> str:
    """The line that names the error; a traceback begins with those that do not."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith((" ", "\t", "Traceback"))]
    errors = [line for line in lines if "error" in line.partition(":")[0].lower()]
    return (errors or lines or ["it said nothing"])[0].strip()


def fits(memory: str, data: str, items: int) -> bool:
    """Whether the machine has room: who stores every stack twice needs 56 kB an item."""
    need, have = items * 2 * 4 * 84 * 84, Machine().memory()[0]
    if data == "transitions" or memory not in NAIVE or need < 0.8 * have:
        return True
    print(f"{memory}: not measured, {items:,} items need {need / 2**30:.0f} GiB and there are {have / 2**30:.0f}\n")
    return False


def measure(data: str, items: int, calls: int, rounds: int, missing: dict[str, str]) -> dict[str, list[dict]]:
    """Results by memory, a round each. `missing` gathers why a rival has none; others go on without it."""
    results: dict[str, list[dict]] = {}
    entrants = [memory for memory in ENTRANTS[data] if fits(memory, data, items)]
    for turn in range(rounds):
        for memory in entrants[turn % len(entrants) :] + entrants[: turn % len(entrants)]:
            if package(memory) in missing:
                continue
            print(f"{data}, round {turn + 1}: {memory}", file=sys.stderr, flush=True)
            try:
                results.setdefault(memory, []).append(one_round(memory, data, items, calls))
            except NotMeasured as error:
                if package(memory) == "rookery":
                    raise
                missing[package(memory)] = str(error)
                print(f"{package(memory)}: could not be measured here: {error}\n", flush=True)
    return {memory: results[memory] for memory in MEMORIES if memory in results and package(memory) not in missing}


def table(results: dict[str, list[dict]]) -> str:
    lines = [
        "| microseconds | " + " | ".join(MEMORIES[memory] for memory in results) + " | bar |",
        "|---" * (len(results) + 2) + "|",
    ]
    for operation, title in OPERATIONS.items():
        cells = [cell(results, memory, operation) for memory in results]
        bar = f"{BARS[operation]:g}×" if operation in BARS else ""
        lines.append(f"| {title} | " + " | ".join(cells) + f" | {bar} |")
    memory = [f"{statistics.median(one['gigabytes'] for one in rounds):.2f} GB" for rounds in results.values()]
    lines.append("| most memory of the process | " + " | ".join(memory) + " | |")
    return "\n".join(lines)


def cell(results: dict[str, list[dict]], memory: str, operation: str) -> str:
    times = [one[operation] for one in results[memory]]
    text = f"{statistics.median(times):,.0f} ({min(times):,.0f} to {max(times):,.0f})"
    if package(memory) != "cpprb" and "cpprb" in results:
        rival = statistics.median(one[operation] for one in results["cpprb"])
        text += f" **{rival / statistics.median(times):.2f}×**"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="*", default=[], choices=[*ENTRANTS, []], metavar="data", help="default: both")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--items", type=int, default=1_000_000, help="transitions in each memory")
    parser.add_argument("--frame-items", type=int, default=1_000_000, help="of frames; some rivals need 56 kB each")
    parser.add_argument("--calls", type=int, help="of each round that count; a quarter as many come before")
    args = parser.parse_args()
    if any(items < 5_000 or items % 50 for items in (args.items, args.frame_items)):
        parser.error("items: at least 5000, and a multiple of 50, so that no parcel goes around the end")
    missing: dict[str, str] = {}
    for name in RIVALS:
        try:
            rival_environment(name)
        except NotMeasured as error:
            missing[name] = str(error)
            print(f"{name}: could not be installed here: {error}\n")
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=HERE
    ).stdout.strip()
    print(
        f"{time.strftime('%Y-%m-%d')}, commit {commit}, rounds: {args.rounds}, taking turns; medians (min to max); "
        f"bold: cpprb's time over this one's. {versions()}\n",
        flush=True,
    )
    for data in args.data or ENTRANTS:
        items = args.items if data == "transitions" else args.frame_items
        results = measure(data, items, args.calls or CALLS[data], args.rounds, missing)
        print(f"{data}, {items:,} items\n\n{table(results)}\n")
        build = statistics.median(one["build"] for one in results["rookery"])
        print(f"Before Rookery's add, an actor puts the 50 items together in its own process: {build:,.0f} µs.\n")


def versions() -> str:
    pins = [line.split("==") for line in (HERE / "requirements-replay.txt").read_text().split() if "==" in line]
    rivals = ", ".join(f"{name} {number}" for name, number in pins if name in RIVALS)
    try:
        return f"Rookery with numba {version('numba')}, {rivals}."
    except ModuleNotFoundError:
        return f"Rookery without numba, {rivals}."


if __name__ == "__main__":
    main()
