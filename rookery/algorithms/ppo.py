"""Proximal policy optimisation (Schulman et al. 2017, arXiv:1707.06347), feed-forward and recurrent.

One update: values and GAE advantages of the whole batch (`prepare`), then epochs of shuffled minibatches of the
clipped surrogate (eq. 7), a value loss and an entropy bonus (eq. 9). With a recurrent core a minibatch is made of
whole chunks of `chunk` rows, each started from the state that was stored when acting (seed 001's way).

With `stretch` > 1 environments may give different numbers of steps to a batch (VER, Wijmans et al. 2022,
arXiv:2210.05064): the rows behind a lane's last step are dead, and each step of a lane with many steps weighs less.

Not here: who collects the batch, on how many machines, and how gradients are averaged.

Deviates: advantages are normalised once over the whole batch, not per minibatch, so that the statistics are the same
however the batch is cut or spread over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from rookery.algorithms.actor_critic import ActorCritic
from rookery.core import tree
from rookery.core.config import AutoencoderConfig, AuxConfig, NetConfig, QueueConfig
from rookery.core.errors import UsageError
from rookery.core.ranges import Count, NotNegative, Positive, Share
from rookery.core.reduce import ALONE, Reduce
from rookery.core.types import DataPlan, EnvSpec, LossOutput, Tree
from rookery.core.unroll import Unroll
from rookery.nets import build
from rookery.nets.adam import FlatAdam
from rookery.nets.core import resets
from rookery.nets.modules import Nets
from rookery.nets.optimizer import Optimizer
from rookery.nets.work import multiply_adds
from rookery.ops import moments
from rookery.ops.policy import clip_fraction, clipped_surrogate, kl_estimate
from rookery.ops.returns import discounts, gae
from rookery.ops.schedule import linear
from rookery.ops.value import clipped_value_loss, explained_variance, value_loss


@dataclass(frozen=True)
class PPOConfig:
    unroll: Count = 128  # steps per environment and update
    stretch: Count = 1  # an environment may give up to this many times `unroll` steps to one batch (VER); 1: all alike
    chunk: Count = 16  # rows per training sequence with a recurrent core
    epochs: Count = 4  # passes over a batch
    minibatches: Count = 4  # pieces per pass
    lr: NotNegative = 2.5e-4  # Adam's step size
    lr_end: NotNegative = 0.0  # step size at the end of the run, reached linearly
    adam_eps: NotNegative = 1e-5  # Adam's epsilon
    gamma: Share = 0.99  # discount
    lam: Share = 0.95  # GAE's lambda
    clip: Positive = 0.2  # ratio clip, eq. 7
    clip_end: NotNegative | None = None  # clip at the end of the run, reached linearly; none: constant
    value_clip: Positive | None = None  # clip of the value's change; none: plain squared error
    value_coef: NotNegative = 0.5  # weight of the value loss
    entropy: NotNegative = 0.01  # weight of the entropy bonus
    entropy_end: NotNegative | None = None  # weight at the end of the run, reached linearly; none: constant
    max_grad_norm: Positive = 0.5  # clip of the gradient's norm
    normalize_advantage: bool = True  # zero mean, unit deviation over the batch
    target_kl: Positive | None = None  # ends an update once the policy has moved this far
    scale_reward: bool = False  # divide rewards by the running deviation of the discounted return
    aux: AuxConfig = field(default_factory=AuxConfig)  # auxiliary tasks
    autoencoder: AutoencoderConfig = field(default_factory=AutoencoderConfig)  # of the policy's observations


@dataclass(frozen=True)
class PPOBatch:
    """What the losses need, either flat [N, ...] or as sequences [S, N, ...]."""

    obs: Tree
    action: torch.Tensor
    logp: torch.Tensor
    advantage: torch.Tensor
    target: torch.Tensor  # of the value
    value: torch.Tensor  # before the update
    weight: torch.Tensor  # of live rows: 1, or less in lanes that gave more steps than others; 0 for the others
    state: Tree  # recurrent state before the first row, [N, ...]
    reset: torch.Tensor | None  # rows before which the state is zeroed; None without recurrence
    unrolls: Unroll | None = None  # for auxiliary tasks


class PPO(ActorCritic):
    Config = PPOConfig
    not_remote = "it makes several passes over a batch"

    def __init__(self, config: PPOConfig, net: NetConfig, spec: EnvSpec, lanes: int):
        super().__init__(config, net, spec, lanes)
        self.store_values()
        self.stop_above = math.inf if config.target_kl is None else config.target_kl
        self.clip = torch.tensor(config.clip)  # a tensor, like `entropy`
        rows = config.unroll * lanes
        if self.recurrent and config.unroll % config.chunk:
            raise UsageError(f"algo.unroll {config.unroll} is not a multiple of algo.chunk {config.chunk}")
        pieces = rows // config.chunk if self.recurrent else rows
        if pieces % config.minibatches:
            what = "chunks" if self.recurrent else "steps"
            raise UsageError(
                f"a batch of {pieces} {what} cannot be cut into {config.minibatches} equal minibatches; change "
                f"algo.minibatches, algo.unroll or the number of environments ({lanes})"
            )

    def plan(self) -> DataPlan:
        config = self.config
        rows, steps = config.unroll * config.stretch, config.unroll if config.stretch > 1 else 0
        chunk = config.chunk if self.recurrent else rows
        return DataPlan(rows, chunk, self.queue_plan(QueueConfig(lag=0)), self.stored, steps)

    # Learning

    @torch.no_grad()
    def prepare(self, nets: Nets, batch: Unroll, reduce: Reduce) -> PPOBatch:
        config = self.config
        batch = self._narrowed(batch, reduce)
        tasks = tree.replace(batch, reward=self.scaled_reward(nets, batch, reduce))
        batch = self.own(tasks)
        value = self._values(nets, batch)  # [T+1, B]
        discount, continues = discounts(batch.terminated, batch.truncated, config.gamma, live=batch.live)
        advantage = gae(batch.reward, discount, continues, value, config.lam)
        target = advantage + value[:-1]
        live = batch.live.to(torch.float32)
        weight = live if config.stretch == 1 else experience_weight(live, config.unroll)
        if config.normalize_advantage:
            pooled = moments.pooled(advantage, live, reduce.sum)
            advantage = moments.normalized(advantage, None, pooled.mean, moments.variance(pooled))
        pool = reduce.sum if reduce.size > 1 else None
        self._explained = explained_variance(value[:-1], target, live, pool)
        prepared = PPOBatch(
            obs=tree.map(lambda x: x[:-1], batch.obs), action=batch.action, logp=batch.logp, advantage=advantage,
            target=target, value=value[:-1], weight=weight, state=batch.state0, reset=None,
            unrolls=tasks if self.auxiliary.tasks else None,
        )  # fmt: skip
        return self.as_pieces(prepared)

    def _narrowed(self, batch: Unroll, reduce: Reduce = ALONE) -> Unroll:
        """Without the rows that no lane of any rank has used, in whole chunks; `unroll` rows at least."""
        config = self.config
        if config.stretch == 1:
            return batch
        chunk = config.chunk if self.recurrent else 1
        used = int(batch.live.any(1).nonzero().max()) + 1 if batch.live.any() else 0
        more = -(-max(0, used - config.unroll) // chunk)  # chunks beyond `unroll`
        if reduce.size > 1:  # all ranks shuffle as many pieces: the largest number of them
            votes = torch.zeros((config.stretch - 1) * config.unroll // chunk + 1, device=batch.live.device)
            votes[more] = 1.0
            more = int(reduce.sum(votes).nonzero().max())
        rows = config.unroll + more * chunk
        chunks = tree.map(lambda x: x[: rows // chunk], batch.state0)
        obs = tree.map(lambda x: x[: rows + 1], batch.obs)
        cut = tree.map_fields(batch, lambda x: x[:rows], skip=("obs", "state0", "version", "lane", "replayed"))
        return tree.replace(cut, obs=obs, state0=chunks)

    def observe(self, nets: Nets, batch: Unroll, reduce: Reduce) -> None:
        super().observe(nets, self._narrowed(batch), reduce)

    def _values(self, nets: Nets, batch: Unroll) -> torch.Tensor:
        """Values of all T+1 rows; those stored when acting are used where there are any."""
        if "value" not in batch.extras:
            return build.policy_value_sequence(nets, batch.obs, {}, None, want_policy=False).value
        if self.recurrent:  # the last chunk once more, for the state behind its last row
            rows = self.config.chunk
            tail = tree.map(lambda x: x[-1 - rows :], batch.obs)
            state = tree.map(lambda x: x[-1], batch.state0)
            reset = resets(batch.live[-rows:])
        else:
            tail, state, reset = tree.map(lambda x: x[-1:], batch.obs), {}, None
        last = build.policy_value_sequence(nets, tail, state, reset, want_policy=False).value
        return torch.cat([batch.extras["value"], last[-1:]])

    def minibatches(self, batch: PPOBatch, rng: torch.Generator, reduce: Reduce) -> Iterator[PPOBatch | None]:
        config = self.config
        per_lane = batch.logp.shape[-1] * reduce.size // self.lanes
        return self.pieces(batch, per_lane, config.minibatches, config.epochs, rng, reduce)

    def losses(self, nets: Nets, batch: PPOBatch) -> LossOutput:
        config = self.config
        params, value, code = build.policy_value_sequence(nets, batch.obs, batch.state, batch.reset)
        new_logp, entropy = nets["policy"].logp_entropy(params, batch.action)
        clip = self.clip.to(value.device)

        # Rows that are not live weigh nothing. All losses are sums of weighted rows over the number of live ones: where
        # weights are below 1, a lane with many steps counts less than its share of the rows, and no other counts more.
        alive = batch.weight.ne(0).to(batch.weight.dtype)
        live = alive.sum()
        weight = (batch.weight / live.clamp(min=1)).flatten()

        def mean(x: torch.Tensor) -> torch.Tensor:
            return torch.dot(x.flatten(), weight)

        policy = mean(clipped_surrogate(new_logp, batch.logp, batch.advantage, clip))
        if config.value_clip is None:
            error = mean(value_loss(value, batch.target))
        else:
            error = mean(clipped_value_loss(value, batch.value, batch.target, config.value_clip))
        bonus = mean(entropy)
        loss = policy + config.value_coef * error - self.entropy * bonus
        with torch.no_grad():
            weight = (alive / live.clamp(min=1)).flatten()  # what is only looked at: every live row alike
            kl = mean(kl_estimate(new_logp, batch.logp))
            clipped = mean(clip_fraction(new_logp, batch.logp, clip))
        metrics = {"policy_loss": policy, "value_loss": error, "entropy": bonus, "kl": kl, "clip_fraction": clipped,
                   "explained_variance": self._explained}  # fmt: skip
        reconstruction, told = self.auxiliary.reconstruction(nets, code, batch.obs, batch.weight)
        side, more = (0.0, {}) if batch.unrolls is None else self.auxiliary.losses(nets, batch.unrolls)
        metrics = {name: x.detach() for name, x in metrics.items()} | told | more
        return LossOutput({"all": loss + reconstruction + side}, metrics, stop=kl, weight=live)

    def optimizer(self, parameter: nn.Parameter) -> Optimizer:
        return FlatAdam(parameter, self.config.lr, self.config.adam_eps)

    def work(self, nets: Nets) -> float:
        rows = self.config.unroll * self.lanes / self.config.minibatches
        return multiply_adds(self.spec, rows, nets.parameters())

    def schedule(self, progress: float) -> dict[str, float]:
        config = self.config
        self.clip.fill_(linear(config.clip, config.clip if config.clip_end is None else config.clip_end, progress))
        return super().schedule(progress)


def experience_weight(live: torch.Tensor, unroll: int) -> torch.Tensor:
    """Weights of rows [T, B]: min(1, (unroll + 1) / n) in a lane with n live rows, 0 where a row is not live.

    Fast environments would otherwise be learnt from more often than slow ones: so the steps of no environment weigh
    more than `unroll` + 1 in all.
    """
    return live * ((unroll + 1) / live.sum(0).clamp(min=1)).clamp(max=1)
