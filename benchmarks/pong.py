"""Pong, part by part: steps and time until the mean of 100 episodes reaches 18, of IMPALA and what is added to it.

    .venv/bin/python benchmarks/pong.py [impala appo replay autoencoder loading] [--seeds 1 2] [--out runs/pong]

Each row adds one part to the row before (Luo et al. 2019): IMPALA; PPO's objective, which allows several passes over a
batch; replayed unrolls; an auto-encoder; loader threads. All have the same frames, network, step size and number of
environments. A run that is complete in the folder is not repeated. Prints a table, and draws all curves.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

COMMON = ["--preset", "pong", "--env", "ALE/Pong-v5", "--target-return", "18", "--quiet"]
REPLAY = ["--algo.queue.replayed", "1", "--algo.queue.ring", "32", "--algo.epochs", "2"]
AUTOENCODER = ["--algo.autoencoder.on", "--algo.autoencoder.latent", "128"]
NO_LOADERS = ["--algo.queue.loaders", "0"]
PARTS = {
    "impala": ("impala", NO_LOADERS),
    "appo": ("appo", NO_LOADERS),
    "replay": ("appo", [*NO_LOADERS, *REPLAY]),
    "autoencoder": ("appo", [*NO_LOADERS, *REPLAY, *AUTOENCODER]),
    "loading": ("appo", [*REPLAY, *AUTOENCODER]),
    "preset": ("appo", []),
}
WORDS = {
    "impala": "IMPALA",
    "appo": "+ asynchronous PPO objective, 4 passes",
    "replay": "+ replay, one old unroll for each new one, 2 passes",
    "autoencoder": "+ auto-encoder, latent 128",
    "loading": "+ parallel loading",
    "preset": "the preset `pong`: asynchronous PPO, 4 passes, parallel loading",
}


def train(name: str, seed: int, folder: Path, more: list[str]) -> dict:
    recipe, flags = PARTS[name]
    out = folder / f"{name}-{seed}"
    if not (out / "summary.json").exists():
        command = [sys.executable, "-m", "rookery", "train", recipe, *COMMON, *flags, "--seed", str(seed), *more]
        subprocess.run([*command, "--out", str(out)], check=True, stdout=subprocess.DEVNULL, timeout=7200)
    return json.loads((out / "summary.json").read_text())


def row(name: str, runs: list[dict]) -> str:
    reached = [run for run in runs if run["env_steps_to_target"] is not None]
    steps = ", ".join(f"{run['env_steps_to_target']:,}" if run in reached else "–" for run in runs)
    minutes = ", ".join(f"{run['wall_s_to_target'] / 60:.1f}" if run in reached else "–" for run in runs)
    ends = ", ".join(f"{run['return_mean']:.1f} after {run['env_steps']:,}" for run in runs)
    speed = statistics.median(run["steps_per_s"] for run in runs)
    return f"| {WORDS[name]} | {steps} | {minutes} | {ends} | {speed:,.0f} |"


def draw(names: list[str], seeds: list[int], folder: Path) -> None:
    """Return over steps and over wall time, one colour for each part and a line for each seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(10.5, 4), sharey=True, layout="constrained")
    for number, name in enumerate(names):
        for seed in seeds:
            lines = (folder / f"{name}-{seed}" / "metrics.jsonl").read_text().splitlines()
            records = [record for record in map(json.loads, lines) if record.get("return_mean") is not None]
            for panel, key, scale in zip(panels, ("env_steps", "wall_s"), (1e6, 60)):
                label = WORDS[name].replace("`", "") if seed == seeds[0] and panel is panels[0] else None
                points = [record[key] / scale for record in records]
                panel.plot(points, [r["return_mean"] for r in records], color=f"C{number}", lw=1.2, label=label)
    for panel, words in zip(panels, ("environment steps, millions", "wall time, minutes")):
        panel.axhline(18, color="0.4", lw=0.8, ls="--")
        panel.set_xlabel(words)
        panel.grid(color="0.9")
    panels[0].set_ylabel("return, last 100 episodes")
    figure.legend(fontsize=8, loc="outside lower center", ncols=2)
    figure.savefig(folder / "pong.png", dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="all of them if none is named")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/pong"))
    parser.add_argument("--env-steps", help="length of each run; default: the preset's")
    args = parser.parse_args()
    more = ["--env-steps", args.env_steps] if args.env_steps else []
    print("| | steps to 18, by seed | minutes to 18 | last 100 episodes | steps/s |\n|---|---|---|---|---|", flush=True)
    names = args.parts or list(PARTS)
    for name in names:
        print(row(name, [train(name, seed, args.out, more) for seed in args.seeds]), flush=True)
    draw(names, args.seeds, args.out)


if __name__ == "__main__":
    main()
