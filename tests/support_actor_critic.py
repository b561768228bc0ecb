"""Actor-critics against plain numbers: a fixed batch, a linear policy and value in numpy, and rigs that act.

The batch and the nets are float64, and the constants of the tests are sums of a few powers of two, so that nothing but
the formulas decides. What several test files share.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support_lanes import BOX, DISCRETE, MULTI, Rig, ScriptedLanes, shaken

from rookery.algorithms.actor_critic import ActorCritic
from rookery.core import tree
from rookery.core.config import NetConfig
from rookery.core.reduce import ALONE, Reduce
from rookery.core.types import EnvSpec, Leaf
from rookery.core.unroll import Unroll, empty_unroll, unroll_shapes
from rookery.envs.lanes import Lanes
from rookery.nets.modules import Nets
from rookery.roles.actor import Actor
from rookery.roles.learner import Learner
from rookery.tables.queue import RoundQueue

ROWS, LANES = 6, 4
ACTIONS = {"discrete": DISCRETE, "multi": MULTI, "box": BOX}
FLAT = NetConfig(hidden=())  # linear policy and value of the bare observation
CORES = {
    "none": NetConfig(hidden=(8,)),
    "gru": NetConfig(hidden=(8,), core="gru", core_size=5),
    "lstm": NetConfig(hidden=(8,), core="lstm", core_size=5),
}
NUMBERS = {"unroll": ROWS, "gamma": 0.875, "lam": 0.75, "value_coef": 0.75, "entropy": 2**-5}


def spec_of(kind: str) -> EnvSpec:
    return EnvSpec("fixed", {"obs": Leaf((3,), "float32", "vector")}, ACTIONS[kind])


def fixed_batch(kind: str = "discrete", seed: int = 3) -> Unroll:
    """Six rows of four lanes with ends of both kinds inside and in the last row, and dead rows at both borders."""
    rng = np.random.default_rng(seed)
    terminated, truncated = np.zeros((ROWS, LANES), bool), np.zeros((ROWS, LANES), bool)
    for row, lane in ((2, 0), (5, 1), (0, 3)):
        terminated[row, lane] = True
    for row, lane in ((1, 1), (4, 2), (5, 3)):
        truncated[row, lane] = True
    live = np.ones((ROWS, LANES), bool)
    live[0, 2] = False
    live[1:] = ~(terminated | truncated)[:-1]
    action = {
        "discrete": rng.integers(3, size=(ROWS, LANES)),
        "multi": np.stack([rng.integers(n, size=(ROWS, LANES)) for n in MULTI.choices], -1),
        "box": rng.normal(size=(ROWS, LANES, 2)),
    }[kind]
    return Unroll(
        obs={"obs": torch.tensor(rng.normal(size=(ROWS + 1, LANES, 3)))}, action=torch.tensor(action),
        reward=torch.tensor(np.where(live, rng.normal(size=(ROWS, LANES)), 0.0)),
        terminated=torch.tensor(terminated), truncated=torch.tensor(truncated), live=torch.tensor(live),
        logp=torch.tensor(rng.normal(-1.5, 0.5, (ROWS, LANES))), state0={},
        version=torch.zeros(LANES, dtype=torch.int64), lane=torch.arange(LANES),
    )  # fmt: skip


def rows_of(batch: Unroll) -> list[tuple[int, int]]:
    """The live ones, (t, lane)."""
    return [(t, b) for t in range(batch.live.shape[0]) for b in range(batch.live.shape[1]) if batch.live[t, b]]


def linear(kind: type[ActorCritic], config: Any, action: str = "discrete") -> tuple[Any, Nets]:
    """An algorithm, and its nets with random weights in float64."""
    algorithm = kind(config, FLAT, spec_of(action), LANES)
    nets = algorithm.nets().double()
    with torch.no_grad():
        for parameter in nets.parameters():
            parameter.zero_()
    moved(nets, 0.5, seed=5)
    return algorithm, nets


def moved(nets: Nets, amount: float, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in nets.parameters():
            parameter.add_(amount * torch.randn(parameter.shape, generator=rng, dtype=torch.float64))


class Model:
    """Policy and value of linear nets, for one observation and one action at a time."""

    def __init__(self, nets: Nets, action: str = "discrete"):
        self.kind = action
        self.weights = {name: p.detach().double().numpy().copy() for name, p in nets.named_parameters()}

    def shifted(self, name: str, at: tuple[int, ...], by: float) -> Model:
        other = copy.copy(self)
        other.weights = self.weights | {name: self.weights[name].copy()}
        other.weights[name][at] += by
        return other

    def _linear(self, head: str, x: np.ndarray) -> np.ndarray:
        return self.weights[f"{head}.linear.weight"] @ x + self.weights[f"{head}.linear.bias"]

    def value(self, x: np.ndarray) -> float:
        return float(self._linear("value", x)[0])

    def _branches(self, x: np.ndarray) -> list[np.ndarray]:
        """Probabilities of each branch."""
        logits, start, found = self._linear("policy", x), 0, []
        for n in ACTIONS[self.kind].choices:
            odds = np.exp(logits[start : start + n])
            found.append(odds / odds.sum())
            start += n
        return found

    def logp(self, x: np.ndarray, action: Any) -> float:
        if self.kind == "box":
            mean, std = self._linear("policy", x), np.exp(self.weights["policy.log_std"])
            return sum(
                -0.5 * ((a - m) / s) ** 2 - math.log(s) - 0.5 * math.log(2 * math.pi)
                for a, m, s in zip(action, mean, std)
            )
        chosen = np.atleast_1d(action)
        return sum(math.log(p[int(a)]) for p, a in zip(self._branches(x), chosen))

    def entropy(self, x: np.ndarray) -> float:
        if self.kind == "box":
            return sum(0.5 * math.log(2 * math.pi * math.e) + float(s) for s in self.weights["policy.log_std"])
        return sum(-float((p * np.log(p)).sum()) for p in self._branches(x))

    def kl(self, other: Model, x: np.ndarray) -> float:
        """KL(self || other)."""
        if self.kind == "box":
            (m, n), (s, u) = (
                [each._linear("policy", x) for each in (self, other)],
                [np.exp(each.weights["policy.log_std"]) for each in (self, other)],
            )
            return float((np.log(u / s) + (s**2 + (m - n) ** 2) / (2 * u**2) - 0.5).sum())
        return sum(float((p * np.log(p / q)).sum()) for p, q in zip(self._branches(x), other._branches(x)))


class Table:
    """A batch as python reads it, row by row."""

    def __init__(self, batch: Unroll):
        self.obs, self.action = batch.obs["obs"].double().numpy(), batch.action.numpy()
        self.reward, self.mu = batch.reward.double().numpy(), np.exp(batch.logp.double().numpy())
        self.term, self.trunc = batch.terminated.numpy(), batch.truncated.numpy()
        self.live = rows_of(batch)
        self.length = len(self.reward)

    def span(self, t: int, b: int) -> range:
        """Rows from t to the end of its episode, or of the unroll."""
        for k in range(t, self.length):
            if self.term[k, b] or self.trunc[k, b]:
                return range(t, k + 1)
        return range(t, self.length)

    def bootstrap(self, model: Model, t: int, b: int) -> float:
        """Value behind row t: nothing behind a termination."""
        return 0.0 if self.term[t, b] else model.value(self.obs[t + 1, b])

    def ratio(self, model: Model, t: int, b: int) -> float:
        return math.exp(model.logp(self.obs[t, b], self.action[t, b])) / self.mu[t, b]

    def lambda_advantage(self, model: Model, t: int, b: int, gamma: float, lam: float) -> float:
        """The mixture of all n-step returns, minus the value: (1 - lam) sum lam^(n-1) G^n + lam^(N-1) G^N."""
        span, total, mixture = self.span(t, b), 0.0, 0.0
        for n, k in enumerate(span, start=1):
            total += gamma ** (n - 1) * self.reward[k, b]
            nstep = total + gamma**n * self.bootstrap(model, k, b)
            mixture += (1 - lam if n < len(span) else 1.0) * lam ** (n - 1) * nstep
        return mixture - model.value(self.obs[t, b])

    def vtrace(
        self, model: Model, t: int, b: int, gamma: float, lam: float, clips: tuple[float, float, float],
        ratio: Callable[[int, int], float],
    ) -> tuple[float, float]:  # fmt: skip
        """The paper's sums, without recursion: the value target of a row, and its advantage for the policy gradient."""
        rho, c, pg = clips
        span = self.span(t, b)

        def target(start: int) -> float:
            total = model.value(self.obs[start, b])
            for k in range(start, span.stop):
                trace = math.prod(lam * min(c, ratio(i, b)) for i in range(start, k))
                now, then = model.value(self.obs[k, b]), self.bootstrap(model, k, b)
                delta = min(rho, ratio(k, b)) * (self.reward[k, b] + gamma * then - now)
                total += gamma ** (k - start) * trace * delta
            return total

        behind = self.bootstrap(model, t, b)
        if t + 1 < span.stop:
            behind = lam * target(t + 1) + (1 - lam) * behind
        advantage = min(pg, ratio(t, b)) * (self.reward[t, b] + gamma * behind - model.value(self.obs[t, b]))
        return target(t), advantage


