"""What blocked output costs the learner: PPO on CartPole with its output read, and with every output blocked.

    .venv/bin/python benchmarks/blocked_output.py [--rounds 3] [--env-steps 100000]

Blocked: standard output and error are one full pipe that nobody reads, and every write to metrics.jsonl blocks for the
whole run. The rounds alternate. `told` is the share of the learner's wall time inside `Sinks.write` and `Panel.update`;
it says more than steps per second on a busy machine. A record is told ten times a second, ten times as
often as by default.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAM = """
import json, os, sys, threading, time
import rookery
from rookery.metrics import sink
from rookery.metrics.panel import Panel

out, steps, blocked = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "blocked"
if blocked:
    never, write = threading.Event(), os.write
    sink.os.write = lambda fd, data: never.wait() if b'"kind":"train"' in bytes(data) else write(fd, data)
spent = [0.0]
def timed(function):
    def call(*args):
        began = time.perf_counter()
        function(*args)
        spent[0] += time.perf_counter() - began
    return call
sink.Sinks.write, Panel.update = timed(sink.Sinks.write), timed(Panel.update)
run = rookery.train("ppo", env="CartPole-v1", env_steps=steps, out=out, topology="serial", log_every=0.1)
print(json.dumps({"steps_per_s": run.summary["steps_per_s"], "told": spent[0] / run.summary["wall_s"],
                  "lost": run.summary["records_lost"]}), file=open(out + "/result.json", "w"))
os._exit(0)
"""


def full_pipe() -> tuple[int, int]:
    read, write = os.pipe()
    os.set_blocking(write, False)
    try:
        while True:
            os.write(write, b"x" * 1024)
    except BlockingIOError:
        os.set_blocking(write, True)
    return read, write


def measure(folder: Path, steps: int, blocked: bool) -> dict:
    read, write = full_pipe() if blocked else (-1, os.open(os.devnull, os.O_WRONLY))
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, folder, str(steps), "blocked" if blocked else "free"]
    subprocess.run(command, stdout=write, stderr=write, check=True)
    for fd in {read, write} - {-1}:
        os.close(fd)
    return json.loads((folder / "result.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--env-steps", type=int, default=100_000)
    args = parser.parse_args()
    found: dict[str, list[dict]] = {"free": [], "blocked": []}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(args.rounds):
            for name, results in found.items():
                results.append(measure(Path(folder) / f"{name}-{turn}", args.env_steps, name == "blocked"))
                print(f"{name:8} {json.dumps(results[-1])}", flush=True)
    for name, results in found.items():
        speed, told = (statistics.median(result[key] for result in results) for key in ("steps_per_s", "told"))
        print(f"{name:8} median {speed:,.0f} steps/s, told {told:.3%} of the time")


if __name__ == "__main__":
    main()
