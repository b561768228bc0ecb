"""From nothing to a solved CartPole: PPO with two actor processes, then 100 episodes of what it learnt.

    make demo          (or: python examples/demo.py)

It types two commands, which you can type as well; everything they leave behind is in one folder under runs/.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from pathlib import Path

from rookery.cli.main import main as rookery

SOLVED = 475  # mean return of 100 episodes, as Gymnasium defines it for CartPole-v1


def main() -> int:
    run = Path("runs") / f"demo-{time.strftime('%Y%m%d-%H%M%S')}"
    code = command(
        "train", "ppo", "--env", "CartPole-v1", "--topology", "local", "--actors", "2",
        "--target-return", str(SOLVED), "--env-steps", "100k", "--seed", "1", "--out", str(run),
    )  # fmt: skip
    if code:
        return code
    code = command("eval", str(run), "--episodes", "100")
    if code:
        return code
    result = max((run / "eval").glob("*.json"))
    mean = json.loads(result.read_text())["return_mean"]
    verdict = "Solved" if mean >= SOLVED else "Not solved yet"
    print(f"\n{verdict}: mean return {mean:.1f} of 500 over 100 greedy episodes.")
    print(f"  run folder      {run}\n  learning curve  {run / 'report' / 'curve.png'}\n  evaluation      {result}")
    print(f"\nTo watch it: rookery record {run}")
    return 0 if mean >= SOLVED else 1


def command(*words: str) -> int:
    print(f"\n$ rookery {shlex.join(words)}", flush=True)
    return rookery(list(words))


if __name__ == "__main__":
    sys.exit(main())
