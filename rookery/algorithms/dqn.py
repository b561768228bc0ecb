"""Deep Q-learning (Mnih et al. 2015) with every part that was added to it, each a switch of its own.

Double-Q (van Hasselt et al. 2016), dueling (Wang et al. 2016), n-step returns and prioritised replay with importance
weights (Schaul et al. 2016), a categorical distribution of returns (C51: Bellemare et al. 2017), noisy nets (Fortunato
et al. 2018); all six are Rainbow (Hessel et al. 2018). With many actors, a ladder of epsilons and their own start
priorities it is Ape-X (Horgan et al. 2018); with a recurrent core, stored states, burn-in and value rescaling it is
R2D2 (Kapturowski et al. 2019). Recurrence is a property of the net: with a core the memory holds sequences.

Losses are means over a batch of items; the loss of a sequence is the sum over its rows, as in R2D2. So a learning
rate of a paper that sums (DQN) is the same here only with a normalising optimiser whose epsilon is scaled too.

Not here: the memory (`replay/`), who fills it, and how many learners draw from it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import nn

from rookery.algorithms.base import Algorithm
from rookery.algorithms.replayed import ClippedReturns, observe_items
from rookery.core import tree
from rookery.core.config import NetConfig, ReplayConfig
from rookery.core.errors import UsageError
from rookery.core.ranges import Count, NotNegative, Part, Positive, Share, Whole
from rookery.core.reduce import Reduce
from rookery.core.types import (
    MASK,
    ActOutput,
    DataPlan,
    EnvSpec,
    Explore,
    LossOutput,
    Replay,
    Sequences,
    Transitions,
    Tree,
)
from rookery.nets.core import resets_at_start
from rookery.nets.modules import Nets
from rookery.nets.noisy import factors
from rookery.nets.optimizer import Optimizer
from rookery.nets.optimizers import make_optimizer
from rookery.nets.qnet import ONLINE, QHead, copy_to_targets, q_nets
from rookery.nets.quick import Quick, lowered
from rookery.nets.quick_q import EpsilonGreedy, QuickQ
from rookery.nets.work import multiply_adds
from rookery.ops.distributional import categorical_cross_entropy, mass_at_ends, project
from rookery.ops.explore import epsilon_ladder
from rookery.ops.legal import only_legal
from rookery.ops.priority import mixed
from rookery.ops.qlearning import at_action, huber, nstep, td_target
from rookery.ops.rescale import unrescaled
from rookery.ops.returns import discounts
from rookery.ops.schedule import linear
from rookery.ops.value import value_loss


@dataclass(frozen=True)
class DQNConfig:
    unroll: Count = 4  # steps per environment between two insertions into the memory
    replay: ReplayConfig = field(default_factory=ReplayConfig)  # the memory
    gamma: Share = 0.99  # discount
    n_step: Count = 1  # rewards summed before the value of a later state is trusted
    lr: NotNegative = 6.25e-5  # the optimiser's step size
    lr_end: NotNegative | None = None  # step size at the end of the run, reached linearly; none: constant
    optimizer: Literal["adam", "rmsprop", "adagrad"] = "adam"  # rmsprop is centered and TensorFlow's
    optimizer_eps: NotNegative = 1.5e-4  # the optimiser's epsilon; under the root for rmsprop
    decay: Share = 0.95  # of rmsprop's averages
    momentum: Share = 0.0  # of rmsprop
    max_grad_norm: Positive = 10.0  # clip of the gradient's norm
    double: bool = True  # the online net chooses the next action, the target net values it
    dueling: bool = False  # value and advantages from two streams
    stream: Whole = 0  # units of the hidden layer of the head, or of each stream; 0: none
    shared_bias: bool = False  # one bias for all actions in the last layer (tuned double DQN)
    trunk_scale: bool = False  # multiply the gradient that enters the torso by 1/sqrt(2), for dueling
    atoms: Whole = 0  # atoms of a distribution of returns (C51: 51); 0: values are numbers
    v_min: float = -10.0  # return of the first atom
    v_max: float = 10.0  # return of the last atom
    noisy: bool = False  # the head explores by noise in its weights; set both epsilons to 0 then
    noisy_sigma: Positive = 0.5  # deviation that noisy weights start with, times 1/sqrt(fan-in)
    rescale: bool = False  # learn values on R2D2's scale of square roots, instead of clipping rewards
    loss: Literal["huber", "square"] = "huber"  # of the error; a distribution has the cross-entropy
    huber: Positive = 1.0  # errors beyond this have the gradient of this one
    target_period: Count = 2500  # updates between two copies to the target net
    epsilon_start: Share = 1.0  # share of random actions, until the first update
    epsilon_end: Share = 0.01  # share that it falls to, linearly
    epsilon_share: Part = 0.1  # share of the run over which it falls
    ladder: bool = False  # every environment has an epsilon of its own, constant (Ape-X), instead of the schedule
    ladder_epsilon: Share = 0.4  # the largest of them
    ladder_alpha: NotNegative = 7.0  # the smallest is the largest to the power of 1 + this
    refresh: Whole = 0  # steps of an actor process between two looks at the weights; 0, or taking turns: every unroll
    sequence: Count = 80  # rows trained on per item, with a recurrent core
    burn_in: Whole = 40  # rows before them that only warm the recurrent state up
    overlap: Whole = 40  # rows that a sequence shares with the next one of its episode
    eta: Share = 0.9  # a sequence's priority is eta times its largest error and the rest its mean one


@dataclass(frozen=True)
class QBatch:
    items: Transitions | Sequences
    noise: torch.Tensor | None = None  # [3, K]: of the online pass, of the choice of the next action, of the target


class Rows(NamedTuple):
    """What the losses compare, of N transitions or of L rows of N sequences: leading axes [N] or [L, N]."""

    online: torch.Tensor  # [..., A] values of all actions, or [..., A, Z] logits
    action: torch.Tensor
    reward: torch.Tensor  # n-step sums
    discount: torch.Tensor
    bootstrap: torch.Tensor  # [...] value behind them, or [..., Z] probabilities


class DQN(Algorithm):
    Config = DQNConfig
    groups = {"all": ONLINE}  # noqa: RUF012 - constant
    published = ("normalizer", *ONLINE, "epsilon")

    def __init__(self, config: DQNConfig, net: NetConfig, spec: EnvSpec, lanes: int):
        super().__init__(config, net, spec, lanes)
        self.recurrent = net.core != "none"
        _check(config, spec, self.recurrent)
        self.actions = spec.action.choices[0]
        self.max_grad_norm = config.max_grad_norm
        self.actor_priorities = config.replay.start == "actor"
        self.epsilon = torch.tensor(config.epsilon_start)  # as scheduled; actors see it once it is published
        ladder = epsilon_ladder(lanes, config.ladder_epsilon, config.ladder_alpha).numpy()
        self._ladder = ladder if config.ladder else None
        self._rungs: tuple = (None, None)  # lanes, and their epsilons
        self._quick = Quick(QuickQ)  # small nets act through numpy
        self._greedy = EpsilonGreedy(self.actions)
        self._follows = False  # whether the target nets here come from weights that were pulled
        self._masked = spec.masked
        self._noise = 0  # numbers of noise that the head of `nets` takes
        self._rows, self._logp = np.arange(0), np.zeros(0, np.float32)
        self._clipped_returns = ClippedReturns(config.v_min, config.v_max)

    def nets(self) -> Nets:
        c = self.config
        head = partial(
            QHead, actions=self.actions, stream=c.stream, dueling=c.dueling, trunk_scale=c.trunk_scale,
            shared_bias=c.shared_bias,
            atoms=torch.linspace(c.v_min, c.v_max, c.atoms, device="cpu") if c.atoms else None,
            sigma=c.noisy_sigma if c.noisy else 0.0,
        )  # fmt: skip
        nets = q_nets(self.spec, self.net, head, c.epsilon_start)
        self._noise = nets["q"].noise
        return nets

    def plan(self) -> DataPlan:
        c = self.config
        extras = {"q": ((), "float32"), "q_max": ((), "float32")} if self.actor_priorities else {}
        if not self.recurrent:
            return DataPlan(c.unroll, c.unroll, Replay(c.replay, c.gamma, c.n_step, refresh=c.refresh), extras)
        # The n-step sums of sequences are made when learning, where the rows are.
        table = Replay(c.replay, c.gamma, c.n_step, c.sequence, c.burn_in, c.overlap, c.refresh)
        return DataPlan(c.unroll, 1, table, extras)

    def initial_state(self, nets: Nets, lanes: int) -> Tree:
        return nets["body"].initial(lanes)

    # Acting

    def act(self, nets: Nets, obs: Tree, state: Tree, explore: Explore | None) -> ActOutput:
        noise = None
        if self._noise and explore is not None:  # every environment has a noise of its own
            noise = factors(len(tree.leaves(obs)[0]), self._noise, generator=explore.rng)
        values, state = self._values(nets, obs, state, noise)
        # From here in numpy: for a handful of rows, calls of torch cost more than their arithmetic.
        legal = obs[MASK].numpy() if self._masked else None
        if legal is not None:
            values = lowered(values, legal)
        action = values.argmax(1)
        if explore is not None:
            action = self._greedy(action, self._epsilon(nets, explore), explore.rng, legal)
        if len(self._rows) != len(action):
            self._rows, self._logp = np.arange(len(action)), np.zeros(len(action), np.float32)
        extras = {}
        if self.actor_priorities:
            extras = {"q": torch.from_numpy(values[self._rows, action]), "q_max": torch.from_numpy(values.max(1))}
        return ActOutput(action, self._logp, state, extras)

    def _values(self, nets: Nets, obs: Tree, state: Tree, noise: torch.Tensor | None) -> tuple[np.ndarray, Tree]:
        """Of all actions, [B, A], as they are learnt; and the next recurrent state."""
        if quick := self._quick.of(nets):
            return quick.values(obs, noise), state
        x, state = nets["body"].step(nets["normalizer"].forward(obs), state)
        return nets["q"].means(nets["q"].forward(x, noise)).detach().numpy(), state

    def quantities(self, nets: Nets, obs: Tree, state: Tree, output: ActOutput) -> dict[str, torch.Tensor]:
        q = torch.from_numpy(self._values(nets, obs, state, None)[0])
        if self.config.rescale:
            q = unrescaled(q)
        return {"q": q, "value": (only_legal(q, obs[MASK]) if self._masked else q).amax(1)}

    def _epsilon(self, nets: Nets, explore: Explore) -> float | np.ndarray:
        if self._ladder is None:
            return nets["epsilon"].value.item()
        if self._rungs[0] is not explore.lane:
            self._rungs = (explore.lane, self._ladder[explore.lane])
        return self._rungs[1]

    def start_priorities(self, items: dict[str, np.ndarray]) -> np.ndarray | None:
        """Errors as the actor sees them, from the values it acted by: no network runs."""
        if not self.actor_priorities:
            return None
        c = self.config
        if not self.recurrent:
            columns = ("reward", "discount", "next_q_max", "q")
            reward, discount, behind, q = (torch.from_numpy(items[name]) for name in columns)
            return (td_target(reward, discount, behind, c.rescale) - q).abs_().numpy()
        names = ("reward", "terminated", "truncated", "live", "q", "q_max")
        reward, terminated, truncated, live, q, best = (torch.from_numpy(items[name]).T[c.burn_in :] for name in names)
        behind = torch.cat([best[1:], torch.from_numpy(items["next_q_max"]).unsqueeze(0)])  # of the rows 1 to L
        steps = nstep(reward, *discounts(terminated, truncated, c.gamma), c.n_step)
        target = td_target(steps.reward, steps.discount, behind.gather(0, steps.row - 1), c.rescale)
        return mixed((target - q).abs_(), live, c.eta).numpy()

    # Learning

    def minibatches(self, batch: Transitions | Sequences, rng: torch.Generator, reduce: Reduce) -> Iterator[QBatch]:
        if not self._noise:
            yield QBatch(batch)
        else:
            yield QBatch(batch, factors(3, self._noise, generator=rng).to(batch.weight.device))

    def losses(self, nets: Nets, batch: QBatch) -> LossOutput:
        items, head = batch.items, nets["q"]
        noise = (None, None, None) if batch.noise is None else batch.noise.unbind(0)
        if isinstance(items, Sequences):
            rows = self._sequences(nets, items, noise)
        else:
            rows = self._transitions(nets, items, noise)
        taken = at_action(rows.online, rows.action)
        metrics = {}
        if self.config.atoms:
            target = project(
                rows.bootstrap.flatten(0, -2), head.atoms, rows.reward.flatten(), rows.discount.flatten()
            ).view_as(rows.bootstrap)
            loss = categorical_cross_entropy(taken, target)
            metrics["mass_at_ends"] = mass_at_ends(target, head.atoms, rows.reward, rows.discount)
            # An actor knows errors of means only; what it filed and what is learnt have to be of one kind.
            size = (target @ head.atoms - head.means(taken.detach())).abs_() if self.actor_priorities else loss.detach()
        else:
            target = td_target(rows.reward, rows.discount, rows.bootstrap, self.config.rescale)
            square = self.config.loss == "square"
            loss = value_loss(taken, target) if square else huber(taken, target, self.config.huber)
            size = (target - taken.detach()).abs_()
        metrics |= {"q": head.means(taken.detach()), "error": size}
        if isinstance(items, Sequences):
            live = items.live[self.config.burn_in :]
            weight = live / live.sum().clamp(min=1)
            metrics = {name: (x * weight).sum() for name, x in metrics.items()}
            loss, size = torch.where(live, loss, 0.0).sum(0), mixed(size, live, self.config.eta)
        else:
            metrics = {name: x.mean() for name, x in metrics.items()}
        loss = torch.dot(loss, items.weight) / len(loss)
        metrics["loss"] = loss.detach()
        if self._ladder is None:
            metrics["epsilon"] = nets["epsilon"].value  # what actors have: of an applier, only that is known here
        return LossOutput({"all": loss}, metrics, priorities=size, weight=len(size))

    def _transitions(self, nets: Nets, items: Transitions, noise: tuple) -> Rows:
        normalizer, head = nets["normalizer"], nets["q"]
        online = head(nets["body"].step(normalizer(items.obs), {})[0], noise[0])
        # Not one pass for both observations: the backward pass would be twice as large, and that costs more.
        with torch.no_grad():
            obs = normalizer(items.next_obs)
            target = nets["target_q"](nets["target_body"].step(obs, {})[0], noise[2])
            choice = head(nets["body"].step(obs, {})[0], noise[1]) if self.config.double else target
            legal = items.next_obs[MASK] if self._masked else None
            return Rows(online, items.action, items.reward, items.discount, _bootstrap(head, choice, target, legal))

    def _sequences(self, nets: Nets, items: Sequences, noise: tuple) -> Rows:
        """Both nets start from the stored state and warm up on their own; only rows behind the burn-in are trained."""
        c, head = self.config, nets["q"]
        obs, state = nets["normalizer"](items.obs), items.state
        reset = resets_at_start(items.live)
        with torch.no_grad():
            x, _ = nets["target_body"].sequence(obs, state, reset)
            target = nets["target_q"](x[c.burn_in + 1 :], noise[2])  # of the rows 1 to L, behind each trained one
        x = nets["body"].burned_in(obs, state, reset, c.burn_in)
        if noise[0] is None:
            out = head(x)
            online, choice = out[:-1], out[1:].detach()
        else:
            online, choice = head(x[:-1], noise[0]), head(x[1:].detach(), noise[1]).detach()
        legal = items.obs[MASK][c.burn_in + 1 :] if self._masked else None
        bootstrap = _bootstrap(head, choice if c.double else target, target, legal)
        reward, terminated, truncated = (x[c.burn_in :] for x in (items.reward, items.terminated, items.truncated))
        steps = nstep(reward, *discounts(terminated, truncated, c.gamma), c.n_step)
        row = steps.row - 1
        if c.atoms:
            row = row.unsqueeze(-1).expand_as(bootstrap)
        return Rows(online, items.action[c.burn_in :], steps.reward, steps.discount, bootstrap.gather(0, row))

    def after_update(self, nets: Nets, version: int) -> None:
        if version % self.config.target_period == 0:
            copy_to_targets(nets)
        nets["epsilon"].value.copy_(self.epsilon)

    def observe(self, nets: Nets, batch: Transitions | Sequences, reduce: Reduce) -> None:
        observe_items(nets["normalizer"], batch, reduce)

    def pulled(self, nets: Nets, before: int, now: int) -> None:
        # With the first weights too: until then the target net holds this worker's random start, not the run's weights.
        if not self._follows or before // self.config.target_period != now // self.config.target_period:
            copy_to_targets(nets)
        self._follows = True

    def optimizers(self, parameters: dict[str, nn.Parameter]) -> dict[str, Optimizer]:
        c = self.config
        make = partial(make_optimizer, c.optimizer, lr=c.lr, eps=c.optimizer_eps, decay=c.decay, momentum=c.momentum)
        return {name: make(parameter, centered=True) for name, parameter in parameters.items()}

    def work(self, nets: Nets) -> float:
        rows = self.config.replay.batch * ((self.config.burn_in + self.config.sequence) if self.recurrent else 1)
        return multiply_adds(self.spec, rows, (p for name in ONLINE for p in nets[name].parameters()))

    def schedule(self, progress: float) -> dict[str, float]:
        c = self.config
        self.epsilon.fill_(linear(c.epsilon_start, c.epsilon_end, progress / c.epsilon_share))
        return {"all": linear(c.lr, c.lr if c.lr_end is None else c.lr_end, progress)}

    def remarks(self, metrics: dict[str, float]) -> list[str]:
        return self._clipped_returns(metrics)


def _bootstrap(head: QHead, choice: torch.Tensor, target: torch.Tensor, legal: torch.Tensor | None) -> torch.Tensor:
    """What the target net says of the action that `choice` values most: [...], or probabilities [..., Z].

    `legal` [..., A]: the actions it may be; None: any.
    """
    values = head.means(choice) if legal is None else only_legal(head.means(choice), legal)
    best = at_action(target, values.argmax(-1))
    return best if head.atoms is None else best.softmax(-1)


def _check(config: DQNConfig, spec: EnvSpec, recurrent: bool) -> None:
    """UsageError for what cannot be met, with the fix."""
    if spec.action.kind != "discrete":
        kind = {"box": "continuous (a box)", "multi": "several choices at once (multi)"}[spec.action.kind]
        fix = "for boxes use ddpg, d4pg, apex_dpg or ppo" if spec.action.kind == "box" else "use ppo"
        raise UsageError(f"DQN needs discrete actions, one value each, and those of {spec.id} are {kind}; {fix}")
    if recurrent and config.overlap >= config.sequence:
        raise UsageError(f"algo.overlap {config.overlap} must be less than algo.sequence {config.sequence}")
    if config.atoms and (config.atoms < 2 or config.v_min >= config.v_max):
        raise UsageError(
            f"{config.atoms} atoms from {config.v_min} to {config.v_max} span nothing; use algo.atoms 2 or more, 51 is "
            "usual, with algo.v_min below algo.v_max, or 0 for values that are numbers"
        )
    epsilon = config.ladder_epsilon if config.ladder else max(config.epsilon_start, config.epsilon_end)
    if not config.noisy and epsilon == 0:
        warnings.warn(
            "nothing explores: both epsilons are 0 and algo.noisy is off; set algo.epsilon_start and "
            "algo.epsilon_end, or turn algo.noisy or algo.ladder on",
            stacklevel=3,
        )
    if config.atoms and config.rescale:
        raise UsageError("algo.rescale is for values that are numbers; with algo.atoms choose v_min and v_max instead")
    if config.trunk_scale and not config.dueling:
        raise UsageError("algo.trunk_scale balances the two streams of algo.dueling, which is off; turn one of them")
    if config.shared_bias and (config.dueling or config.noisy or config.atoms):
        raise UsageError("algo.shared_bias is for the plain head; it has no place beside dueling, noisy or atoms")
