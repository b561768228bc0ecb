"""`rookery bench ddppo-scaling`: one and two ranks measured, up to 1,024 simulated, beside the paper's number.

Three runs of `ddppo` are measured: one rank, two ranks, and two ranks with preemption as soon as one has finished (at
the paper's 60 % nothing is ever cut with two ranks). The simulation is made from the run of one rank, so that the two
others check it. `--measured FILE` simulates again from the inputs that an earlier call has stored.
"""

from __future__ import annotations

import dataclasses
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rookery.cli.flags import HELP
from rookery.core.errors import UsageError
from rookery.run import habitat
from rookery.run.measured import Measured, read, workload
from rookery.run.scaling import Network, Preemption, Scaled, Workload, doublings, fit_link, simulate

if TYPE_CHECKING:
    from rich.table import Table

    from rookery.core.config import RunConfig

USAGE = """usage: rookery bench ddppo-scaling [--rounds N] [--max-ranks N] [--out DIR] [--quick] ...

Trains ddppo on rookery/GridNav-v0 with 1 and 2 ranks, then simulates up to 1,024 ranks from what was measured.

  --rounds N       rounds of each measured run (default: 60)
  --max-ranks N    largest number of ranks to simulate (default: 1024)
  --out DIR        where the runs, ddppo-scaling.json and ddppo-scaling.png go (default: runs/ddppo-scaling-...)
  --measured FILE  simulate from the ddppo-scaling.json of an earlier call; nothing is trained
  --quick          few rounds and ranks, to see that it works; its numbers mean little

Every other flag of `rookery train ddppo` is taken too: --env-kwargs, --envs-per-actor 4, --seed 3, ..."""
ENV, ENV_KWARGS = "rookery/GridNav-v0", {"delay": 0.002, "delay_spread": 0.5}
RUNS = ((1, 1.0), (2, 1.0), (2, 0.5))  # ranks, and the share of them that must have finished
ROLLOUTS = 8192  # that are simulated for each number of ranks
ASSUMPTIONS = (
    "Ranks have a core and a memory bus each; two ranks measured on one machine share them, and so look slower.",
    "An environment's speed is the task's own log-normal law; its slowness lasts for a whole rollout.",
    "A rank's step is as slow as its slowest environment, plus what one rank was measured to add to it.",
    "Learning takes as long as one rank was measured to take, the slowest rank counts, short rollouts save nothing.",
    "Nothing is slower than the slowest that was measured or drawn: the tail beyond it is not in the model.",
    "Each minibatch is one all-reduce after the backward pass, without overlap.",
    "gloo, measured on loopback: a ring for any number of ranks. A real network between nodes is slower.",
    f"{habitat.CLUSTER.name}, assumed, not measured: a ring up to {habitat.CLUSTER.ring_up_to} ranks, a tree beyond.",
    "Each rank keeps its own environments: the batch grows with the ranks. What it learns per step is not modelled.",
)


@dataclass
class Options:
    rounds: int = 60
    max_ranks: int = 1024
    out: str = ""
    measured: str = ""
    quick: bool = False


@dataclass(frozen=True)
class Inputs:
    """All that the simulation needs, as ddppo-scaling.json has it under `inputs`."""

    runs: list[Measured]
    minibatches: int  # epochs × minibatches: all-reduces per round
    floats: int  # parameters
    sizes: list[int]  # floats of the all-reduces that were timed
    seconds: list[float]  # that these took


def scaling(words: list[str]) -> int:
    if any(word in HELP for word in words):
        print(USAGE)
        return 0
    options, rest = _own(words)
    if options.measured and rest:
        raise UsageError(f"--measured trains nothing, so there is no use for {rest[0]}")
    out = Path(options.out or f"runs/ddppo-scaling-{time.strftime('%Y%m%d-%H%M%S')}")
    inputs = _stored(Path(options.measured)) if options.measured else _measure(options, rest, out)
    report = _report(inputs, options)
    out.mkdir(parents=True, exist_ok=True)
    path = out / "ddppo-scaling.json"
    path.write_text(json.dumps({"inputs": dataclasses.asdict(inputs), **report}, indent=2) + "\n")
    from rookery.cli.show import console
    from rookery.metrics.plot import plot_ranks

    for table in (_check_table(report), _table(report)):
        console().print(table)
    print("\n".join(["Assumptions:", *(f"- {line}" for line in ASSUMPTIONS), *_paper_lines(report["habitat"])]))
    print(f"{path}\n{plot_ranks(_panels(report), out / 'ddppo-scaling.png')}")
    return 0


