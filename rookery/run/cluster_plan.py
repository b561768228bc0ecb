"""What a recipe needs on a cluster: nodes, bytes per second, memory. Arithmetic only; see `docs/cluster.md`.

What the recipe moves (`Work`) and how fast one core and one learner are (`Rates`) come from outside. Everything is
proportional to the target of environment steps per second, except weights: they are published at most as often as
there is something new, and a node fetches each version once.
Not here: what is learnt from a step, and waiting that comes of uneven environments.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from rookery.core.errors import UsageError

USABLE = 0.9  # share of a node's memory that is planned with
LEARNING = 0.7  # of the time at most, where actors and learner take turns: beyond, the actors would do little but wait
MOST_NODES = 2000  # that Ray is said to work with (its own scalability envelope)
FLOAT_BYTES = 4


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
    bytes: int  # of one hand-over, as it travels
    filled: int  # of these, bytes that mean something on average
    floats: int  # of the published weights
    batch_steps: float  # new environment steps behind one update, if the learner keeps pace with the actors
    in_turns: bool  # whether actors and learner wait for each other
    uses: float = 1.0  # updates on each batch
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
        return math.floor(self.cores / self.cpus_per_actor + 1e-6)

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
    filled_per_step: float
    handovers_per_s: float
    updates_per_s: float  # of each learner
    updates_needed: float | None  # of all learners; none: nothing asks for a pace
    learner_share: float  # of the time that a learner computes
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
    shard_gib: float
    shard_draws_per_s: float
    limits: tuple[Limit, ...]  # the tightest first
    verdict: str

    @property
    def nodes(self) -> int:
        return self.actor_nodes + self.learners + self.shard_nodes


def planned(work: Work, rates: Rates, nodes: Nodes, steps_per_s: float, least_shards: int = 1) -> Plan:
    """The smallest cluster of such nodes that reaches the target, and what limits it."""
    check(rates, nodes, steps_per_s)
    pace = learner_pace(work, rates)
    learners = max(1, math.ceil(steps_per_s / (pace * (LEARNING if work.in_turns else 1.0)) - 1e-9))
    learners = 1 if work.what == "gradients" else learners
    waits = min(steps_per_s / (pace * learners), LEARNING) if work.in_turns else 0.0
    actors = math.ceil(steps_per_s / (rates.actor_steps_per_s * (1 - waits)) - 1e-6)
    actor_nodes = math.ceil(actors / nodes.actors)
    check_size(steps_per_s, actor_nodes, nodes)
    each = steps_per_s / learners  # environment steps/s behind one learner
    handovers = each / work.steps
    needed, updates = _updates(work, rates, each)
    versions = _versions(work, updates, handovers, actors / learners)
    node_versions = min(versions, handovers * learners / actor_nodes)
    weights = FLOAT_BYTES * work.floats
    weights_out = weights * node_versions * math.ceil(actor_nodes / learners)
    own = math.ceil(actors / learners)
    store = own * work.ahead * work.bytes + weights * (own + 2)
    arriving = handovers * work.bytes
    # Replay
    replay = work.replay if work.what == "items" else None
    inserts = draws = 0.0
    shards = shard_nodes = 0
    if replay is not None:
        inserts, draws = each * replay.items_per_step, updates * replay.batch
        shards = _shards(replay, rates, nodes, draws, store, least_shards)
        shard_nodes = learners * _shard_nodes(replay, nodes, shards, store)
    learner_in = draws * replay.item_bytes if replay is not None and shard_nodes else arriving
    held = 0 if replay is None or shard_nodes else replay.memory_bytes
    aggregators = 0
    if work.what == "unrolls" and handovers > rates.unrolls_per_s:
        aggregators = math.ceil(handovers / rates.unrolls_per_s)
    limits = [
        Limit("the learner", _learner_share(needed, rates), _learner_advice(work)),
        Limit("the network into the learner's node", learner_in / nodes.bytes_per_s, _in_advice(work, shard_nodes)),
        Limit(
            "the network out of the learner's node, by weights",
            weights_out / nodes.bytes_per_s,
            "use fewer nodes with more cores, or longer unrolls (--algo.unroll), so that fewer versions are fetched",
        ),
        Limit(
            "the memory of the learner's node",
            (store + held) / nodes.memory,
            "use nodes with more memory, or fewer actors with more environments each (--envs-per-actor)",
        ),
    ]
    if work.what != "unrolls" and not shards > 1:
        limits.append(Limit("the process that takes in what actors hand over", handovers / rates.unrolls_per_s,
                            "hand over more at once (--algo.unroll, --envs-per-actor)"))  # fmt: skip
    if replay is not None:
        limits.append(Limit("draws from a shard", draws / shards / rates.draws_per_s,
                            f"use more shards (--algo.replay.shards {2 * shards})"))  # fmt: skip
        if shard_nodes:
            arrives = arriving / (shard_nodes / learners)
            limits.append(Limit("the network into a node of shards", arrives / nodes.bytes_per_s,
                                "spread the shards over more nodes"))  # fmt: skip
    limits.sort(key=lambda limit: -limit.share)
    return Plan(
        steps_per_s=steps_per_s, actors=actors, actor_nodes=actor_nodes, learners=learners, shard_nodes=shard_nodes,
        bytes_per_step=work.bytes / work.steps, filled_per_step=work.filled / work.steps,
        handovers_per_s=handovers * learners, updates_per_s=updates,
        updates_needed=None if needed is None else needed * learners, learner_share=min(1.0, updates * rates.learner_s),
        versions_per_s=versions, weights_bytes=weights, weights_out=weights_out, learner_in=learner_in,
        store_gib=store / 2**30, aggregators=aggregators * learners,
        inserts_per_s=inserts * learners, draws_per_s=draws * learners,
        memory_gib=0.0 if replay is None else learners * replay.memory_bytes / 2**30, shards=shards,
        shard_gib=0.0 if replay is None else replay.memory_bytes / shards / 2**30,
        shard_draws_per_s=draws / shards if shards else 0.0, limits=tuple(limits),
        verdict=_verdict(work, limits, learners, shards, aggregators * learners),
    )  # fmt: skip


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


def _shards(replay: Replayed, rates: Rates, nodes: Nodes, draws: float, store: float, least: int) -> int:
    """By memory, if it does not fit beside the object store of the learner's node; and by the rate of draws."""
    by_memory = 1 if replay.memory_bytes + store <= nodes.memory else math.ceil(replay.memory_bytes / nodes.memory)
    return max(least, by_memory, math.ceil(draws / rates.draws_per_s - 1e-9))


