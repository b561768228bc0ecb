"""GridNav with and without memory: success and SPL of DD-PPO, VER and a policy without a recurrent core.

    .venv/bin/python benchmarks/gridnav.py [ddppo ver memoryless] [--seeds 1 2 3] [--out runs/gridnav] [--env-steps 2M]

Two ranks each. Success is the mean of the last 100 training episodes, with sampled actions. A run that is complete in
the folder is not repeated. Prints a table, and draws the curves.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

COMMON = ["--env", "rookery/GridNav-v0", "--ranks", "2", "--quiet"]
PARTS = {
    "ddppo": ("DD-PPO, LSTM", ["ddppo"]),
    "ver": ("VER, LSTM", ["ver", "--group.workers", "2"]),
    "memoryless": ("DD-PPO without memory", ["ddppo", "--net.core", "none", "--net.no-feed-last"]),
}
BAR = 0.9


def records(name: str, seed: int, folder: Path, env_steps: str) -> list[dict[str, Any]]:
    """The reports of a run, which is trained now if it is not there."""
    out = folder / f"{name}-{seed}"
    if not (out / "summary.json").exists():
        command = [sys.executable, "-m", "rookery", "train", *PARTS[name][1], *COMMON, "--env-steps", env_steps]
        command += ["--seed", str(seed), "--out", str(out)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=7200)
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == "train" and "success" in line["info"]]


def row(name: str, seed: int, told: list[dict[str, Any]]) -> str:
    reached = next((f"{line['env_steps']:,}" for line in told if line["info"]["success"] >= BAR), "–")
    last = told[-1]
    speed = last["env_steps"] / last["wall_s"]
    end = f"{last['info']['success']:.2f} | {last['info']['spl']:.2f} | {last['env_steps']:,}"
    return f"| {PARTS[name][0]} | {seed} | {reached} | {end} | {speed:,.0f} |"


def draw(runs: dict[str, list[list[dict[str, Any]]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(10, 3.6), sharey=True, layout="constrained")
    for number, (name, seeds) in enumerate(runs.items()):
        for told in seeds:
            for panel, key in zip(panels, ("success", "spl")):
                label = PARTS[name][0] if told is seeds[0] else None
                steps = [line["env_steps"] / 1e6 for line in told]
                panel.plot(steps, [line["info"][key] for line in told], color=f"C{number}", lw=1.2, label=label)
    for panel, words in zip(panels, ("success", "SPL")):
        panel.set(xlabel="environment steps, millions", ylabel=f"{words}, last 100 episodes", ylim=(0, 1))
        panel.grid(color="0.9")
    panels[0].axhline(BAR, color="0.4", lw=0.8, ls="--")
    panels[0].legend(fontsize=8, loc="center right")
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="all of them if none is named")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--out", type=Path, default=Path("runs/gridnav"))
    parser.add_argument("--env-steps", default="2M")
    args = parser.parse_args()
    print(
        f"| | seed | steps to {BAR} | success | SPL | after steps | steps/s |\n|---|---|---|---|---|---|---|",
        flush=True,
    )
    runs: dict[str, list[list[dict[str, Any]]]] = {}
    for name in args.parts or PARTS:
        for seed in args.seeds:
            told = records(name, seed, args.out, args.env_steps)
            runs.setdefault(name, []).append(told)
            print(row(name, seed, told), flush=True)
    draw(runs, args.out / "gridnav.png")


if __name__ == "__main__":
    main()
