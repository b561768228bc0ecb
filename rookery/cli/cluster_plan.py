"""`rookery bench cluster-plan`: which nodes a recipe needs on a Ray cluster for a target of steps/s, and what limits.

What is not given is measured here, in a few seconds: environment steps/s of one actor, and the learner's seconds per
update. The rest is arithmetic on the shapes that actors hand over (`run/cluster_plan.py`).
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rookery.cli.flags import HELP, comments_of
from rookery.core.errors import UsageError
from rookery.run import cluster_plan
from rookery.run.cluster_plan import USABLE, Nodes, Plan, Rates, Work

if TYPE_CHECKING:
    from rich.table import Table

    from rookery.core.config import RunConfig


@dataclass
class Options:
    recipe: str = ""  # the recipe; needed
    steps_per_s: float = 0.0  # environment steps per second to reach, of all actors; needed
    cores_per_node: float = 16.0  # cores of a node
    memory_gib: float = 64.0  # memory of a node, in GiB
    gbit_per_s: float = 10.0  # network of a node in each direction, in Gbit/s
    actor_steps_per_s: float = 0.0  # environment steps/s of one actor; measured if not given
    learner_s: float = 0.0  # the learner's seconds per update; measured if not given
    draws_per_s: float = 0.0  # items/s drawn from one part of a replay memory; measured if not given
    unrolls_per_s: float = 1000.0  # hand-overs that one process takes in; assumed
    seconds: float = 5.0  # length of the measurement
    json: bool = False  # print JSON instead of the table


KINDS = {
    "unrolls": ("unroll", "unrolls"),
    "items": ("parcel of items", "parcels of items"),
    "gradients": ("gradient", "gradients"),
}
USAGE = """usage: rookery bench cluster-plan --recipe NAME --env ID --steps-per-s N ...

Says which nodes of a Ray cluster reach a number of environment steps per second, and what limits.

{flags}

