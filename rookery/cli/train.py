"""`rookery train` and `rookery resume`."""

from __future__ import annotations

import importlib
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rookery.cli.flags import HELP
from rookery.cli.stop import answered, deferred
from rookery.errors import RookeryError, UsageError

if TYPE_CHECKING:
    from rookery.run import Run

TRAIN = """usage: rookery train RECIPE --env ID [fields of the run]

  rookery train ppo --env CartPole-v1 --env-steps 100k
  rookery train ppo --help                       every field, with its default
  rookery train ppo --env CartPole-v1 --help     the same, with the defaults for that environment
  rookery recipes                                the recipes and their presets"""

RESUME = """usage: rookery resume RUN [fields of the run that shall differ]

  rookery resume runs/a                          go on after a stop, a crash or a kill
  rookery resume runs/a --env-steps 200k         go on, to 200,000 steps in all
  rookery resume runs/a --help                   every field, with its value in that run"""


def train(words: list[str]) -> int:
    if words and words[0] in HELP:
        print(TRAIN)
        return 0
    if not words or words[0].startswith("-"):
        raise UsageError("which recipe? It comes first: rookery train ppo --env CartPole-v1")
    with deferred():
        from rookery.cli.configure import config_for
        from rookery.run import train as run_train

    with answered():
        return close(run_train(config_for(words[0], words[1:], f"rookery train {words[0]}")))


def resume(words: list[str]) -> int:
    if words and words[0] in HELP:
        print(RESUME)
        return 0
    if not words or words[0].startswith("-"):
        raise UsageError("which run? It comes first: rookery resume runs/...")
    with deferred():
        importlib.import_module("rookery.run")
    with answered():
        return _resume(words)


def _resume(words: list[str]) -> int:
    from rookery import checkpoint
    from rookery.claim import claimed
    from rookery.cli.configure import ABOUT, EXTRA, changes, read
    from rookery.cli.runs import open_run, trusted
    from rookery.cli.show import warn
    from rookery.folder import exists, real
    from rookery.run import resume as run_resume

    path, prog = real(words[0]), f"rookery resume {words[0]}"
    trust = trusted(words)
    old = open_run(path, trust, ["rookery", "resume", *words])
    extra = {"trust": EXTRA["trust"]}
    new, _ = read(old, words[1:], prog, f"Go on with this run. The defaults are its own values.\n\n{ABOUT}", extra)
    fields = changes(old, new)
    if wrong := {"env", "out"} & set(fields):
        raise UsageError(f"--{wrong.pop()} belongs to the run and cannot change; train a new one instead")
    steps = max(checkpoint.all_steps(path / "checkpoints"), default=None)
    if steps is not None and steps >= new.env_steps:  # so its name says: it counts if it can be loaded
        saved, notes = checkpoint.newest_told(path / "checkpoints")
        if (steps := saved.env_steps) >= new.env_steps:
            for note in notes:
                warn(note)
            print(f"{path} is complete with {steps:,} steps; --env-steps {2 * steps} would go on to {2 * steps:,}")
            return 0
    if steps is None and not exists(path, "summary.json"):
        with claimed(path):  # or somebody is about to write one
            print(f"{path} has no checkpoint yet: it begins anew")
    return close(run_resume(path, trust, tell=warn, **fields))


def close(run: Run) -> int:
    """Say what came of a run and what can be done with it."""
    from rookery.cli.runs import outside
    from rookery.cli.show import console, count, escape, facts

    summary, path = run.summary, shlex.quote(str(run.path))
    rows = {
        "run": f"[bold]{escape(str(run.path))}[/]",
        "ended": _REASONS.get(summary["exit_reason"], summary["exit_reason"])
        + f" after {summary['env_steps']:,} steps, {summary['wall_s']:.0f} s",
        "return": _return(summary),
        "speed": f"{summary['steps_per_s']:,.0f} steps/s",
    }
    if not summary["updates"]:
        rows["learnt"] = "[yellow]nothing[/]: it ended before its first update; take more steps (--env-steps)"
    if summary["restarts"]:
        rows["replaced"] = f"{count(summary['restarts'], 'worker')}; the messages are in metrics.jsonl"
    if summary["return_mean"] is not None:
        rows["curve"] = escape(_curve(run.path))
    trust = "".join(f" --trust {module}" for module in outside(run.path))
    further = f"\nrookery resume {path} --env-steps {2 * summary['env_steps']}{trust}"
    if summary["exit_reason"] == "target_return":
        further = f"\nrookery record {path}{trust}"
    rows["next"] = escape(f"rookery resume {path}{trust}" if run.exit_code else f"rookery eval {path}{trust}{further}")
    console().print(facts(rows))
    return run.exit_code


def _return(summary: dict[str, Any]) -> str:
    from rookery.cli.show import number

    if summary["return_mean"] is None:
        return "no episode has ended"
    reached = summary["env_steps_to_target"] if summary["exit_reason"] != "target_return" else None
    return f"[bold]{number(summary['return_mean'])}[/] ± {number(summary['return_std'])}, last 100 episodes" + (
        f"; target reached after {reached:,} steps" if reached else ""
    )


_REASONS = {
    "target_return": "[green]target return reached[/]",
    "env_steps": "[green]done[/]",
    "interrupted": "[yellow]interrupted[/], checkpoint written",
    "requeue": "[yellow]asked to stop[/], checkpoint written",
}


def _curve(path: Path) -> str:
    """Draw the learning curve and say where it is, or why there is none: a run is not worth less without it."""
    from rookery.metrics.plot import plot_runs

    try:
        return str(plot_runs([path], "report/curve.png", within=path))
    except (RookeryError, OSError) as error:
        return f"not drawn: {error}"
