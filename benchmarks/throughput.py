"""Rookery against Stable-Baselines3 and RLlib, the same settings, in one run, alternating, on a quiet machine.

    .venv/bin/python benchmarks/throughput.py [cartpole lunarlander hopper pong dqn-pong …] [--rounds 3] [--env-steps N]

PPO: both do 8 environments × 128 steps, 4 epochs × 4 minibatches of 256; CartPole, LunarLander and Hopper with two
64×64 tanh MLPs, Pong with the Nature CNN on 84×84×4. Tasks ending in -local have the same 8 environments in 2 actor
processes. DQN: an update on a batch of 32 every 4 steps, Adam, the same CNN; Rookery takes the 4 steps
in 4 environments, Stable-Baselines3 in one. Asynchronous PPO on Pong against RLlib's APPO: 42×42×4 frames, the `nips`
network, 2 actors × 10 environments × 50 steps, batches of 500, one pass; RLlib as its examples have it, and tuned (see
`rllib_appo.py`). `appo-pong-sync` is the same with a barrier: the difference is what it costs. `apex` has no rival: it
says what two actors put into the memory and what the learner takes out of it. The ratio is that of the medians. On
CartPole the rival steps Gymnasium's environment and Rookery its own `CartPoleVector`, the same game for many lanes at
once: part of that ratio is the environment. On LunarLander and Hopper both step Gymnasium's, one by one. The
bound is what the machine could do if environment, forward pass and training, each measured alone here, were all there
is. Both are measured after a warm-up (the first update or two), in which --compile compiles.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
SB3, RLLIB = HERE.parent / ".venv-sb3", HERE.parent / ".venv-rllib"
PPO = ["--algo.unroll", "128", "--algo.epochs", "4", "--algo.minibatches", "4", "--algo.clip", "0.1",
          "--quiet", "--algo.lr", "2.5e-4", "--algo.entropy", "0.01", "--checkpoint.every", "1000000000",
          "--seed", "1", "--algo.scale-reward", "False"]  # fmt: skip


DQN = ["--env", "ALE/Pong-v5", "--topology", "serial", "--envs-per-actor", "4", "--algo.unroll", "1",
       "--algo.replay.capacity", "20000", "--algo.replay.min-size", "1000", "--algo.replay.batch", "32",
       "--algo.replay.samples-per-insert", "8", "--algo.replay.save", "False", "--algo.optimizer", "adam",
       "--algo.lr", "1e-4", "--atari.episodic-life", "True", "--quiet", "--checkpoint.every", "1000000000",
       "--seed", "1"]  # fmt: skip
APEX = ["--env", "ALE/Pong-v5", "--algo.replay.capacity", "100000", "--algo.replay.min-size", "2000",
        "--algo.replay.save", "False", "--quiet", "--checkpoint.every", "1000000000", "--seed", "1"]  # fmt: skip


APPO = ["--env", "ALE/Pong-v5", "--topology", "local", "--actors", "2", "--envs-per-actor", "10", "--atari.size", "42",
        "--net.torso", "nips", "--net.features", "256", "--no-net.standardize", "--algo.unroll", "50",
        "--algo.epochs", "1", "--algo.minibatches", "1", "--algo.lr", "5e-4", "--quiet",
        "--checkpoint.every", "1000000000", "--seed", "1"]  # fmt: skip


@dataclass(frozen=True)
class Task:
    rival: str  # its task there; none: only ours is measured
    env_steps: int
    flags: list[str]
    bar: float = 0.0  # the ratio to reach; 0: none is set
    recipe: str = "ppo"

    @property
    def words(self) -> list[str]:
        return [*self.flags, *(PPO if self.recipe == "ppo" else ())]


def mlp(env: str) -> list[str]:
    return ["--env", env, "--net.hidden", "64", "64", "--net.normalize-obs", "False"]  # the rival does not normalise


SERIAL = ["--topology", "serial", "--envs-per-actor", "8"]
LOCAL = ["--topology", "local", "--actors", "2", "--envs-per-actor", "4"]

TASKS = {
    "cartpole": Task("cartpole", 122_880, [*mlp("CartPole-v1"), *SERIAL], 3.0),
    "cartpole-local": Task("cartpole", 122_880, [*mlp("CartPole-v1"), *LOCAL]),
    "cartpole-compile": Task("cartpole", 245_760, [*mlp("CartPole-v1"), *SERIAL, "--compile"], 3.0),
    "lunarlander": Task("lunarlander", 61_440, [*mlp("LunarLander-v3"), *SERIAL]),
    "lunarlander-local": Task("lunarlander", 61_440, [*mlp("LunarLander-v3"), *LOCAL]),
    "hopper": Task("hopper", 61_440, [*mlp("Hopper-v5"), *SERIAL]),
    "hopper-local": Task("hopper", 61_440, [*mlp("Hopper-v5"), *LOCAL]),
    "pong": Task("pong", 10_240, ["--env", "ALE/Pong-v5", "--topology", "local", "--actors", "2"], 1.8),
    "pong-bf16": Task(
        "pong", 10_240, ["--env", "ALE/Pong-v5", "--topology", "local", "--actors", "2", "--precision", "bf16"], 2.5
    ),
    "dqn-pong": Task("pong", 3_000, DQN, 1.5, "dqn"),
    "dqn-pong-bf16": Task("pong", 3_000, [*DQN, "--precision", "bf16"], 2.2, "dqn"),
    "appo-pong": Task("pong --stock", 30_000, [*APPO, "--algo.queue.batch", "1"], 6.0, "appo"),
    "appo-pong-tuned": Task("pong", 30_000, [*APPO, "--algo.queue.batch", "1"], 0.0, "appo"),
    "appo-pong-sync": Task("", 30_000, [*APPO, "--algo.queue.batch", "0", "--lag", "0"], 0.0, "appo"),
    "apex": Task("", 20_000, APEX, 0.0, "apex_dqn"),
}


def ours(task: Task) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [sys.executable, "-m", "rookery", "train", task.recipe, *task.words]
        command += ["--out", str(out), "--env-steps", str(task.env_steps)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=3600)
        summary = json.loads((out / "summary.json").read_text())
        records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        trained = [record for record in records if record["kind"] == "train" and record["updates"] > 0]
        if len(trained) < 2:
            sys.exit(f"{len(trained)} records of training in {task.env_steps} steps: too few for a speed, take more")
        first, last = trained[0], trained[-1]  # the first ends the warm-up
        speed = (last["env_steps"] - first["env_steps"]) / (last["wall_s"] - first["wall_s"])
        config = json.loads((out / "config.json").read_text())
        return summary | {"steps_per_s": speed, "batch": config["algo"].get("replay", {}).get("batch")}


def theirs(task: Task) -> float:
    venv, script = (RLLIB, "rllib_appo.py") if task.recipe == "appo" else (SB3, f"sb3_{task.recipe}.py")
    command = [venv / "bin/python", HERE / script, *task.rival.split(), "--env-steps", str(task.env_steps)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=3600)
    return json.loads(done.stdout.splitlines()[-1])["steps_per_s"]


def bound(task: Task) -> dict[str, float]:
    """Seconds per environment step of each part measured alone, and the steps/s they would allow."""
    done = subprocess.run(
        [sys.executable, HERE / "parts.py", task.recipe, *task.words],
        check=True,
        capture_output=True,
        text=True,
        timeout=600,
    )
    return json.loads(done.stdout.splitlines()[-1])


def rival_environment(venv: Path) -> None:
    stamp, wanted = venv / ".installed", HERE / f"requirements-{venv.name.removeprefix('.venv-')}.txt"
    if not stamp.exists() or stamp.stat().st_mtime < wanted.stat().st_mtime:
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        subprocess.run([venv / "bin/pip", "install", "-q", "-r", wanted], check=True)
        stamp.touch()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", choices=[*TASKS, []], help="all of them if none is named")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--env-steps", type=int, help="length of a run, instead of the task's; shorter for a trial")
    args = parser.parse_args()
    tasks = args.tasks or list(TASKS)
    for venv in {RLLIB if TASKS[name].recipe == "appo" else SB3 for name in tasks if TASKS[name].rival}:
        rival_environment(venv)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=HERE
    ).stdout.strip()
    print(f"{time.strftime('%Y-%m-%d')}, commit {commit}, {args.rounds} rounds, alternating; medians (min to max)\n")
    print("| task | Rookery steps/s | rival steps/s | ratio | bar | bound steps/s | share of bound | time split |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for name in tasks:
        task = TASKS[name] if args.env_steps is None else replace(TASKS[name], env_steps=args.env_steps)
        if not task.rival:
            print(alone(name, [ours(task) for _ in range(args.rounds)]), flush=True)
            continue
        parts = bound(task)
        summaries, rivals = [], []
        for _ in range(args.rounds):
            summaries.append(ours(task))
            rivals.append(theirs(task))
        print(row(name, task, summaries, rivals, parts), flush=True)


def alone(name: str, summaries: list[dict]) -> str:
    """What goes into the memory and what comes out, of the median run."""
    run = sorted(summaries, key=lambda s: s["steps_per_s"])[len(summaries) // 2]
    shares = ", ".join(f"{stage} {share:.0%}" for stage, share in run["time_split"].items())
    if not run["batch"]:  # no replay memory
        return f"| {name} | {run['steps_per_s']:,.0f} | | | | | | {shares} |"
    rate, batch = run["updates"] / run["wall_s"], run["batch"]  # batches drawn ahead and never trained on do not count
    return (
        f"| {name} | {run['steps_per_s']:,.0f} in/s; {rate * batch:,.0f} samples/s ({rate:.2f} updates/s of {batch}); "
        f"learner idle {run['replay']['learner_idle']:.0%} | | | | | | {shares} |"
    )


def row(name: str, task: Task, summaries: list[dict], rivals: list[float], parts: dict[str, float]) -> str:
    speeds = [summary["steps_per_s"] for summary in summaries]
    mine, other = statistics.median(speeds), statistics.median(rivals)
    split = max(summaries, key=lambda s: s["steps_per_s"])["time_split"]
    shares = ", ".join(f"{stage} {share:.0%}" for stage, share in split.items())
    spread = f"{mine:,.0f} ({min(speeds):,.0f} to {max(speeds):,.0f})"
    rival = f"{other:,.0f} ({min(rivals):,.0f} to {max(rivals):,.0f})"
    part = ", ".join(f"{k} {v * 1e3:.3f}" for k, v in parts.items() if k != "bound")
    bar = f"{task.bar}×" if task.bar else "none"
    return (
        f"| {name} | {spread} | {rival} | **{mine / other:.2f}×** | {bar} | {parts['bound']:,.0f} (ms: {part}) "
        f"| {mine / parts['bound']:.0%} | {shares} |"
    )


if __name__ == "__main__":
    main()
