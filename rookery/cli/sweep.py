"""`rookery sweep`: many runs of one recipe, by settings and seeds; a table of what they tell at the end."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from rookery.cli.flags import HELP
from rookery.core.errors import UsageError

if TYPE_CHECKING:
    from rookery.cli.sweep_words import Words
    from rookery.processes.signals import Signals
    from rookery.sweeps.result import Sweep
    from rookery.sweeps.view import View

USAGE = """usage: rookery sweep RECIPE --env ID [--set FIELD VALUES]... [--seeds N] [fields of the run]

  rookery sweep ppo --env CartPole-v1 --seeds 5 --set algo.lr 1e-4,3e-4 --env-steps 50k
  rookery sweep ppo --env CartPole-v1 --optuna 50 --search algo.lr log 1e-5 1e-2 --seeds 2
  rookery sweep --resume runs/sweep-...          go on after a stop, a crash or a kill

  --set FIELD VALUES            values to try, separated by commas; several --set: every combination
                                lists: --set net.hidden "64 64,256 256"; any values: a list in JSON
  --seeds N | A,B,C             train every setting with the seeds 1 to N, or with these (5; with --optuna 1)
  --optuna N                    N settings, sampled by Optuna from the values of --set and from --search
  --search FIELD range LOW HIGH numbers to sample from
  --search FIELD log LOW HIGH   the same, evenly in their logarithm
  --jobs N                      runs at a time, each in a process of its own (as many as cores and memory allow)
  --out DIR                     the folder; given again with the same command, the sweep goes on
  --retry                       train the runs again that have failed
  --resume DIR                  go on with a sweep; with it: --jobs, --seeds, --optuna, --retry, --trust MODULE

`rookery train RECIPE --help` lists the fields of a run."""

RESUME = ("jobs", "seeds", "optuna", "retry", "resume")  # flags that go together with --resume


def sweep(words: list[str], signals: Signals) -> int:
    if not words or set(words) & set(HELP):
        print(USAGE)
        return 0 if words else UsageError.exit_code
    from rookery.cli.sweep_words import sorted_words
    from rookery.sweeps.view import opened_view

    given = sorted_words(words)
    quiet = any(word.startswith("--quiet") for word in given.rest)
    with opened_view(quiet) as view:
        found = _resumed(given, signals, view) if "resume" in given.one else _started(given, signals, view)
    _close(found, given)
    return found.exit_code


def _resumed(given: Words, signals: Signals, view: View) -> Sweep:
    from rookery.cli.sweep_words import seeds, whole
    from rookery.storage.trust import Refused, flags
    from rookery.sweeps.sweep import go_on

    rest = [word for word in given.rest if word.startswith("-") and word not in ("--quiet", "--debug")]
    rest += [f"--{name}" for name in ("set", "search") if getattr(given, name)]
    if wrong := rest or [f"--{name}" for name in given.one if name not in RESUME]:
        raise UsageError(f"{wrong[0]} belongs to the sweep and cannot change; give --resume and its folder alone")
    path, one = given.one["resume"], given.one
    try:
        return go_on(
            path, tuple(given.trust), signals, view, "retry" in one, whole("jobs", one.get("jobs")),
            seeds(one.get("seeds")), whole("optuna", one.get("optuna")),
        )  # fmt: skip
    except Refused as refused:
        retry = " --retry" if "retry" in one else ""
        fix = f"; if you trust it: rookery sweep --resume {shlex.quote(path)}{retry} {flags(refused.modules)}"
        raise UsageError(f"{path}: {refused.about}{fix if refused.helps else ''}") from None


def _started(given: Words, signals: Signals, view: View) -> Sweep:
    from rookery.cli.configure import asked
    from rookery.cli.sweep_words import ranges, seeds, values, whole
    from rookery.sweeps.sweep import PROBE, asked_plan, start

    if not given.rest or given.rest[0].startswith("-"):
        raise UsageError("which recipe? It comes first: rookery sweep ppo --env CartPole-v1 --set algo.lr 1e-4,3e-4")
    recipe, *rest = given.rest
    if any(word.partition("=")[0] == "--seed" for word in rest):
        raise UsageError("a sweep has --seeds: --seeds 5 for the seeds 1 to 5, --seeds 7, for seed 7 alone")
    one = given.one
    if given.search and "optuna" not in one:
        raise UsageError("--search gives ranges to sample from: say how many trials, such as --optuna 20")
    with signals.interruptible(PROBE):
        base, extra = asked(recipe, rest, f"rookery sweep {recipe}")
    if extra["overwrite"]:
        raise UsageError("--overwrite does not belong to a sweep: --out goes on with one, --retry repeats failed runs")
    grid = {path: values(base, path, text) for path, text in given.set.items()}
    plan = asked_plan(
        base, recipe, grid, ranges(given.search), seeds(one.get("seeds")), whole("optuna", one.get("optuna")) or 0,
        whole("jobs", one.get("jobs")),
    )  # fmt: skip
    return start(plan, one.get("out", ""), signals, view, "retry" in one)


def _close(found: Sweep, given: Words) -> None:
    """Print the table and the commands that go on from there."""
    from rookery.cli.show import console, count, escape, facts
    from rookery.sweeps.result import PAGE, cells, notes

    out, path = console(), shlex.quote(str(found.path))
    done = sum(run.state == "done" for run in found.runs)
    if done:
        out.print(_table(cells(found)))
        for note in notes(found):
            out.print(f" [yellow]{escape(note)}[/]")
        out.print(" [dim]interquartile mean over runs, and its 95 % bootstrap interval; best first[/]\n")
    rows = {"sweep": f"[bold]{escape(str(found.path))}[/]", "runs": f"{done} of {found.plan.total} done"}
    if found.failed:
        rows["failed"] = "\n".join(f"[red]{escape(run.name)}[/]: {escape(run.error)}" for run in found.failed[:5])
    resume = f"rookery sweep --resume {path}" + _trust(found)
    if found.failed:
        rows["again"] = escape(f"{resume} --retry")
    if any(run.state in ("stopped", "waiting") for run in found.runs) or done + len(found.failed) < found.plan.total:
        rows["go on"] = escape(resume)
    if found.command:
        rows["best"] = escape(found.command)
    if done:
        rows["table"] = escape(str(found.path / PAGE))
        rows["more"] = escape(f"rookery report {path}/runs/*") + f"   [dim]{count(done, 'run')} on one page[/]"
    out.print(facts(rows))


def _trust(found: Sweep) -> str:
    from rookery.storage.trust import needs

    return needs(found.plan.base)


def _table(cells: list[list[str]]) -> object:
    from rich.table import Table

    from rookery.cli.show import escape

    head, *rows = cells
    table = Table(box=None, padding=(0, 2, 0, 1), header_style="dim")
    for name in head:
        table.add_column(escape(name), overflow="fold")
    for place, row in enumerate(rows):
        table.add_row(*map(escape, row), style="bold" if place == 0 else None)
    return table