def _own(words: list[str]) -> tuple[Options, list[str]]:
    """Our own flags, and the words that belong to `rookery train ddppo`."""
    options, rest, words = Options(), [], list(words)
    while words:
        name, equals, value = words.pop(0).partition("=")
        field = name.removeprefix("--").replace("-", "_")
        if name == "--quick" and not equals:
            options.quick = True
        elif name.startswith("--") and field in ("rounds", "max_ranks", "out", "measured"):
            if not equals and not words:
                raise UsageError(f"{name} needs a value")
            value = value if equals else words.pop(0)
            if field in ("rounds", "max_ranks") and (not value.isdigit() or int(value) < 2):
                raise UsageError(f"{name}: {value!r} is not a whole number of at least 2")
            setattr(options, field, int(value) if field in ("rounds", "max_ranks") else value)
        elif name in ("--ranks", "--env-steps", "--env_steps", "--group.preempt", "--topology"):
            raise UsageError(f"{name} is set by bench ddppo-scaling; --rounds is the length of a measurement")
        else:
            rest.append(name + equals + value)
    if options.quick:
        options.rounds, options.max_ranks = min(options.rounds, 8), min(options.max_ranks, 16)
    return options, rest


def _config(ranks: int, preempt: float, rest: list[str], rounds: int) -> RunConfig:
    """The config of one measured run. The only place that knows the flags of ranks."""
    from rookery.cli.configure import config_for

    words = ["--env", ENV, "--env-kwargs", json.dumps(ENV_KWARGS), *rest]
    words += ["--ranks", str(ranks), "--group.preempt", str(preempt)]
    config = config_for("ddppo", words, "rookery bench ddppo-scaling")
    steps = rounds * config.lanes * config.algo.unroll
    return dataclasses.replace(config, env_steps=steps, quiet=True, target_return=None)


def _measure(options: Options, rest: list[str], out: Path) -> Inputs:
    from rookery.cli.show import console
    from rookery.crews.allreduce_timing import SIZES, measure
    from rookery.run.run import train

    runs, sizes = [], list(SIZES)
    configs = [(_config(*each, rest, options.rounds), *each) for each in RUNS]
    for config, ranks, preempt in configs:
        folder = str(out / f"ranks-{ranks}{'-preempted' if preempt < 1 else ''}")
        with console().status(f"{ranks} ranks, {options.rounds} rounds …"):
            run = train(dataclasses.replace(config, out=folder))
        if run.exit_code:
            raise KeyboardInterrupt
        runs.append(read(run.config, run.summary, ranks, preempt))
    algo: Any = configs[0][0].algo
    with console().status("all-reduce between two processes …"):
        seconds = measure(sizes, 8 if options.quick else 30)
    return Inputs(runs, algo.epochs * algo.minibatches, _floats(configs[0][0]), sizes, seconds)


def _floats(config: RunConfig) -> int:
    from rookery.algorithms.registry import build_algorithm
    from rookery.crews.probe import probe

    nets = build_algorithm(config, probe(config.env, config.env_kwargs)).nets()
    return sum(parameter.numel() for parameter in nets.parameters())


def _stored(path: Path) -> Inputs:
    try:
        found = json.loads(path.read_text())["inputs"]
        return Inputs(**found | {"runs": [Measured(**run) for run in found["runs"]]})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is not a ddppo-scaling.json: {error}") from error