def check_gradients(nets: Nets, loss: torch.Tensor, expected: Callable[[Model], float], now: Model) -> None:
    """The gradient of a loss is the slope of a function of the weights, by central differences."""
    named = [(name, p) for name, p in nets.named_parameters() if p.requires_grad]
    gradients = torch.autograd.grad(loss, [p for _, p in named])
    for (name, _), gradient in zip(named, gradients):
        for at in np.ndindex(gradient.shape):
            slope = (expected(now.shifted(name, at, 1e-5)) - expected(now.shifted(name, at, -1e-5))) / 2e-5
            assert gradient[at].item() == pytest.approx(slope, rel=1e-6, abs=1e-8), (name, at)


def repeated(batch: Unroll, times: int = 2) -> Unroll:
    """The same unrolls several times, as lanes."""
    twice = tree.map_fields(batch, lambda x: torch.cat([x] * times, 1 if x.dim() > 1 else 0))
    return tree.replace(twice, lane=torch.arange(len(twice.lane)))


def with_junk(batch: Unroll) -> Unroll:
    """Another action, log-probability and reward in the rows that are not live."""
    dead = ~batch.live
    assert dead.any()
    other = batch.action.flip(0).roll(1, 1)
    mask = dead.view(*dead.shape, *[1] * (other.dim() - 2))
    return tree.replace(
        batch,
        action=torch.where(mask, other, batch.action),
        logp=torch.where(dead, batch.logp - 3.0, batch.logp),
        reward=torch.where(dead, 1e4, batch.reward),
    )


