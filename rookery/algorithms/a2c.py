"""Advantage actor-critic (Mnih et al. 2016, arXiv:1602.01783, algorithm 3): one gradient of each short unroll.

The return of a row runs to the end of its episode or unroll and is bootstrapped there; `lam` below 1 makes it a
lambda-return (GAE). Synchronous it is A2C; with workers that send gradients (`async_grads`) it is A3C.

Losses are means over the live rows of a batch. The paper sums over an unroll: a gradient here is the paper's divided by
the N live rows, so its clip of 40 is 40 / N here, and RMSProp's epsilon of 0.1 is 0.1 / N².

Not here: who collects the batch, and what happens to the gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from torch import nn

from rookery.algorithms.actor_critic import ActorCritic
from rookery.core import tree
from rookery.core.config import AutoencoderConfig, AuxConfig, QueueConfig
from rookery.core.ranges import Count, NotNegative, Positive, Share
from rookery.core.reduce import Reduce
from rookery.core.types import DataPlan, LossOutput
from rookery.core.unroll import Unroll
from rookery.nets.modules import Nets
from rookery.nets.optimizer import Optimizer
from rookery.nets.optimizers import make_optimizer
from rookery.nets.work import multiply_adds
from rookery.ops.policy import masked_mean
from rookery.ops.returns import discounts, gae
from rookery.ops.value import explained_variance, value_loss


@dataclass(frozen=True)
class A2CConfig:
    unroll: Count = 5  # steps per environment and update
    gamma: Share = 0.99  # discount
    lam: Share = 1.0  # 1: returns to the end of the unroll, as in the paper; below: GAE
    optimizer: Literal["adam", "rmsprop"] = "rmsprop"  # rmsprop is TensorFlow's
    lr: NotNegative = 7e-4  # the optimiser's step size
    lr_end: NotNegative = 0.0  # step size at the end of the run, reached linearly
    optimizer_eps: NotNegative = 1e-5  # the optimiser's epsilon; under the root for rmsprop
    decay: Share = 0.99  # of rmsprop's mean square
    square_start: NotNegative = 1.0  # of that mean square: 1 as in TensorFlow; smaller for means of what was a sum
    value_coef: NotNegative = 0.5  # weight of the value loss
    entropy: NotNegative = 0.01  # weight of the entropy bonus
    entropy_end: NotNegative | None = None  # weight at the end of the run, reached linearly; none: constant
    max_grad_norm: Positive = 0.5  # clip of the gradient's norm
    scale_reward: bool = False  # divide rewards by the running deviation of the discounted return
    aux: AuxConfig = field(default_factory=AuxConfig)  # auxiliary tasks
    autoencoder: AutoencoderConfig = field(default_factory=AutoencoderConfig)  # of the policy's observations


class A2C(ActorCritic):
    Config = A2CConfig

    def plan(self) -> DataPlan:
        return DataPlan(self.config.unroll, self.config.unroll, self.queue_plan(QueueConfig(lag=0)))

    def prepare(self, nets: Nets, batch: Unroll, reduce: Reduce) -> Unroll:
        return replace(batch, reward=self.scaled_reward(nets, batch, reduce))

    def losses(self, nets: Nets, batch: Unroll) -> LossOutput:
        config = self.config
        tasks, batch = batch, self.own(batch)
        params, value, code = self.forward(nets, batch)
        logp, entropy = nets["policy"].logp_entropy(params, batch.action)
        discount, continues = discounts(batch.terminated, batch.truncated, config.gamma, live=batch.live)
        advantage = gae(batch.reward, discount, continues, value.detach(), config.lam)
        value = value[:-1]
        target = advantage + value.detach()

        policy = masked_mean(-logp * advantage, batch.live)
        error = masked_mean(value_loss(value, target), batch.live)
        bonus = masked_mean(entropy, batch.live)
        loss = policy + config.value_coef * error - self.entropy * bonus
        reconstruction, told = self.auxiliary.reconstruction(
            nets, code, tree.map(lambda x: x[:-1], batch.obs), batch.live
        )
        side, more = self.auxiliary.losses(nets, tasks)
        explained = explained_variance(value.detach(), target, batch.live)
        metrics = {"policy_loss": policy, "value_loss": error, "entropy": bonus, "explained_variance": explained}
        metrics = {name: x.detach() for name, x in metrics.items()} | told | more
        return LossOutput({"all": loss + reconstruction + side}, metrics, weight=batch.live.sum())

    def optimizer(self, parameter: nn.Parameter) -> Optimizer:
        c = self.config
        return make_optimizer(c.optimizer, parameter, c.lr, c.optimizer_eps, c.decay, start=c.square_start)

    def work(self, nets: Nets) -> float:
        return multiply_adds(self.spec, self.config.unroll * self.lanes, nets.parameters())