def _report(inputs: Inputs, options: Options) -> dict[str, Any]:
    alpha, beta = fit_link([4 * size for size in inputs.sizes], inputs.seconds)
    gloo = Network("gloo on loopback, measured", alpha, beta)
    work = workload(inputs.runs[0], inputs.minibatches, inputs.floats)
    rollouts = ROLLOUTS // 8 if options.quick else ROLLOUTS
    curves = {network.name: _curve(work, network, options.max_ranks, rollouts) for network in (gloo, habitat.CLUSTER)}
    return {
        "link": {"alpha": alpha, "beta": beta},
        "check": [_check(run, inputs, gloo, rollouts) for run in inputs.runs],
        "curves": curves,
        "habitat": habitat.compare(options.max_ranks, 8 if options.quick else 64),
        "paper": {"ranks": habitat.GPUS, "speedup": habitat.SPEEDUP, "source": "arXiv:1911.00357, abstract"},
        "assumptions": ASSUMPTIONS,
    }


def _curve(work: Workload, network: Network, most: int, rollouts: int) -> list[dict[str, Any]]:
    """Every number of ranks, waiting for all and preempted at the paper's 60 %."""

    def at(ranks: int, preemption: Preemption | None) -> Scaled:
        return simulate(work, ranks, network, preemption, max(16, rollouts // ranks))

    alone = at(1, None)
    return [
        {
            "ranks": ranks,
            **{
                name: dataclasses.asdict(found) | {"efficiency": found.efficiency(alone)}
                for name, found in (("waiting", at(ranks, None)), ("preempted", at(ranks, Preemption())))
            },
        }
        for ranks in doublings(most)
    ]


def _check(run: Measured, inputs: Inputs, network: Network, rollouts: int) -> dict[str, Any]:
    """A measured run beside its simulation from the run of one rank, and from its own times as far as these go.

    The second one shows how well the waiting is modelled, without the slow-down of ranks that share a machine.
    """
    preemption = Preemption(run.preempt) if run.preempt < 1 else None
    work = workload(inputs.runs[0], inputs.minibatches, inputs.floats)
    found = simulate(work, run.ranks, network, preemption, rollouts // run.ranks, in_order=True)
    row = {
        "ranks": run.ranks, "preempt": run.preempt, "measured_steps_per_s": run.steps_per_s,
        "simulated_steps_per_s": found.steps_per_s, "measured_round_s": run.round_s,
        "simulated_round_s": found.round_s, "simulated_cut": found.cut, "barrier_round_s": None,
        "measured_learn_s": float(np.mean(run.learn_s)), "simulated_learn_s": found.learn_s + found.reduce_s,
    }  # fmt: skip
    if preemption is None:  # a cut rollout says nothing about how long a whole one would have taken
        own = workload(dataclasses.replace(run, delay=0.0), inputs.minibatches, inputs.floats)
        free = Network("in the learning time already", 0.0, 0.0)
        row["barrier_round_s"] = simulate(own, run.ranks, free, None, rollouts // run.ranks, in_order=True).round_s
    return row


def _table(report: dict[str, Any]) -> Table:
    table = _new_table("Efficiency: steps/s per rank beside one rank. W: waiting for all, P: preempted at 60 %")
    for name in ("ranks", "steps/s (cluster, P)", "cut", "gloo W", "gloo P", "cluster W", "cluster P"):
        table.add_column(name, justify="right")
    for name in ("Habitat model W", "Habitat model P", "paper"):
        table.add_column(name, justify="right")
    gloo, cluster = report["curves"].values()
    paper = {row["ranks"]: row for row in report["habitat"]["rows"]}
    for near, far in zip(gloo, cluster):
        model = paper[near["ranks"]]
        shares = [near["waiting"], near["preempted"], far["waiting"], far["preempted"]]
        table.add_row(
            f"{near['ranks']:,}", f"{far['preempted']['steps_per_s']:,.0f}", f"{far['preempted']['cut']:.0%}",
            *(f"{share['efficiency']:.2f}" for share in shares), f"{model['waiting']:.2f}",
            f"{model['preempted']:.2f}" + (" (fitted)" if model["paper"] else ""),
            f"{model['paper']:.2f}" if model["paper"] else "",
        )  # fmt: skip
    return table


def _check_table(report: dict[str, Any]) -> Table:
    table = _new_table("The simulation, made from the run of one rank, beside the measured runs")
    names = ("ranks", "must finish", "steps/s", "simulated", "ratio", "round s", "simulated", "own times, s")
    for name in (*names, "learning s", "simulated"):
        table.add_column(name, justify="right")
    for row in report["check"]:
        ratio = row["simulated_steps_per_s"] / row["measured_steps_per_s"]
        barrier = row["barrier_round_s"]
        table.add_row(
            str(row["ranks"]), f"{row['preempt']:.0%}", f"{row['measured_steps_per_s']:,.0f}",
            f"{row['simulated_steps_per_s']:,.0f}", f"{ratio:.2f}", f"{row['measured_round_s']:.3f}",
            f"{row['simulated_round_s']:.3f}", f"{barrier:.3f}" if barrier else "",
            f"{row['measured_learn_s']:.3f}", f"{row['simulated_learn_s']:.3f}",
        )  # fmt: skip
    return table


def _new_table(title: str) -> Table:
    from rich import box
    from rich.table import Table

    return Table(title=title, title_style="", title_justify="left", box=box.ROUNDED, header_style="dim")


def _paper_lines(found: dict[str, Any]) -> list[str]:
    """What was fitted, what was predicted, and how far to trust it."""
    best = max(found["by_threshold"], key=lambda row: row["efficiency"])
    thresholds = ", ".join(f"{row['share']:.0%}: {row['efficiency']:.2f}" for row in found["by_threshold"])
    spread = ", ".join(
        f"{row['variation']:g}: {row['preempted']:.2f} P, {row['waiting']:.2f} W" for row in found["by_variation"]
    )
    at = f"at {habitat.GPUS} ranks"
    return [
        "Habitat model (DD-PPO, arXiv:1911.00357):",
        f"- fitted: variation {found['fitted']['variation']:.2f} of an environment's rollout time (log-normal), so "
        f"that preempted ranks have the paper's {habitat.SPEEDUP:g} / {habitat.GPUS} {at}. No other is the paper's.",
        "- predicted: every other number of ranks, waiting for all, and the thresholds.",
        f"- by threshold {at}: {thresholds}; best {best['share']:.0%}, as far as speed goes (the paper: about 60%).",
        f"- by variation {at}: {spread}.",
        "- slow environments explain all of the paper's loss here. If other causes have a part in it, the variation is "
        "smaller, and waiting for all costs less than this model says.",
    ]


def _panels(report: dict[str, Any]) -> list[dict[str, Any]]:
    lines = []
    for name, curve in report["curves"].items():
        for kind, words in (("waiting", "waiting for all"), ("preempted", "preempted")):
            shares = [row[kind]["efficiency"] for row in curve]
            label = f"{name.partition(',')[0].partition(':')[0]}, {words}"
            lines.append({"label": label, "ranks": [row["ranks"] for row in curve], "efficiency": shares})
    first = report["check"][0]["measured_steps_per_s"]
    points = [
        {
            "label": "measured" if row["preempt"] == 1 else f"measured, preempted at {row['preempt']:.0%}",
            "ranks": [row["ranks"]], "efficiency": [row["measured_steps_per_s"] / row["ranks"] / first],
        }
        for row in report["check"][1:]
    ]  # fmt: skip
    rows = report["habitat"]["rows"]
    model = [
        {"label": words, "ranks": [row["ranks"] for row in rows], "efficiency": [row[kind] for row in rows]}
        for kind, words in (("waiting", "model, waiting for all"), ("preempted", "model, preempted at 60 % (fitted)"))
    ]
    paper = report["paper"]
    mark = {"label": "paper", "ranks": [paper["ranks"]], "efficiency": [paper["speedup"] / paper["ranks"]]}
    return [
        {"title": "GridNav, measured and simulated", "lines": lines, "points": points},
        {"title": "Habitat, one point fitted", "lines": model, "points": [mark]},
    ]
