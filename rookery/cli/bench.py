"""`rookery bench scaling`: how throughput grows with the number of actors, at a fixed batch. Other benches: see MORE.

The number of environments in all stays the same, so every measurement learns from the same amount of data per update;
only the number of processes they are spread over differs.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rookery.cli.flags import HELP
from rookery.core.errors import UsageError
from rookery.core.hints import nearest

if TYPE_CHECKING:
    from rich.table import Table

    from rookery.core.config import RunConfig

USAGE = """usage: rookery bench scaling --env ID [--actors 1 2 4] [--envs N] [--env-steps N] [--out DIR] ...

Trains with 1, 2, ... actor processes for the same number of steps on the same number of environments.

  --actors N [N ...]   numbers of actors to try (default: 1, 2, 4, ... up to the cores)
  --envs N             environments in all (default: the preset's, or the next number that every count divides)
  --recipe NAME        default: ppo
  --env-steps N        steps of each measurement (default: 50000)
  --out DIR            where the runs, scaling.json and scaling.png go (default: runs/scaling-...)

Every other flag of `rookery train RECIPE` is taken too: --core lstm, --net.hidden 256 256, --seed 3, ..."""
STEPS = 50_000
MORE = {
    "ddppo-scaling": "rookery.cli.scaling:scaling",
    "cluster-plan": "rookery.cli.cluster_plan:cluster_plan_bench",
}


def bench(words: list[str]) -> int:
    if not words or words[0] in HELP:
        print(f"{USAGE}\n\nOther measurements: {', '.join(MORE)} (rookery bench NAME --help)")
        return 0 if words else UsageError.exit_code
    if words[0] in MORE:
        module, _, function = MORE[words[0]].partition(":")
        return getattr(importlib.import_module(module), function)(words[1:])
    if words[0] != "scaling":
        raise UsageError(f"there is no measurement {words[0]!r}; {nearest(words[0], ['scaling', *MORE])}")
    if any(word in HELP for word in words):
        print(USAGE)
        return 0
    counts, own, rest = _own(words[1:])
    configs = _configs(counts, own, rest)
    out = Path(configs[0].out).parent
    rows = _measure(configs)
    out.mkdir(parents=True, exist_ok=True)
    (out / "scaling.json").write_text(json.dumps(rows, indent=2) + "\n")
    from rookery.cli.show import console
    from rookery.metrics.plot import plot_scaling

    console().print(_table(rows, configs[0]))
    print(f"{out / 'scaling.json'}\n{plot_scaling(rows, out / 'scaling.png')}")
    return 0


def _own(words: list[str]) -> tuple[list[int], dict[str, str], list[str]]:
    """Our own flags, and the words that belong to `rookery train`."""
    counts: list[int] = []
    own = {"recipe": "ppo", "out": "", "envs": ""}
    rest: list[str] = []
    words = list(words)
    while words:
        name, equals, value = words.pop(0).partition("=")
        if name == "--actors":
            while words and not words[0].startswith("--"):
                counts.append(_positive("--actors", words.pop(0)))
            counts += [_positive("--actors", part) for part in value.split(",")] if equals else []
        elif name.removeprefix("--") in own:
            if not equals and not words:
                raise UsageError(f"{name} needs a value")
            own[name.removeprefix("--")] = value if equals else words.pop(0)
        elif name.replace("_", "-") in ("--topology", "--envs-per-actor"):
            raise UsageError(f"{name} is what bench scaling varies; --envs sets the number of environments in all")
        else:
            rest.append(name + equals + value)
    return sorted(set(counts)), own, rest


def _positive(flag: str, word: str) -> int:
    if not word.isdigit() or int(word) < 1:
        raise UsageError(f"{flag}: {word!r} is not a positive whole number")
    return int(word)


def _configs(counts: list[int], own: dict[str, str], rest: list[str]) -> list[RunConfig]:
    from rookery.cli.configure import config_for
    from rookery.core.machine import Machine

    if not any(word.split("=")[0].replace("_", "-") == "--env-steps" for word in rest):
        rest = [*rest, "--env-steps", str(STEPS)]
    config = config_for(own["recipe"], rest, "rookery bench scaling")
    if not counts:
        counts = [2**power for power in range(Machine().cores().bit_length())]
    unit = math.lcm(*counts)
    envs = _positive("--envs", own["envs"]) if own["envs"] else math.ceil(config.lanes / unit) * unit
    if envs % unit:
        listed = ", ".join(map(str, counts))
        near = math.ceil(envs / unit) * unit
        raise UsageError(f"{envs} environments cannot be shared evenly by {listed} actors; --envs {near} can")
    name = re.sub(r"[^A-Za-z0-9]+", "-", config.env).strip("-")
    out = Path(own["out"] or f"runs/scaling-{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    config = dataclasses.replace(config, topology="local", quiet=True, target_return=None)
    return [
        dataclasses.replace(config, actors=count, envs_per_actor=envs // count, out=str(out / f"actors-{count}"))
        for count in counts
    ]


def _measure(configs: list[RunConfig]) -> list[dict[str, Any]]:
    from rookery.cli.show import console
    from rookery.run.run import train

    rows = []
    for config in configs:
        with console().status(f"{config.actors} actors × {config.envs_per_actor} environments …"):
            run = train(config)
        if run.exit_code:
            raise KeyboardInterrupt
        summary = run.summary
        rows.append({
            "actors": config.actors, "envs": config.lanes, "env_steps": summary["env_steps"],
            "wall_s": summary["wall_s"], "steps_per_s": summary["steps_per_s"],
            "acting_steps_per_s": summary.get("acting_steps_per_s"), "wait_share": summary["time_split"].get("wait"),
            "time_split": summary["time_split"], "run": str(run.path),
        })  # fmt: skip
    return rows


def _table(rows: list[dict[str, Any]], config: RunConfig) -> Table:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    title = f"[bold]{config.recipe}[/] on [bold]{escape(config.env)}[/], {config.lanes} environments in all"
    table = Table(title=title, title_style="", title_justify="left", box=box.ROUNDED, header_style="dim")
    for name in ("actors", "envs each", "steps/s", "speed-up", "acting only", "speed-up", "waiting"):
        table.add_column(name, justify="right")
    first = rows[0]
    for row in rows:
        acting, wait = row["acting_steps_per_s"], row["wait_share"]
        base = first["acting_steps_per_s"]
        table.add_row(
            str(row["actors"]), str(row["envs"] // row["actors"]), f"{row['steps_per_s']:,.0f}",
            f"{row['steps_per_s'] / first['steps_per_s']:.2f}×",
            f"{acting:,.0f}" if acting else "", f"{acting / base:.2f}×" if acting and base else "",
            f"{wait:.0%}" if wait is not None else "",
        )  # fmt: skip
    return table
