"""`rookery train` and `rookery resume`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rookery.cli.flags import HELP
from rookery.core.errors import UsageError

if TYPE_CHECKING:
    from rookery.processes.signals import Signals
    from rookery.run.finished import Run

PROBE = 10.0  # seconds an environment may take to report its spaces, once shutdown is requested

TRAIN = """usage: rookery train RECIPE --env ID [fields of the run]

  rookery train ppo --env CartPole-v1 --env-steps 100k
  rookery train ppo --env ID --init-from runs/a  begin with the networks of a run
  rookery train ppo --help                       every field, with its default
  rookery train ppo --env CartPole-v1 --help     the same, with the defaults for that environment
  rookery recipes                                the recipes and their presets"""

RESUME = """usage: rookery resume RUN [fields of the run to change]

  rookery resume runs/a                          continue after a stop, a crash or a kill
  rookery resume runs/a --env-steps 200k         continue, to 200,000 steps in all
  rookery resume runs/a --help                   every field, with its value in that run"""


def train(words: list[str], signals: Signals) -> int:
    """Signals are recorded throughout: an exception raised while libraries load could be lost."""
    if words and words[0] in HELP:
        print(TRAIN)
        return 0
    if not words or words[0].startswith("-"):
        raise UsageError("which recipe? It comes first: rookery train ppo --env CartPole-v1")
    from rookery.cli.configure import asked
    from rookery.cli.show import warn
    from rookery.processes.signals import Stopped
    from rookery.run.auto import settled
    from rookery.run.run import check, start

    try:
        with signals.interruptible(PROBE):  # the preset may depend on what the environment is
            config, extra = asked(words[0], words[1:], f"rookery train {words[0]}")
            config, why = settled(check(config), signals)
    except Stopped as stop:
        stop.add_note("the environment had not started yet, so nothing was written: run the command again")
        raise
    return close(start(config, signals, tell=warn, overwrite=extra["overwrite"], why=why))


def resume(words: list[str], signals: Signals) -> int:
    if words and words[0] in HELP:
        print(RESUME)
        return 0
    if not words or words[0].startswith("-"):
        raise UsageError("which run? It comes first: rookery resume runs/...")
    from rookery.cli.configure import ABOUT, EXTRA, changes, read
    from rookery.cli.runs import open_run, trusted
    from rookery.cli.show import warn
    from rookery.run.run import go_on
    from rookery.storage import checkpoint
    from rookery.storage.claim import claimed
    from rookery.storage.folder import exists, real

    path, prog = real(words[0]), f"rookery resume {words[0]}"
    trust = trusted(words)
    old = open_run(path, trust, ["rookery", "resume", *words])
    extra = {"trust": EXTRA["trust"]}
    new, _ = read(old, words[1:], prog, f"Continue this run. The defaults are its own values.\n\n{ABOUT}", extra)
    fields = changes(old, new) | _compile(path, old.compile, new.compile, words)
    if wrong := {"env", "out"} & set(fields):
        raise UsageError(f"--{wrong.pop()} belongs to the run and cannot change; train a new one instead")
    steps = max(checkpoint.all_steps(path / "checkpoints"), default=None)
    if steps is not None and steps >= new.env_steps:  # so its name says: it counts if it can be loaded
        saved, notes = checkpoint.newest_told(path / "checkpoints")
        if (steps := saved.env_steps) >= new.env_steps:
            for note in notes:
                warn(note)
            print(f"{path} is complete with {steps:,} steps; --env-steps {2 * steps} would continue to {2 * steps:,}")
            return 0
    if steps is None and not exists(path, "summary.json"):
        with claimed(path):  # or another process is about to write one
            print(f"{path} has no checkpoint yet: it starts from the beginning")
    return close(go_on(path, trust, fields, signals, tell=warn))


def _compile(path: Path, old: bool, new: bool, words: list[str]) -> dict[str, bool]:
    """A stored run starts no compiler by itself: the user must confirm or refuse it again."""
    if not old:
        return {}
    names = {word.partition("=")[0].removeprefix("--") for word in words if word.startswith("--")}
    if not names & {"compile", "no-compile"}:
        raise UsageError(
            f"the run in {path} uses torch.compile, which starts a compiler; "
            "add --compile to allow that, or --no-compile"
        )
    return {"compile": new}


def close(run: Run) -> int:
    """Print the results of a run and the commands that use it; where there are several ranks, the first one does."""
    if run.rank:
        return run.exit_code
    from rookery.cli.show import console, count, escape, facts
    from rookery.run.tracking import places
    from rookery.storage.trust import needs, resume_command

    summary, path = run.summary, shlex.quote(str(run.path))
    rows = {
        "run": f"[bold]{escape(str(run.path))}[/]",
        "ended": _REASONS.get(summary["exit_reason"], summary["exit_reason"])
        + f" after {summary['env_steps']:,} steps, {summary['wall_s']:.0f} s",
        "return": _return(summary),
        **({"evaluated": told} if (told := _evaluated(summary)) else {}),
        **{escape(name): f"{mean:.3g}" for name, mean in summary["info"].items()},
        "speed": f"{summary['steps_per_s']:,.0f} steps/s",
    }
    if summary["topology"] != "serial" and (why := summary.get("topology_why")):
        rows["topology"] = escape(why)
    if not summary["updates"]:
        rows["learnt"] = "[yellow]nothing[/]: it ended before its first update; take more steps (--env-steps)"
    if summary["restarts"]:
        rows["restarts"] = f"{summary['restarts']:,} of workers or environments; the messages are in metrics.jsonl"
    if lost := summary["records_lost"]:
        names = ", ".join(f"{name}: {count(records, 'record')}" for name, records in lost.items())
        rows["not written"] = f"[yellow]{escape(names)}[/]"
    if summary["return_mean"] is not None:
        rows["curve"] = escape(_curve(run.path))
    if (page := run.path / "report" / "index.html").is_file():
        rows["report"] = escape(str(page))
    rows |= {name: escape(about) for name, about in places(run.path, run.config).items()}
    trust = needs(run.config)
    further = "\n" + resume_command(run.path, run.config, f"--env-steps {2 * summary['env_steps']}")
    if summary["exit_reason"] == "target_return":
        further = f"\nrookery record {path}{trust}"
    rows["next"] = escape(
        resume_command(run.path, run.config) if run.exit_code else f"rookery eval {path}{trust}{further}"
    )
    console().print(facts(rows))
    return run.exit_code


def _return(summary: dict[str, Any]) -> str:
    from rookery.cli.show import number

    if summary["return_mean"] is None:
        return "no episode has ended"
    reached = summary["env_steps_to_target"] if summary["exit_reason"] != "target_return" else None
    of = min(100, summary["episodes"])  # the moving window
    what = "1 episode" if of == 1 else f"last {of} episodes"
    return f"[bold]{number(summary['return_mean'])}[/] ± {number(summary['return_std'])}, {what}" + (
        f"; target reached after {reached:,} steps" if reached else ""
    )


def _evaluated(summary: dict[str, Any]) -> str:
    """The newest evaluation and the best one; "" if there was none."""
    from rookery.cli.show import count, number

    found = summary.get("evaluation") or {}
    if not found.get("last"):
        return f"[yellow]no, {count(found['failed'], 'failure')}[/]" if found.get("failed") else ""
    last, best = found["last"], found["best"]
    more = f"; best {number(best['return_mean'])} after {best['env_steps']:,}" if best != last else ""
    more += f"; [yellow]{count(found['failed'], 'failure')}[/]" if found["failed"] else ""
    return (
        f"[bold]{number(last['return_mean'])}[/] ± {number(last['return_std'])}, {count(last['episodes'], 'episode')} "
        f"after {last['env_steps']:,} steps{more}"
    )


_REASONS = {
    "target_return": "[green]target return reached[/]",
    "env_steps": "[green]done[/]",
    "interrupted": "[yellow]interrupted[/], checkpoint written",
    "requeue": "[yellow]asked to stop[/], checkpoint written",
}


def _curve(path: Path) -> str:
    """Draw the learning curve and say where it is, or why there is none; that is not an error."""
    from rookery.metrics.plot import plot_runs

    try:
        return str(plot_runs([path], "report/curve.png", within=path))
    except Exception as error:  # whatever it is: the run has ended well
        return f"not drawn: {error}"