def _shard_nodes(replay: Replayed, nodes: Nodes, shards: int, store: float) -> int:
    """Nodes besides the learner's, for one learner's memory. On its own one, a core is left for itself."""
    if replay.memory_bytes + store <= nodes.memory and shards < nodes.cores:
        return 0
    each = min(math.floor(nodes.memory / (replay.memory_bytes / shards) + 1e-9), nodes.cores)
    return math.ceil(shards / each)


def _learner_share(needed: float | None, rates: Rates) -> float:
    return 0.0 if needed is None else needed * rates.learner_s


def _learner_advice(work: Work) -> str:
    if work.what == "gradients":
        return "have each gradient made from more steps (--algo.unroll, --envs-per-actor)"
    less = "fewer draws of each item (--algo.replay.samples-per-insert), " if work.what == "items" else ""
    return f"use a faster learner (--device cuda), {less}or more learners (--ranks)"


def _in_advice(work: Work, shard_nodes: int) -> str:
    if shard_nodes:
        return "use nodes with more memory, so that the shards fit on the learner's own"
    if work.what == "items":
        return "put the memory on nodes of its own (--algo.replay.shards), or use a faster network"
    if work.what == "gradients":
        return "have each gradient made from more steps (--algo.unroll, --envs-per-actor), or use a faster network"
    return "use a faster network, smaller observations, or more learners on nodes of their own (--ranks)"


def _verdict(work: Work, limits: list[Limit], learners: int, shards: int, aggregators: int) -> str:
    """What limits, and what to change."""
    first = limits[0]
    use = [f"--ranks {learners}"] if learners > 1 else []
    use += [f"--algo.replay.shards {shards}"] if shards > 1 else []
    use += [f"--ray.aggregators {aggregators}"] if aggregators else []
    need = f" Set {', '.join(use)}." if use else ""
    if first.share > 1:
        return f"The target does not fit: {first.name} would have to be {first.share:.1f} times as fast or large." + (
            f"{need} To change: {first.advice}."
        )
    if first.share < 0.01:
        return f"The target fits, limited by the number of actors only.{need}"
    return f"The target fits.{need} Next limit: {first.name}, at {first.share:.0%}. To go further: {first.advice}."