Every other flag of `rookery train RECIPE` is taken too: --envs-per-actor 1, --algo.unroll 100, ..."""


def cluster_plan_bench(words: list[str]) -> int:
    if any(word in HELP for word in words):
        print(USAGE.format(flags=_flags()))
        return 0
    options, given, rest = _own(words)
    config = _config(options, rest)
    nodes = Nodes(int(options.cores_per_node), options.memory_gib, options.gbit_per_s, config.ray.cpus_per_actor)
    cluster_plan.check(Rates(1.0, 1.0, 1.0, options.unrolls_per_s), nodes, options.steps_per_s)  # before measuring
    from rookery.cli.show import console, only_answer
    from rookery.run import cluster_work

    with only_answer():
        work = cluster_work.work_of(config, cluster_work.spec_of(config))
        rates, measured = _rates(options, given, config, work)
    memory: Any = getattr(config.algo, "replay", None)
    plan = cluster_plan.planned(work, rates, nodes, options.steps_per_s, getattr(memory, "shards", 1))
    told = _assumptions(work, rates, nodes, measured, config)
    if options.json:
        parts: dict[str, Any] = {"plan": plan, "work": work, "rates": rates, "nodes": nodes}
        report: dict[str, Any] = {name: dataclasses.asdict(part) for name, part in parts.items()}
        print(json.dumps(_finite(report | {"measured": measured, "assumptions": told}), indent=2))
        return 0
    console().print(_table(plan, work, rates))
    print("\n".join(["Assumptions:", *(f"- {line}" for line in told), plan.verdict]))
    return 0


def _flags() -> str:
    rows = []
    for field in dataclasses.fields(Options):
        kind = "" if field.name == "json" else " NAME" if field.name == "recipe" else " N"
        default = f" (default: {field.default:g})" if isinstance(field.default, float) and field.default else ""
        flag = f"--{field.name.replace('_', '-')}{kind}"
        rows.append(f"  {flag:<22} {comments_of(Options)[field.name]}{default}")
    return "\n".join(rows)


def _own(words: list[str]) -> tuple[Options, set[str], list[str]]:
    """Our own flags, which of them were given, and the words that belong to `rookery train`."""
    options, given, rest, words = Options(), set[str](), [], list(words)
    known = {field.name for field in dataclasses.fields(Options)}
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        field = name.removeprefix("--").replace("-", "_")
        if not name.startswith("--") or field not in known:
            rest.append(word)
            continue
        given.add(field)
        if field == "json":
            options.json = True
            continue
        if not equals and (not words or words[0].startswith("--")):
            raise UsageError(f"{name} needs a value")
        value = value if equals else words.pop(0)
        setattr(options, field, value if field == "recipe" else _number(name, value))
    if not options.recipe:
        raise UsageError("which recipe? --recipe apex_dqn; `rookery recipes` lists them")
    if "steps_per_s" not in given:
        raise UsageError("how many environment steps per second? --steps-per-s 10k")
    return options, given, rest


def _number(flag: str, word: str) -> float:
    match = re.fullmatch(r"([+-]?[\d.]+(?:[eE][+-]?\d+)?)([kM]?)", word)
    try:
        value = float(match[1]) * {"": 1, "k": 1e3, "M": 1e6}[match[2]] if match else math.nan
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise UsageError(f"{flag}: {word!r} is not a number above 0")
    if flag == "--cores-per-node" and value != int(value):
        raise UsageError(f"{flag}: {word!r} is not a whole number")
    return value


def _config(options: Options, rest: list[str]) -> RunConfig:
    from rookery.cli.configure import config_for
    from rookery.recipes import recipe
    from rookery.run.run import check

    try:
        recipe(options.recipe)
    except UsageError as error:
        raise UsageError(f"--recipe: {error}") from None
    return check(config_for(options.recipe, rest, "rookery bench cluster-plan"))


def _rates(options: Options, given: set[str], config: RunConfig, work: Work) -> tuple[Rates, list[str]]:
    """What was given, and what is measured where something is missing."""
    from rookery.run import cluster_work

    needed = ["actor_steps_per_s", "learner_s", *(["draws_per_s"] if work.replay is not None else [])]
    missing = [name for name in needed if name not in given]
    values = {name: getattr(options, name) for name in needed}
    if missing:
        found = dataclasses.asdict(cluster_work.measure(config, options.seconds))
        values |= {name: found[name] for name in missing}
    return Rates(**{"draws_per_s": math.inf} | values, unrolls_per_s=options.unrolls_per_s), missing


def _finite(value: Any) -> Any:
    """JSON has no word for infinity: none."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _assumptions(work: Work, rates: Rates, nodes: Nodes, measured: list[str], config: RunConfig) -> list[str]:
    from rookery.cli.show import count, number
    from rookery.processes.threads import available_cores

    names = {
        "actor_steps_per_s": f"{number(rates.actor_steps_per_s)} environment steps/s of one actor "
        f"({count(config.envs_per_actor, 'environment')})",
        "learner_s": f"{rates.learner_s:.3g} s of the learner per "
        + ("gradient" if work.what == "gradients" else "update"),
        "draws_per_s": f"{number(rates.draws_per_s)} items/s drawn from one part of the memory"
        + (" (a small one: a large one is slower)" if "draws_per_s" in measured else ""),
    }
    here = f"this machine ({available_cores()} cores{'' if config.device == 'cpu' else ', ' + config.device})"
    told = [f"{text}: {'measured on ' + here if name in measured else 'given'}." for name, text in names.items()
            if name != "draws_per_s" or work.replay is not None]  # fmt: skip
    load = os.getloadavg()[0]
    if measured and load > 1.5 * available_cores():
        told.append(f"Other programs were running here (load {load:.1f}): what was measured is too slow.")
    told += [
        f"All nodes have {nodes.cores} cores, {nodes.memory_gib:g} GiB ({USABLE:.0%} of it used) and "
        f"{nodes.gbit_per_s:g} Gbit/s in each direction. The learner has a node of its own, without actors.",
        f"An actor takes {nodes.cpus_per_actor:g} of a node's cores, and does not slow others down.",
        f"One process takes in {rates.unrolls_per_s:,.0f} hand-overs/s (--unrolls-per-s; assumed, not measured).",
        "A node fetches each version of the weights at most once, always from the learner's node.",
    ]
    if work.what == "unrolls":
        told.append("An update takes as long per environment step as it does now, whatever the batch.")
        queue: Any = getattr(config.algo, "queue", None)
        if not getattr(queue, "batch", 0):
            told.append("The batch is one unroll of every actor: it grows with them (--algo.queue.batch sets it).")
    if work.in_turns:
        told.append("Actors and learner take turns: neither works while the other does.")
    if work.replay is not None:
        told.append("The memory takes in and draws at the same time; where it is saved, that needs more memory.")
    return told


