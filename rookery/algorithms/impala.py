"""IMPALA (Espeholt et al. 2018, arXiv:1802.01561): an actor-critic that learns from what older policies did.

Actors run ahead of the learner; V-trace (section 4.1) corrects values and advantages for the policy that acted, whose
log-probabilities travel with the data. One pass over each batch. With `queue.replayed` unrolls of earlier batches are
trained on beside the new ones (section 5.2.2).

Losses are means over the live rows of a batch, the paper's are sums: a gradient here is the paper's divided by the N
live rows. So its clip of 40 is 40 / N here, RMSProp's epsilon of 0.1 is 0.1 / N², and its mean square starts at 1 / N²
instead of 1 (rows of the Atari preset: 32 unrolls of 20). `correct False` leaves the correction out, for comparison.

Not here: who acts, how far actors run ahead (`tables/queue.py`), and how gradients are averaged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import nn

from rookery.algorithms.actor_critic import ActorCritic
from rookery.core import tree
from rookery.core.config import AutoencoderConfig, AuxConfig, NetConfig, QueueConfig
from rookery.core.errors import UsageError
from rookery.core.ranges import Count, NotNegative, Positive, Share
from rookery.core.reduce import Reduce
from rookery.core.types import DataPlan, EnvSpec, LossOutput
from rookery.core.unroll import Unroll
from rookery.nets.modules import Nets
from rookery.nets.optimizer import Optimizer
from rookery.nets.optimizers import make_optimizer
from rookery.nets.work import multiply_adds
from rookery.ops.policy import kl_estimate, masked_mean
from rookery.ops.returns import discounts, vtrace
from rookery.ops.value import explained_variance, value_loss


@dataclass(frozen=True)
class IMPALAConfig:
    unroll: Count = 20  # steps per environment and unroll
    queue: QueueConfig = field(default_factory=QueueConfig)  # how far actors run ahead, and replay
    gamma: Share = 0.99  # discount
    lam: Share = 1.0  # V-trace's lambda
    rho_clip: Positive = 1.0  # clip of the ratio in the values' errors: decides which policy's values are learnt
    c_clip: Positive = 1.0  # clip of the ratio in the traces: decides how fast; at most rho_clip
    pg_rho_clip: Positive = 1.0  # clip of the ratio in the policy gradient
    correct: bool = True  # False: all ratios are taken as 1, as if the data were on-policy
    optimizer: Literal["adam", "rmsprop"] = "rmsprop"  # rmsprop is TensorFlow's
    lr: NotNegative = 6e-4  # the optimiser's step size
    lr_end: NotNegative = 0.0  # step size at the end of the run, reached linearly
    optimizer_eps: NotNegative = 2.5e-7  # the optimiser's epsilon; under the root for rmsprop
    decay: Share = 0.99  # of rmsprop's mean square
    square_start: NotNegative = 2.5e-6  # of that mean square: the 1 of a sum over 640 rows
    value_coef: NotNegative = 0.5  # weight of the value loss
    entropy: NotNegative = 0.01  # weight of the entropy bonus
    entropy_end: NotNegative | None = None  # weight at the end of the run, reached linearly; none: constant
    max_grad_norm: Positive = 0.0625  # clip of the gradient's norm
    scale_reward: bool = False  # divide rewards by the running deviation of the discounted return
    aux: AuxConfig = field(default_factory=AuxConfig)  # auxiliary tasks
    autoencoder: AutoencoderConfig = field(default_factory=AutoencoderConfig)  # of the policy's observations


class IMPALA(ActorCritic):
    Config = IMPALAConfig

    def __init__(self, config: IMPALAConfig, net: NetConfig, spec: EnvSpec, lanes: int):
        super().__init__(config, net, spec, lanes)
        check_clips(config.rho_clip, config.c_clip)
        self.corrects = config.queue.replayed > 0

    def plan(self) -> DataPlan:
        return DataPlan(self.config.unroll, self.config.unroll, self.queue_plan(self.config.queue))

    def prepare(self, nets: Nets, batch: Unroll, reduce: Reduce) -> Unroll:
        return replace(batch, reward=self.scaled_reward(nets, batch, reduce))

    def losses(self, nets: Nets, batch: Unroll) -> LossOutput:
        config = self.config
        tasks, batch = batch, self.own(batch)
        params, value, code = self.forward(nets, batch)
        logp, entropy = nets["policy"].logp_entropy(params, batch.action)
        log_rho = logp.detach() - batch.logp
        traced = vtrace(
            log_rho if config.correct else torch.zeros_like(log_rho), batch.reward,
            *discounts(batch.terminated, batch.truncated, config.gamma, value.dtype, batch.live),
            value.detach(), config.lam, config.rho_clip, config.c_clip, config.pg_rho_clip,
        )  # fmt: skip
        value = value[:-1]

        policy = masked_mean(-logp * traced.pg_advantage, batch.live)
        error = masked_mean(value_loss(value, traced.vs), batch.live)
        bonus = masked_mean(entropy, batch.live)
        loss = policy + config.value_coef * error - self.entropy * bonus
        reconstruction, told = self.auxiliary.reconstruction(
            nets, code, tree.map(lambda x: x[:-1], batch.obs), batch.live
        )
        side, more = self.auxiliary.losses(nets, tasks)
        with torch.no_grad():
            metrics = {
                "policy_loss": policy, "value_loss": error, "entropy": bonus,
                "kl": masked_mean(kl_estimate(logp, batch.logp), batch.live),
                "rho": masked_mean(log_rho.exp(), batch.live),
                "rho_clipped": masked_mean((log_rho > math.log(config.rho_clip)).float(), batch.live),
                "explained_variance": explained_variance(value, traced.vs, batch.live),
            }  # fmt: skip
        metrics = {name: x.detach() for name, x in metrics.items()} | told | more
        return LossOutput({"all": loss + reconstruction + side}, metrics, weight=batch.live.sum())

    def optimizer(self, parameter: nn.Parameter) -> Optimizer:
        c = self.config
        return make_optimizer(c.optimizer, parameter, c.lr, c.optimizer_eps, c.decay, start=c.square_start)

    def work(self, nets: Nets) -> float:
        return multiply_adds(self.spec, self.config.unroll * self.lanes, nets.parameters())


def check_clips(rho_clip: float, c_clip: float) -> None:
    if rho_clip < c_clip:
        raise UsageError(
            f"algo.c_clip {c_clip:g} must be at most algo.rho_clip {rho_clip:g} (V-trace); use algo.c_clip {rho_clip:g}"
        )
