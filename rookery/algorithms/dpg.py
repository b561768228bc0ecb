"""Deterministic policy gradients: DDPG (Lillicrap et al. 2015, arXiv:1509.02971), Ape-X DPG (Horgan et al. 2018,
arXiv:1803.00933, appendix D) and D4PG (Barth-Maron et al. 2018, arXiv:1804.08617), feed-forward and recurrent.

The critic learns the n-step return of state and action, bootstrapped with the target critic at the target policy's
action; the policy ascends the critic, with dq/da clipped. The return is a mean (half squared error), a categorical
(cross-entropy with the projected target) or a mixture of Gaussians (cross-entropy with points of the target).

Priorities are |target's mean - Q|, whatever the critic: in the units of the return, so that what actors estimate from
two numbers per step and what the learner computes agree. Importance weights apply to the critic's loss only.

A dimension of the action without finite bounds is passed on as it is: the policy's reach there is [-1, 1].

Not here: who acts and where items are kept. Also not here: twin critics, policy delay, entropy (TD3, SAC).

Deviates: the policy learns on an item's own observation (DDPG; Acme's D4PG takes the next one). A mixture's target is
a few stratified samples of each component where the paper samples the whole: less noise from fewer points.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from rookery.algorithms.base import Algorithm
from rookery.algorithms.replayed import ClippedReturns, observe_items
from rookery.core.config import NetConfig, ReplayConfig
from rookery.core.errors import UsageError
from rookery.core.ranges import Count, NotNegative, Part, Positive, Share, Whole
from rookery.core.reduce import Reduce
from rookery.core.types import ActOutput, DataPlan, EnvSpec, Explore, LossOutput, Replay, Sequences, Transitions, Tree
from rookery.nets import critic as heads
from rookery.nets.adam import FlatAdam
from rookery.nets.core import resets
from rookery.nets.critic import Activation, Critic, DeterministicPolicy, RandomStart
from rookery.nets.modules import Nets
from rookery.nets.normalize import ObsNormalizer
from rookery.nets.optimizer import Optimizer
from rookery.nets.work import multiply_adds
from rookery.ops.distributional import (
    Mixture,
    categorical_cross_entropy,
    mass_at_ends,
    mixture_cross_entropy,
    mixture_mean,
    mixture_points,
    project,
    stratified_normal,
)
from rookery.ops.noise import noise_ladder, ornstein_uhlenbeck
from rookery.ops.priority import mixed
from rookery.ops.qlearning import nstep
from rookery.ops.returns import discounts
from rookery.ops.slope import clipped_slope
from rookery.ops.value import value_loss

POINTS = 4  # that stand for each component of a target mixture
MEMORY = ReplayConfig(min_size=1_000, batch=256, samples_per_insert=32.0)  # Acme's D4PG


@dataclass(frozen=True)
class DPGConfig:
    unroll: Count = 4  # steps per environment between two looks of an actor at its surroundings
    replay: ReplayConfig = field(default_factory=lambda: MEMORY)  # the memory
    gamma: Share = 0.99  # discount
    n_step: Count = 5  # steps before the bootstrap
    critic: Literal["scalar", "categorical", "mixture"] = "categorical"  # what is known of the return
    atoms: Whole = 51  # of a categorical critic
    v_min: float = -150.0  # lowest return: first atom; start and unit of a mixture
    v_max: float = 150.0  # highest return
    components: Count = 5  # Gaussians of a mixture
    actor_lr: NotNegative = 1e-4  # Adam's step size, policy
    critic_lr: NotNegative = 1e-4  # Adam's step size, critic
    critic_l2: NotNegative = 0.0  # penalty on the critic's weights (half the sum of squares)
    adam_eps: NotNegative = 1e-8  # Adam's epsilon
    clip_action_gradient: Literal["none", "element", "norm"] = "norm"  # how dq/da is clipped: Ape-X element, D4PG norm
    action_gradient_bound: Positive = 1.0  # to what
    max_grad_norm: Positive = 40.0  # clip of the gradient's norm, policy and critic each
    noise: Literal["gaussian", "ou"] = "gaussian"  # of actions: independent, or drifting (DDPG)
    noise_scale: NotNegative = 0.3  # deviation of the noise; actions span [-1, 1]
    noise_ladder: bool = False  # environments explore less and less, from noise_scale down to 1/32 of it
    ou_theta: Part = 0.15  # share of drifting noise that is forgotten in each step
    random_start: bool = False  # uniformly random actions until the first update
    target_period: Whole = 100  # updates between two copies to the target networks; 0: follow softly
    tau: Part = 0.005  # share of the way the target networks follow in each update, if target_period is 0
    actor_hidden: tuple[Count, ...] = (300, 200)  # layers of the policy
    critic_hidden: tuple[Count, ...] = (400, 300)  # layers of the critic
    layer_norm: bool = True  # the first layer is linear, LayerNorm, tanh
    activation: Activation = "relu"  # of the other layers
    second_torso: tuple[str, ...] = ()  # observations that get a torso of their own (parkour networks); none: standard
    refresh: Whole = 0  # steps of an actor process between two looks at the weights; 0, or taking turns: every unroll
    sequence: Count = 20  # rows trained on per item, with a recurrent core
    burn_in: Whole = 10  # rows before them that only warm the recurrent state up
    overlap: Whole = 10  # rows that a sequence shares with the next one
    eta: Share = 0.9  # weight of the largest error in a sequence's priority, against the mean


@dataclass(frozen=True)
class DPGBatch:
    items: Transitions | Sequences
    normal: torch.Tensor | None  # [R, POINTS] where a mixture's target is looked at; None with other critics


@dataclass(frozen=True)
class Rows:
    """What the losses need, R rows of transitions or of sequences alike."""

    seen: torch.Tensor  # [R, F] the critic's features
    known: torch.Tensor  # [R, F'] the policy's features
    action: torch.Tensor  # [R, A] taken
    reward: torch.Tensor  # [R] of up to n steps
    discount: torch.Tensor  # [R] behind them
    target: Any  # the target critic's parameters behind them
    weight: torch.Tensor  # [R] importance, as a share of the batch
    share: torch.Tensor  # [R] the same without importance: adds up to 1
    count: int | torch.Tensor  # rows that have a share


class DPG(Algorithm):
    Config = DPGConfig
    groups = {"actor": ("policy",), "critic": ("critic",)}  # noqa: RUF012 - constant
    not_remote = "the target networks of a worker would not follow"

    def __init__(self, config: DPGConfig, net: NetConfig, spec: EnvSpec, lanes: int):
        super().__init__(config, net, spec, lanes)
        _check(config, net, spec)
        self.recurrent = net.core != "none"
        self.estimates = config.replay.start == "actor"  # actors estimate priorities
        # A recurrent critic has a state, which only acting can bring to where an item begins.
        with_critic = ("critic",) if self.recurrent or self.estimates else ()
        self.published = ("normalizer", "random_start", "policy", *with_critic)
        self.max_grad_norm = config.max_grad_norm
        ladder = noise_ladder(lanes, config.noise_scale)
        self._scales = ladder if config.noise_ladder else torch.full_like(ladder, config.noise_scale)
        self._scale: tuple[Any, torch.Tensor] = (None, ladder)  # of the environments that acted last
        self._clipped_returns = ClippedReturns(config.v_min, config.v_max)

    def nets(self) -> Nets:
        config = self.config
        common = (config.layer_norm, config.activation, config.second_torso)
        nets = Nets({"normalizer": ObsNormalizer(self.spec, self.net.normalize_obs)})
        if config.random_start:
            nets["random_start"] = RandomStart()
        nets["policy"] = DeterministicPolicy(self.spec, self.net, config.actor_hidden, *common)
        nets["critic"] = Critic(self.spec, self.net, config.critic_hidden, self._head, *common)
        for name in ("policy", "critic"):
            nets[f"target_{name}"] = deepcopy(nets[name]).requires_grad_(False)
        return nets

    def _head(self, inputs: int) -> nn.Module:
        config = self.config
        if config.critic == "scalar":
            return heads.ScalarHead(inputs)
        if config.critic == "categorical":
            return heads.CategoricalHead(inputs, config.atoms, config.v_min, config.v_max)
        return heads.MixtureHead(inputs, config.components, config.v_min, config.v_max)

    def plan(self) -> DataPlan:
        config = self.config
        table = Replay(config.replay, config.gamma, config.n_step, refresh=config.refresh)
        if self.recurrent:
            table = replace(table, sequence=config.sequence, burn_in=config.burn_in, overlap=config.overlap)
        extras = {"q": ((), "float32"), "q_max": ((), "float32")} if self.estimates else {}
        return DataPlan(config.unroll, 1 if self.recurrent else config.unroll, table, extras)

    def initial_state(self, nets: Nets, lanes: int) -> Tree:
        state = {name: nets[name].initial(lanes) for name in ("policy", "critic")} if self.recurrent else {}
        return state | ({"noise": torch.zeros(lanes, self.spec.action.size)} if self.config.noise == "ou" else {})

    # Acting

    @torch.no_grad()
    def act(self, nets: Nets, obs: Tree, state: Tree, explore: Explore | None) -> ActOutput:
        obs, policy, critic = nets["normalizer"](obs), nets["policy"], nets["critic"]
        known, policy_state = policy.step(obs, state.get("policy", {}))
        greedy = policy.action(known)
        new_state = state | {"policy": policy_state} if self.recurrent else state
        action, extras = greedy, {}
        if explore is not None:
            action, new_state = self._explored(nets, greedy, new_state, explore)
        if self.recurrent or (self.estimates and explore is not None):
            seen, critic_state = critic.step(obs, state.get("critic", {}))
            if self.recurrent:
                new_state = new_state | {"critic": critic_state}
            if self.estimates and explore is not None:
                both = critic.mean(critic.value(torch.cat([seen, seen]), torch.cat([action, greedy])))
                extras = dict(zip(("q", "q_max"), both.chunk(2)))
        return ActOutput(action, np.zeros(len(action), np.float32), new_state, extras)

    def quantities(self, nets: Nets, obs: Tree, state: Tree, output: ActOutput) -> dict[str, torch.Tensor]:
        obs, policy, critic = nets["normalizer"](obs), nets["policy"], nets["critic"]
        seen, known = (net.step(obs, state.get(name, {}))[0] for name, net in (("critic", critic), ("policy", policy)))
        actions = {"q": torch.as_tensor(output.action), "value": policy.action(known)}
        return {name: critic.mean(critic.value(seen, action)) for name, action in actions.items()}

    def _explored(self, nets: Nets, greedy: torch.Tensor, state: Tree, explore: Explore) -> tuple[torch.Tensor, Tree]:
        """The action taken, always within [-1, 1], and the state with the noise that goes on."""
        if self.config.random_start and nets["random_start"].on:
            return torch.rand(greedy.shape, generator=explore.rng) * 2 - 1, state
        if self._scale[0] is not explore.lane:
            self._scale = (explore.lane, self._scales[explore.lane].unsqueeze(1))
        scale, noise = self._scale[1], torch.randn(greedy.shape, generator=explore.rng)
        if self.config.noise == "gaussian":
            return torch.addcmul(greedy, noise, scale).clamp_(-1, 1), state
        noise = ornstein_uhlenbeck(state["noise"], self.config.ou_theta, scale, noise)
        return (greedy + noise).clamp_(-1, 1), state | {"noise": noise}

    def start_priorities(self, items: dict[str, np.ndarray]) -> np.ndarray | None:
        if not self.estimates:
            return None
        if not self.recurrent:
            target = items["reward"] + items["discount"] * items["next_q_max"]
            return np.abs(self._held(target) - items["q"])
        names = ("reward", "terminated", "truncated", "live", "q", "q_max")
        reward, terminated, truncated, live, q, best = (torch.from_numpy(items[name]).T for name in names)  # [S, M]
        steps = nstep(reward, *discounts(terminated, truncated, self.config.gamma), self.config.n_step)
        value = torch.cat([best, torch.from_numpy(items["next_q_max"]).unsqueeze(0)])
        size = (self._held(steps.reward + steps.discount * value.gather(0, steps.row)) - q).abs()
        trained = slice(self.config.burn_in, None)
        return mixed(size[trained], live[trained], self.config.eta).numpy()

    def _held(self, target: Any) -> Any:
        """Within what a categorical critic can say."""
        return target.clip(self.config.v_min, self.config.v_max) if self.config.critic == "categorical" else target

    # Learning

    def minibatches(self, batch: Transitions | Sequences, rng: torch.Generator, reduce: Reduce) -> Iterator[DPGBatch]:
        normal = None
        if self.config.critic == "mixture":  # drawn for the rows of all ranks, as if one had them all
            rows = batch.reward[self.config.burn_in :] if self.recurrent else batch.reward.unsqueeze(0)
            drawn = torch.rand(len(rows), reduce.size, rows.shape[1], POINTS, generator=rng)
            normal = stratified_normal(drawn[:, reduce.rank].flatten(0, 1)).to(batch.reward.device)
        yield DPGBatch(batch, normal)

    def losses(self, nets: Nets, batch: DPGBatch) -> LossOutput:
        config, critic, items = self.config, nets["critic"], batch.items
        rows = self._sequences(nets, items) if isinstance(items, Sequences) else self._transitions(nets, items)
        params = critic.value(rows.seen, rows.action)
        error, target, metrics = _ERRORS[config.critic](critic.head, params, rows, batch.normal)
        loss = critic_loss = torch.dot(error, rows.weight)
        if config.critic_l2 > 0:
            kernels = [p for p in critic.parameters() if p.dim() > 1]
            loss = loss + 0.5 * config.critic_l2 * sum(p.square().sum() for p in kernels)

        # dq/da is a value here: the policy's loss has it as its slope, and the critic is not part of its graph.
        action = nets["policy"].action(rows.known)
        q_policy, slope = _slope(critic, rows.seen.detach(), action.detach())
        clipped = clipped_slope(slope, config.clip_action_gradient, config.action_gradient_bound)
        actor_loss = -torch.dot((clipped * action).sum(-1), rows.share)
        with torch.no_grad():
            q = critic.mean(params)
            size = (target - q).abs()
            metrics |= {
                "critic_loss": critic_loss.detach(),
                "actor_loss": -torch.dot(q_policy, rows.share),  # what the slope above is the slope of
                "q": torch.dot(q, rows.share),
                "td_error": torch.dot(size, rows.share),
                "action_gradient": torch.dot(torch.linalg.vector_norm(slope, dim=-1), rows.share),
                "action_size": torch.dot(action.detach().abs().mean(-1), rows.share),
            }
        if isinstance(items, Sequences):
            live = items.live[config.burn_in :]
            size = mixed(size.view(live.shape), live, config.eta)
        return LossOutput({"critic": loss, "actor": actor_loss}, metrics, size, weight=rows.count)

    def _transitions(self, nets: Nets, batch: Transitions) -> Rows:
        normalizer, count = nets["normalizer"], len(batch.reward)
        obs = normalizer(batch.obs)
        with torch.no_grad():
            later = normalizer(batch.next_obs)
            best = nets["target_policy"].action(nets["target_policy"].step(later, {})[0])
            target = nets["target_critic"].value(nets["target_critic"].step(later, {})[0], best)
        return Rows(
            seen=nets["critic"].step(obs, {})[0], known=nets["policy"].step(obs, {})[0], action=batch.action,
            reward=batch.reward, discount=batch.discount, target=target, weight=batch.weight / count,
            share=torch.full_like(batch.weight, 1 / count), count=count,
        )  # fmt: skip

    def _sequences(self, nets: Nets, batch: Sequences) -> Rows:
        config, trained = self.config, slice(self.config.burn_in, None)
        obs, live = nets["normalizer"](batch.obs), batch.live[trained]
        # The state is reset behind dead rows: an item may begin with rows that it lacks.
        reset = resets(batch.live)

        def features(name: str, state: str) -> torch.Tensor:
            return nets[name].burned_in(obs, batch.state[state], reset, config.burn_in)  # [L+1, N, F]

        with torch.no_grad():
            best = nets["target_policy"].action(features("target_policy", "policy"))
            target = nets["target_critic"].value(features("target_critic", "critic").flatten(0, 1), best.flatten(0, 1))
            factors = discounts(batch.terminated[trained], batch.truncated[trained], config.gamma)
            steps = nstep(batch.reward[trained], *factors, config.n_step)
            lane = torch.arange(live.shape[1], device=live.device)
            target = _select(target, (steps.row * live.shape[1] + lane).flatten())
            share = live / (count := live.sum()).clamp(min=1)
        seen, known = (features(name, name)[:-1].flatten(0, 1) for name in ("critic", "policy"))
        return Rows(
            seen=seen, known=known, action=batch.action[trained].flatten(0, 1), reward=steps.reward.flatten(),
            discount=steps.discount.flatten(), target=target, weight=(share * batch.weight).flatten(),
            share=share.flatten(), count=count,
        )  # fmt: skip

    @torch.no_grad()
    def after_update(self, nets: Nets, version: int) -> None:
        for name in ("policy", "critic"):
            targets, sources = (list(nets[key].parameters()) for key in (f"target_{name}", name))
            if self.config.target_period == 0:
                torch._foreach_lerp_(targets, sources, self.config.tau)
            elif version % self.config.target_period == 0:
                torch._foreach_copy_(targets, sources)
        if self.config.random_start:
            nets["random_start"].flag.zero_()

    def observe(self, nets: Nets, batch: Transitions | Sequences, reduce: Reduce) -> None:
        observe_items(nets["normalizer"], batch, reduce)

    def optimizers(self, parameters: dict[str, nn.Parameter]) -> dict[str, Optimizer]:
        rates = {"actor": self.config.actor_lr, "critic": self.config.critic_lr}
        return {name: FlatAdam(p, rates[name], self.config.adam_eps) for name, p in parameters.items()}

    def work(self, nets: Nets) -> float:
        rows = self.config.replay.batch * (self.config.sequence + self.config.burn_in if self.recurrent else 1)
        return multiply_adds(self.spec, rows, nets.parameters())

    def remarks(self, metrics: dict[str, float]) -> list[str]:
        return self._clipped_returns(metrics)


# The critic's error [R] and the mean of its target [R], by the kind of critic


def _scalar_error(head: heads.ScalarHead, params: torch.Tensor, rows: Rows, normal: None) -> tuple:
    target = torch.addcmul(rows.reward, rows.discount, rows.target)
    return value_loss(params, target), target, {}


def _categorical_error(head: heads.CategoricalHead, params: torch.Tensor, rows: Rows, normal: None) -> tuple:
    target = project(rows.target.softmax(-1), head.atoms, rows.reward, rows.discount)
    # Returns that v_min and v_max have no room for pile up there.
    metrics = {"mass_at_ends": torch.dot(mass_at_ends(target, head.atoms, rows.reward, rows.discount), rows.share)}
    return categorical_cross_entropy(params, target), target @ head.atoms, metrics


def _mixture_error(head: heads.MixtureHead, params: Mixture, rows: Rows, normal: torch.Tensor) -> tuple:
    points = mixture_points(rows.target, rows.reward, rows.discount, normal)
    target = torch.addcmul(rows.reward, rows.discount, mixture_mean(rows.target))
    return mixture_cross_entropy(params, *points), target, {}


_ERRORS: dict[str, Callable[..., tuple]] = {
    "scalar": _scalar_error,
    "categorical": _categorical_error,
    "mixture": _mixture_error,
}


def _slope(critic: Critic, seen: torch.Tensor, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Q [R] at these actions and dq/da [R, A]."""
    with torch.enable_grad():
        q = critic.mean(critic.value(seen, action.requires_grad_()))
        return q.detach(), torch.autograd.grad(q.sum(), action)[0]


