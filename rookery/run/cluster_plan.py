"""What a recipe needs on a cluster: nodes, bytes per second, memory. Arithmetic only; see `docs/cluster.md`.

What the recipe moves (`Work`) and how fast one core and one learner are (`Rates`) come from outside. Everything is
proportional to the target of environment steps per second, except weights: they are published at most as often as
there is something new, and a node fetches each version once.
Not here: what is learnt from a step, and waiting that comes of uneven environments.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rookery.core.errors import UsageError

USABLE = 0.9  # share of a node's memory that is planned with
LEARNING = 0.7  # of the time at most, where actors and learner take turns: beyond, the actors would do little but wait
MOST_NODES = 2000  # that Ray is said to work with (its own scalability envelope)
FLOAT_BYTES = 4
RARE = 0.5  # draws of an item on average, below which the plan says so; Ape-X has 0.78
ROUNDING = 1e-6


@dataclass(frozen=True)
class Replayed:
    """The replay memory of one learner."""

    memory_bytes: int  # when it is full
    items_per_step: float  # items that an environment step becomes
    batch: int  # items per update
    samples_per_insert: float  # draws per item; 0: the learner does not wait for actors, nor they for it
    item_bytes: int  # of one item as it is drawn: whole observations


@dataclass(frozen=True)
class Work:
    """What a recipe moves on an environment. A hand-over is an unroll, a parcel of items, or a gradient."""

    recipe: str
    env: str
    what: Literal["unrolls", "items", "gradients"]  # that actors hand over
    steps: int  # environment steps behind one hand-over
    bytes: int  # of one hand-over, as it travels, on average
    floats: int  # of the published weights
    batch_steps: float  # new environment steps behind one update, if the learner keeps pace with the actors
    in_turns: bool  # whether actors and learner wait for each other
    uses: float = 1.0  # updates on each batch
    refresh: int = 0  # environment steps of an actor between two fetches of weights; 0: with every hand-over
    ahead: int = 1  # hand-overs that one actor may have under way
    publish_s: float = 0.0  # least seconds between two publications of weights
    replay: Replayed | None = None


@dataclass(frozen=True)
class Rates:
    actor_steps_per_s: float  # environment steps of one actor; of a worker that learns, with its gradients
    learner_s: float  # seconds per update, or for applying one gradient
    draws_per_s: float = math.inf  # items that one process draws from its part of a replay memory
    unrolls_per_s: float = 1000.0  # hand-overs that one process takes in


@dataclass(frozen=True)
class Nodes:
    """All nodes are alike."""

    cores: int = 16
    memory_gib: float = 64.0
    gbit_per_s: float = 10.0
    cpus_per_actor: float = 1.0

    @property
    def actors(self) -> int:
        """That one node has room for."""
        return math.floor(self.cores / self.cpus_per_actor + ROUNDING)

    @property
    def memory(self) -> float:
        """Bytes to plan with."""
        return USABLE * self.memory_gib * 2**30

    @property
    def bytes_per_s(self) -> float:
        """In each direction."""
        return self.gbit_per_s * 1e9 / 8


@dataclass(frozen=True)
class Limit:
    name: str
    share: float  # of what there is, that the target takes; above 1: it does not fit
    advice: str


@dataclass(frozen=True)
class Plan:
    """All rates are per second, and of the whole cluster unless it says otherwise."""

    steps_per_s: float
    actors: int
    actor_nodes: int
    learners: int
    shard_nodes: int  # besides the learner's; 0: the shards are on its node
    bytes_per_step: float
    handovers_per_s: float
    updates_per_s: float  # of each learner
    updates_needed: float | None  # of all learners; none: nothing asks for a pace
    learner_share: float  # of the time that a learner computes; above 1: it cannot keep pace
    versions_per_s: float  # of weights that are published, by each learner
    weights_bytes: int  # one version
    weights_out: float  # bytes/s out of a learner's node
    learner_in: float  # bytes/s into a learner's node
    store_gib: float  # of the object store on a learner's node
    aggregators: int
    inserts_per_s: float
    draws_per_s: float
    memory_gib: float  # of the replay memories
    shards: int  # of each learner's memory; 0: there is no memory
    limits: tuple[Limit, ...]  # the tightest first
    verdict: str

    @property
    def nodes(self) -> int:
        return self.actor_nodes + self.learners + self.shard_nodes

    @property
    def shard_gib(self) -> float:
        return self.memory_gib / self.learners / max(1, self.shards)

    @property
    def shard_draws_per_s(self) -> float:
        return self.draws_per_s / self.learners / max(1, self.shards)


def planned(work: Work, rates: Rates, nodes: Nodes, steps_per_s: float, least_shards: int = 1) -> Plan:
    """The smallest cluster of such nodes that reaches the target, and what limits it."""
    check(rates, nodes, steps_per_s)
    learners = _learners(work, rates, steps_per_s)
    actors = _actors(work, rates, steps_per_s, learners)
    actor_nodes = math.ceil(actors / nodes.actors)
    check_size(steps_per_s, actor_nodes, nodes)
    each, own = steps_per_s / learners, math.ceil(actors / learners)  # steps/s and actors of one learner
    handovers = each / work.steps
    needed, updates = _updates(work, rates, each)
    versions = _versions(work, updates, handovers, actors / learners)
    fetches = steps_per_s / max(work.steps, work.refresh) / actor_nodes  # that the actors of a node ask for
    fetched = min(versions, fetches) * math.ceil(actor_nodes / learners)
    weights = FLOAT_BYTES * work.floats
    store = own * work.ahead * work.bytes + weights * (own + 2)
    memory = _Memory.of(work, rates, nodes, updates, store, least_shards)
    aggregators = 0
    if work.what == "unrolls" and handovers > rates.unrolls_per_s:
        aggregators = math.ceil(handovers / rates.unrolls_per_s)
    plan = Plan(
        steps_per_s=steps_per_s, actors=actors, actor_nodes=actor_nodes, learners=learners,
        shard_nodes=learners * memory.nodes, bytes_per_step=work.bytes / work.steps,
        handovers_per_s=handovers * learners, updates_per_s=updates,
        updates_needed=None if needed is None else needed * learners,
        learner_share=(updates if needed is None else needed) * rates.learner_s, versions_per_s=versions,
        weights_bytes=weights, weights_out=weights * fetched,
        learner_in=memory.draws * memory.item_bytes if memory.nodes else handovers * work.bytes,
        store_gib=store / 2**30, aggregators=aggregators * learners, inserts_per_s=steps_per_s * memory.items_per_step,
        draws_per_s=memory.draws * learners, memory_gib=memory.bytes * learners / 2**30, shards=memory.shards,
        limits=(), verdict="",
    )  # fmt: skip
    limits = tuple(sorted(_limits(plan, work, rates, nodes), key=lambda limit: -limit.share))
    return dataclasses.replace(plan, limits=limits, verdict=_verdict(plan, limits))


@dataclass(frozen=True)
class _Memory:
    """The replay memory of one learner on the cluster; all 0 without one."""

    bytes: int = 0
    items_per_step: float = 0.0
    item_bytes: int = 0
    draws: float = 0.0
    shards: int = 0
    nodes: int = 0

    @staticmethod
    def of(work: Work, rates: Rates, nodes: Nodes, updates: float, store: float, least: int) -> _Memory:
        """As many shards as memory and draws ask for; on nodes of their own if they do not fit on the learner's.

        There a core is left for the learner, and its object store needs room too.
        """
        replay = work.replay if work.what == "items" else None
        if replay is None:
            return _Memory()
        draws, fits = updates * replay.batch, replay.memory_bytes + store <= nodes.memory
        by_memory = 1 if fits else math.ceil(replay.memory_bytes / nodes.memory)
        shards = max(least, by_memory, math.ceil(draws / rates.draws_per_s - ROUNDING))
        more = 0
        if not fits or shards >= nodes.cores:
            each = math.floor(nodes.memory / (replay.memory_bytes / shards) + ROUNDING)
            more = math.ceil(shards / min(each, nodes.cores))
        return _Memory(replay.memory_bytes, replay.items_per_step, replay.item_bytes, draws, shards, more)


def _limits(plan: Plan, work: Work, rates: Rates, nodes: Nodes) -> Iterator[Limit]:
    """What each part of the cluster would have to do, as a share of what it can."""
    learners, handovers = plan.learners, plan.handovers_per_s / plan.learners
    if plan.updates_needed is not None:
        yield Limit("the learner", plan.learner_share, _learner_advice(work, plan))
    yield Limit(
        "the network into the learner's node", plan.learner_in / nodes.bytes_per_s, _in_advice(work, plan.shard_nodes)
    )
    yield Limit(
        "the network out of the learner's node, for weights",
        plan.weights_out / nodes.bytes_per_s,
        "use fewer nodes with more cores, or longer unrolls (--algo.unroll), so that fewer versions are fetched",
    )
    held = 0.0 if plan.shard_nodes else plan.memory_gib / learners
    yield Limit(
        "the memory of the learner's node",
        (plan.store_gib + held) * 2**30 / nodes.memory,
        "use nodes with more memory, or fewer actors with more environments each (--envs-per-actor)",
    )
    if work.what != "unrolls" and plan.shards <= 1:
        advice = "hand over more at once (--algo.unroll, --envs-per-actor)"
        yield Limit("the process that takes in what actors hand over", handovers / rates.unrolls_per_s, advice)
    if plan.shards:
        advice = f"use more shards (--algo.replay.shards {2 * plan.shards})"
        yield Limit("draws from a shard", plan.shard_draws_per_s / rates.draws_per_s, advice)
    if plan.shard_nodes:
        arriving = plan.handovers_per_s * work.bytes / plan.shard_nodes
        advice = "spread the shards over more nodes"
        yield Limit("the network into a node of shards", arriving / nodes.bytes_per_s, advice)


def check(rates: Rates, nodes: Nodes, steps_per_s: float) -> None:
    """UsageError for numbers that no cluster has; it names the flag."""
    numbers = {
        "--steps-per-s": steps_per_s, "--actor-steps-per-s": rates.actor_steps_per_s, "--learner-s": rates.learner_s,
        "--unrolls-per-s": rates.unrolls_per_s, "--cores-per-node": nodes.cores, "--memory-gib": nodes.memory_gib,
        "--gbit-per-s": nodes.gbit_per_s, "--ray.cpus-per-actor": nodes.cpus_per_actor,
    }  # fmt: skip
    for flag, value in numbers.items():
        if not 0 < value < math.inf:
            raise UsageError(f"{flag} is {value:g}; it must be a number above 0")
    if not rates.draws_per_s > 0:
        raise UsageError(f"--draws-per-s is {rates.draws_per_s:g}; it must be a number above 0")
    if not nodes.actors:
        raise UsageError(
            f"--cores-per-node is {nodes.cores}, and an actor takes {nodes.cpus_per_actor:g} CPUs "
            "(--ray.cpus-per-actor): no actor fits on a node"
        )


def check_size(steps_per_s: float, actor_nodes: int, nodes: Nodes) -> None:
    if actor_nodes > MOST_NODES:
        reachable = steps_per_s * MOST_NODES / actor_nodes
        raise UsageError(
            f"--steps-per-s {steps_per_s:g} needs {actor_nodes:,} nodes of {nodes.cores} cores for its actors, and Ray "
            f"is said to work with about {MOST_NODES:,}: ask for {reachable:,.0f} steps/s or less, or name nodes with "
            "more cores (--cores-per-node)"
        )


def learner_pace(work: Work, rates: Rates) -> float:
    """Environment steps/s that one learner keeps pace with."""
    if work.what == "items" and work.replay is not None and not work.replay.samples_per_insert:
        return math.inf
    return work.batch_steps / (work.uses * rates.learner_s)


def _learners(work: Work, rates: Rates, steps_per_s: float) -> int:
    if work.what == "gradients":
        return 1  # it applies what the workers have computed; there cannot be several
    pace = learner_pace(work, rates) * (LEARNING if work.in_turns else 1.0)
    return max(1, math.ceil(steps_per_s / pace - ROUNDING))


def _actors(work: Work, rates: Rates, steps_per_s: float, learners: int) -> int:
    """At least one for each learner. In turns they act only while the learner does not learn."""
    waiting = steps_per_s / (learner_pace(work, rates) * learners) if work.in_turns else 0.0
    return max(learners, math.ceil(steps_per_s / (rates.actor_steps_per_s * (1 - waiting)) - ROUNDING))


def _updates(work: Work, rates: Rates, steps_per_s: float) -> tuple[float | None, float]:
    """Updates/s that these steps ask of a learner, if they do, and that it makes."""
    most = 1 / rates.learner_s
    if learner_pace(work, rates) == math.inf:
        return None, most
    needed = work.uses * steps_per_s / work.batch_steps
    return needed, min(needed, most)


def _versions(work: Work, updates: float, handovers: float, actors: float) -> float:
    """Weights are published before an order, if there are new ones: in turns once per round of all actors."""
    orders = handovers / actors if work.in_turns else handovers
    return min(updates, orders, 1 / work.publish_s if work.publish_s else math.inf)


def _learner_advice(work: Work, plan: Plan) -> str:
    if work.what == "gradients":
        return "have each gradient made from more steps (--algo.unroll, --envs-per-actor)"
    return f"{_learner_faster(plan)}, or more learners (--ranks)"


def _in_advice(work: Work, shard_nodes: int) -> str:
    if shard_nodes:
        return "use nodes with more memory, so that the shards fit on the learner's own"
    if work.what == "items":
        return "put the memory on nodes of its own (--algo.replay.shards), or use a faster network"
    if work.what == "gradients":
        return "have each gradient made from more steps (--algo.unroll, --envs-per-actor), or use a faster network"
    return "use a faster network, smaller observations, or more learners on nodes of their own (--ranks)"


def _verdict(plan: Plan, limits: Sequence[Limit]) -> str:
    """What limits, and what to change."""
    first, said = limits[0], ""
    if plan.learners > 1:
        said = (
            f"One learner does not carry the target. Either {plan.learners} train together (--ranks {plan.learners}), "
            f"each on batches of its own, or one is made faster: {_learner_faster(plan)}. With {plan.learners}: "
        )
    drawn = plan.draws_per_s / plan.inserts_per_s if plan.inserts_per_s else 1.0
    if drawn < RARE:
        said += f"An item is drawn {drawn:.2g} times on average: a faster learner would use more of them. "
    flags = [f"--algo.replay.shards {plan.shards}"] if plan.shards > 1 else []
    flags += [f"--ray.aggregators {plan.aggregators}"] if plan.aggregators else []
    setting = f" Set {', '.join(flags)}." if flags else ""
    if first.share > 1:
        said += f"The target does not fit: it takes {first.share:.0%} of {first.name}."
    elif first.share < 0.01:
        return f"{said}The target fits, and nothing but the number of actors limits.{setting}"
    else:
        said += f"The target fits. The next limit is {first.name}: {first.share:.0%} used."
    return f"{said}{setting} To change that: {first.advice}."


def _learner_faster(plan: Plan) -> str:
    less = ", fewer draws of each item (--algo.replay.samples-per-insert)" if plan.shards else ""
    return f"a GPU or more cores (--device cuda){less}"
