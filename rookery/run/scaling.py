"""How synchronous training scales with the number of ranks: a simulation of its rounds.

A round is: every rank collects a rollout, the ranks wait for each other, then each minibatch is one computation and one
all-reduce (DD-PPO, Wijmans et al. 2020, arXiv:1911.00357). With preemption, once `share` of the ranks have finished
their rollout, the others stop after the step that they are in, but not before `after` of their own rollout.

The times come from outside. A rank draws its environments, and for each of them a rollout as a whole, with all its
steps: what is slow stays slow for a rollout. A step of a rank takes as long as that of its slowest environment. Rounds
are independent of each other, and the learning time does not shrink with short rollouts. The all-reduce follows the
α–β model, messages × α + bytes × β, and does not overlap with the computation.
Not here: what the policy learns from short rollouts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

FLOAT_BYTES = 4
TOGETHER = 2048  # rollouts that are computed together


@dataclass(frozen=True)
class Network:
    """The α–β model of one link, and which algorithm reduces over it."""

    name: str
    alpha: float  # seconds per message
    beta: float  # seconds per byte
    ring_up_to: int | None = None  # ranks; a tree beyond; none: always a ring


@dataclass(frozen=True)
class Preemption:
    share: float = 0.6  # of the ranks that must have finished before the others stop
    after: float = 0.25  # share of its rollout that a rank always collects


@dataclass(frozen=True)
class Workload:
    """What one rank does in a round, as samples."""

    step_s: np.ndarray  # [environments, samples, T] seconds of each step of a rollout; T = 1: all take as long
    row_s: np.ndarray  # [samples] seconds that a rank adds to every step: inference, transfer
    rows: int  # T, steps of a rollout per environment
    learn_s: np.ndarray  # [samples] seconds that one rank computes per round, without all-reduce
    steps_per_row: int  # environment steps behind one row of a rollout: environments of a rank
    minibatches: int  # all-reduces per round: epochs × minibatches
    floats: int  # length of the vector that is reduced
    stepped_together: int = 1  # environments of step_s per rank; 1: each stands for a whole rank


@dataclass(frozen=True)
class Scaled:
    """Means over the simulated rounds."""

    ranks: int
    steps_per_s: float  # environment steps that were trained on, of all ranks
    steps: float  # of these, per round
    round_s: float
    collect_s: float  # until the last rank has stopped
    learn_s: float
    reduce_s: float
    waiting: float  # share of a round that a rank waits for slower ones, in collection
    cut: float  # share of the rollouts that were stopped early

    def efficiency(self, alone: Scaled) -> float:
        """Throughput per rank beside that of one rank."""
        return self.steps_per_s / (self.ranks * alone.steps_per_s)


def ring_s(ranks: int, size: float, alpha: float, beta: float) -> float:
    """Ring all-reduce of `size` bytes: reduce-scatter and all-gather, ranks - 1 messages of size / ranks each."""
    return 2 * (ranks - 1) * alpha + 2 * (ranks - 1) / ranks * size * beta


def tree_s(ranks: int, size: float, alpha: float, beta: float) -> float:
    """Double binary tree, pipelined: latency grows with log2(ranks), as many bytes per link as in a ring."""
    return 2 * math.ceil(math.log2(ranks)) * alpha + 2 * (ranks - 1) / ranks * size * beta


def all_reduce_s(ranks: int, floats: int, network: Network) -> float:
    """Seconds of one all-reduce."""
    if ranks == 1:
        return 0.0
    tree = network.ring_up_to is not None and ranks > network.ring_up_to
    return (tree_s if tree else ring_s)(ranks, floats * FLOAT_BYTES, network.alpha, network.beta)


def fit_link(sizes: Sequence[float], seconds: Sequence[float], ranks: int = 2) -> tuple[float, float]:
    """(α, β) from measured ring all-reduces of `sizes` bytes: least squares of the relative error, none negative."""
    size, time = np.asarray(sizes, float), np.asarray(seconds, float)
    assert size.shape == time.shape and size.ndim == 1, (size.shape, time.shape)
    columns = np.stack([np.full_like(size, 2 * (ranks - 1)), 2 * (ranks - 1) / ranks * size], axis=1) / time[:, None]
    alpha, beta = np.linalg.lstsq(columns, np.ones_like(time), rcond=None)[0]
    if alpha >= 0 and beta >= 0:
        return float(alpha), float(beta)
    keep = 1 if alpha < 0 else 0  # the other is 0
    only = columns[:, keep].sum() / (columns[:, keep] ** 2).sum()
    return (0.0, float(only)) if keep else (float(only), 0.0)


def stops(ends: np.ndarray, preemption: Preemption) -> np.ndarray:
    """Rows that each rank collects, from the times at which its rows end ([..., ranks, T], ascending)."""
    ranks, rows = ends.shape[-2:]
    enough = min(ranks, max(1, math.ceil(preemption.share * ranks - 1e-9)))
    called = np.partition(ends[..., -1], enough - 1, axis=-1)[..., enough - 1]
    least = max(1, math.ceil(preemption.after * rows - 1e-9))
    under_way = (ends < called[..., None, None]).sum(axis=-1) + 1  # the step under way is finished
    return np.clip(under_way, least, rows)


def simulate(
    work: Workload, ranks: int, network: Network, preemption: Preemption | None, rounds: int, seed: int = 0,
    in_order: bool = False,
) -> Scaled:  # fmt: skip
    """Rounds of `ranks` ranks. The draws depend on `ranks` and `seed` only: with and without preemption they agree.

    `in_order`: the ranks have the first environments of `work`, always the same ones, instead of any.
    """
    rng = np.random.default_rng([seed, ranks])
    together = max(1, TOGETHER // ranks)
    lengths = [min(together, rounds - at) for at in range(0, rounds, together)]
    parts = [_rounds(work, (length, ranks), preemption, rng, in_order) for length in lengths]
    collect_s, learn_s, waited, kept, cut = np.concatenate(parts, axis=1).mean(axis=1).tolist()
    reduce_s = work.minibatches * all_reduce_s(ranks, work.floats, network)
    round_s = collect_s + learn_s + reduce_s
    steps = kept * work.steps_per_row
    return Scaled(
        ranks=ranks, steps_per_s=steps / round_s, steps=steps, round_s=round_s, collect_s=collect_s, learn_s=learn_s,
        reduce_s=reduce_s, waiting=waited / round_s, cut=cut,
    )  # fmt: skip


def _rounds(
    work: Workload, shape: tuple[int, int], preemption: Preemption | None, rng: np.random.Generator, in_order: bool
) -> np.ndarray:
    """[5, rounds]: seconds until the last rank has stopped, of learning, of a rank's waiting; rows; share cut."""
    (rounds, ranks), rows, (envs, samples, steps) = shape, work.rows, work.step_s.shape
    assert steps in (1, rows), (work.step_s.shape, rows)
    drawn = (rounds, ranks, work.stepped_together)
    env = np.arange(ranks * drawn[2]).reshape(drawn[1:]) if in_order else rng.integers(envs, size=drawn)
    step_s = work.step_s[env, rng.integers(samples, size=drawn)].max(axis=2)  # [rounds, ranks, T or 1]
    step_s = np.broadcast_to(step_s + rng.choice(work.row_s, (rounds, ranks, 1)), (rounds, ranks, rows))
    learn_s = rng.choice(work.learn_s, (rounds, ranks)).max(axis=1)  # every all-reduce waits for the slowest
    if preemption is None:
        stop, end = np.full((rounds, ranks), rows), step_s.sum(axis=2)
    else:
        ends = step_s.cumsum(axis=2)  # [rounds, ranks, T]
        stop = stops(ends, preemption)
        end = np.take_along_axis(ends, stop[..., None] - 1, axis=2)[..., 0]
    last = end.max(axis=1)
    return np.stack([last, learn_s, last - end.mean(axis=1), stop.sum(axis=1), (stop < rows).mean(axis=1)])


def doublings(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`."""
    return [2**power for power in range(most.bit_length())]