def _table(plan: Plan, work: Work, rates: Rates) -> Table:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    title = f"[bold]{work.recipe}[/] on [bold]{escape(work.env)}[/], {plan.steps_per_s:,.0f} environment steps/s"
    table = Table(title=title, title_style="", title_justify="left", box=box.ROUNDED, header_style="dim")
    table.add_column("what")
    table.add_column("amount", justify="right")
    table.add_column("how it comes")
    for row in _rows(plan, work, rates):
        table.add_row(*row)
    return table


def _rows(plan: Plan, work: Work, rates: Rates) -> list[tuple[str, str, str]]:
    from rookery.cli.show import number
    from rookery.core.machine import amount

    one, many = KINDS[work.what]
    rows = [
        ("actors", f"{plan.actors:,}", f"{number(rates.actor_steps_per_s)} steps/s each"
         + (", while the learner does not learn" if work.in_turns else "")),
        ("nodes", f"{plan.nodes:,}", f"{plan.actor_nodes:,} of actors, {plan.learners} of learners"
         + (f", {plan.shard_nodes} of shards" if plan.shard_nodes else "")),
        ("bytes per environment step", _bytes(plan.bytes_per_step),
         f"{_bytes(work.bytes)} for {work.steps:,} steps, one {one}"),
        ("hand-overs", f"{number(plan.handovers_per_s)}/s", many),
        ("into a learner's node", _rate(plan.learner_in),
         "whole items, drawn on other nodes" if plan.shard_nodes else many),
        ("weights", f"{number(plan.versions_per_s)} versions/s",
         f"{work.floats:,} floats × 4 bytes = {_bytes(plan.weights_bytes)}"),
        ("weights out of a learner's node", _rate(plan.weights_out), "each node of actors fetches a version once"),
        ("learner updates needed", "any" if plan.updates_needed is None else f"{number(plan.updates_needed)}/s",
         "actors and learner do not wait for each other" if plan.updates_needed is None
         else f"{number(work.batch_steps)} new steps each"),
        ("learner updates", f"{number(plan.updates_per_s)}/s", _carried(plan, rates)),
        ("object store of a learner's node", amount(plan.store_gib * 2**30), "hand-overs and weights, at most"),
    ]  # fmt: skip
    if work.what == "unrolls":
        rows.append(("aggregators", f"{plan.aggregators}", f"one for {rates.unrolls_per_s:,.0f} unrolls/s; 0: the "
                     "learner's process takes them in itself"))  # fmt: skip
    if plan.shards and work.replay is not None:
        ratio = plan.draws_per_s / plan.inserts_per_s
        rows += [
            ("inserts", f"{number(plan.inserts_per_s)} items/s", f"{work.replay.items_per_step:.3g} per step"),
            ("draws", f"{number(plan.draws_per_s)} items/s", f"{work.replay.batch} per update, {ratio:.3g} per insert"),
            ("replay memory", amount(plan.memory_gib * 2**30),
             f"{plan.shards} {'part' if plan.shards == 1 else 'parts'} of {amount(plan.shard_gib * 2**30)}, each with "
             f"{number(plan.shard_draws_per_s)} draws/s; "
             + (f"on {plan.shard_nodes} nodes" if plan.shard_nodes else "on the learner's node")),
        ]  # fmt: skip
    return rows


def _carried(plan: Plan, rates: Rates) -> str:
    share = f"{rates.learner_s:.3g} s each, {plan.learner_share:.0%} of the time"
    if plan.learners > 1:
        return f"{share}, by each of {plan.learners} learners; one does not carry it"
    over = plan.updates_needed is not None and plan.updates_needed > plan.updates_per_s * (1 + 1e-9)
    return f"{share}; one learner {'does not carry' if over else 'carries'} it"


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:,.4g} TB"


def _rate(bytes_per_s: float) -> str:
    return f"{_bytes(bytes_per_s)}/s ({bytes_per_s * 8 / 1e9:.3g} Gbit/s)"