def _select(params: torch.Tensor | Mixture, index: torch.Tensor) -> torch.Tensor | Mixture:
    if isinstance(params, Mixture):
        return Mixture(*(x.index_select(0, index) for x in params))
    return params.index_select(0, index)


def _check(config: DPGConfig, net: NetConfig, spec: EnvSpec) -> None:
    if spec.action.kind != "box":
        raise UsageError(
            f"DPG needs continuous (Box) actions, for it follows the slope of the value with respect to the action, "
            f"and {spec.id} has {spec.action.kind} ones; use dqn, rainbow, apex_dqn or ppo there"
        )
    if any(low is None or high is None for low, high in zip(spec.action.low, spec.action.high)):
        warnings.warn(
            f"{spec.id} has actions without bounds; DPG's policy reaches [-1, 1] there and no further. If that is not "
            "enough, rescale them with gymnasium.wrappers.RescaleAction or a wrapper of your own",
            stacklevel=3,
        )
    recurrent, ranged = net.core != "none", config.critic != "scalar"
    for name, fine, must in (
        ("atoms", config.atoms >= 2, "2 or more"),
        ("v_min", config.v_min < config.v_max or not ranged, f"below algo.v_max, {config.v_max}"),
        ("overlap", config.overlap < config.sequence or not recurrent, f"below algo.sequence, {config.sequence}"),
    ):
        if not fine:
            raise UsageError(f"algo.{name} is {getattr(config, name)}; it must be {must}")