# Rigs that act


def rig(
    kind: type[ActorCritic], config: Any, lanes: Callable[[], Lanes] = ScriptedLanes, net: NetConfig = CORES["none"],
    actors: int = 1, seed: int = 7, shake: float = 0.3,
) -> Rig:  # fmt: skip
    """As `support_lanes.build`, for any actor-critic; a batch is one unroll of every actor."""
    made = [lanes() for _ in range(actors)]
    learner = learner_of(kind, config, net, made[0].spec, sum(each.count for each in made), seed, shake)
    algorithm: Any = learner.algorithm
    workers = [Actor(algorithm, learner.nets, each, seed, index) for index, each in enumerate(made)]
    shapes = unroll_shapes(made[0].spec, algorithm.plan(), made[0].count, algorithm.initial_state(learner.nets, 1))
    for actor in workers:
        actor.reset()
    return Rig(algorithm, learner, workers, [empty_unroll(shapes) for _ in workers], RoundQueue(actors))


def learner_of(
    kind: type[ActorCritic], config: Any, net: NetConfig, spec: EnvSpec, lanes: int, seed: int = 7, shake: float = 0.3,
    reduce: Reduce = ALONE,
) -> Learner:  # fmt: skip
    learner = Learner(kind(config, net, spec, lanes), seed, reduce=reduce)
    shaken(learner, shake)
    return learner


def log_ratio(rig: Rig, batch: Unroll) -> torch.Tensor:
    """log pi - log mu of every live row of whole unrolls, step by step as an actor would compute it."""
    nets, state, found = rig.learner.nets, tree.map(lambda x: x[0], batch.state0), []
    with torch.no_grad():
        for t in range(len(batch.live)):
            obs = nets["normalizer"](tree.map(lambda x: x[t], batch.obs))  # noqa: B023
            features, state = nets["body"].step(obs, state)
            found.append(nets["policy"].logp_entropy(nets["policy"](features), batch.action[t])[0])
            keep = batch.live[t].view(-1, 1, 1)
            state = tree.map(lambda x: x * keep, state)  # noqa: B023
    return (torch.stack(found) - batch.logp)[batch.live]


def part_of(batch: Unroll, rank: int, size: int) -> Unroll:
    """The lanes of one of several ranks."""
    count = batch.reward.shape[1] // size
    own = slice(rank * count, (rank + 1) * count)
    return tree.map_fields(batch, lambda x: (x[:, own] if x.dim() > 1 else x[own]).clone())
