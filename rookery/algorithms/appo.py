"""Asynchronous PPO: PPO's clipped objective on data of older policies; with a circular buffer it is IMPACT.

Three policies meet (Luo et al. 2020, arXiv:1912.00167): the one that acted (mu), the one that learns (pi), and a target
that follows it slowly. The trust region is around the target, not around each stale mu: the objective clips

    ratio = min(mu / target, ratio_clip) · pi / mu

and advantages and value targets come from V-trace with respect to the target. With `correction gae` there is no target:
plain PPO on data that may be a few versions old. A target that is copied before every update (`target_period` 1) needs
no network of its own. `circular` keeps the last batches and trains on each of them several times.

Not here: who acts and how far ahead (`tables/queue.py`), the circular buffer (`tables/circular.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from rookery.algorithms.actor_critic import ActorCritic
from rookery.algorithms.impala import check_clips
from rookery.core import tree
from rookery.core.config import AutoencoderConfig, AuxConfig, NetConfig, QueueConfig
from rookery.core.errors import UsageError
from rookery.core.ranges import Count, NotNegative, Positive, Share, Whole
from rookery.core.reduce import Reduce
from rookery.core.types import Circular, DataPlan, EnvSpec, LossOutput, Queue, Tree
from rookery.core.unroll import Unroll
from rookery.nets import build
from rookery.nets.modules import Nets
from rookery.nets.target import KLCoefficient, copy_nets, target_of
from rookery.nets.work import multiply_adds
from rookery.ops import moments
from rookery.ops.policy import clip_fraction, clipped_surrogate, kl_estimate, masked_mean, truncated_logp
from rookery.ops.returns import discounts, gae, vtrace
from rookery.ops.schedule import linear
from rookery.ops.value import explained_variance, value_loss


@dataclass(frozen=True)
class CircularConfig:
    """A buffer of batches that are trained on several times."""

    batches: Whole = 0  # batches kept; 0: none, each batch is trained on once
    uses: Count = 2  # updates on each of them at most


@dataclass(frozen=True)
class APPOConfig:
    unroll: Count = 50  # steps per environment and unroll
    chunk: Count = 25  # rows per training sequence with a recurrent core
    queue: QueueConfig = field(default_factory=QueueConfig)  # how far actors run ahead, and replay
    circular: CircularConfig = field(default_factory=CircularConfig)  # IMPACT's buffer
    epochs: Count = 1  # passes over a batch
    minibatches: Count = 1  # pieces per pass
    correction: Literal["vtrace", "gae"] = "vtrace"  # of the advantages
    gamma: Share = 0.99  # discount
    lam: Share = 1.0  # of V-trace, or of GAE
    rho_clip: Positive = 1.0  # V-trace's clip of the ratio in the values' errors
    c_clip: Positive = 1.0  # V-trace's clip of the ratio in the traces; at most rho_clip
    ratio_clip: Positive = 2.0  # bound of mu / target in the objective
    target_period: Count = 1  # updates between two copies to the target
    clip: Positive = 0.4  # PPO's clip of the ratio
    clip_end: NotNegative | None = None  # clip at the end of the run, reached linearly; none: constant
    kl: NotNegative = 0.0  # weight of KL(target, pi) in the loss
    kl_target: Positive | None = None  # the weight adapts so that the KL stays near this; none: it is constant
    lr: NotNegative = 5e-4  # the optimiser's step size
    lr_end: NotNegative = 0.0  # step size at the end of the run, reached linearly
    optimizer: Literal["adam", "rmsprop"] = "adam"  # rmsprop is TensorFlow's
    optimizer_eps: NotNegative = 1e-5  # the optimiser's epsilon; under the root for rmsprop
    decay: Share = 0.99  # of rmsprop's mean square
    value_coef: NotNegative = 0.5  # weight of the value loss
    entropy: NotNegative = 0.01  # weight of the entropy bonus
    entropy_end: NotNegative | None = None  # weight at the end of the run, reached linearly; none: constant
    max_grad_norm: Positive = 0.5  # clip of the gradient's norm
    normalize_advantage: bool = True  # zero mean, unit deviation over the batch
    scale_reward: bool = False  # divide rewards by the running deviation of the discounted return
    aux: AuxConfig = field(default_factory=AuxConfig)  # auxiliary tasks
    autoencoder: AutoencoderConfig = field(default_factory=AutoencoderConfig)  # of the policy's observations


@dataclass(frozen=True)
class APPOBatch:
    """What the losses need, either flat [N, ...] or as sequences [S, N, ...]."""

    obs: Tree
    action: torch.Tensor
    logp: torch.Tensor  # denominator of the clipped ratio: that of the target, or of mu where mu is much more likely
    advantage: torch.Tensor
    value_target: torch.Tensor
    weight: torch.Tensor  # 1 for live rows
    state: Tree  # recurrent state before the first row, [N, ...]
    reset: torch.Tensor | None  # rows before which the state is zeroed; None without recurrence
    target: Tree  # parameters of the target policy, if a loss needs them
    unrolls: Unroll | None = None  # for auxiliary tasks


class APPO(ActorCritic):
    Config = APPOConfig
    not_remote = "it makes several passes over a batch"

    def __init__(self, config: APPOConfig, net: NetConfig, spec: EnvSpec, lanes: int):
        super().__init__(config, net, spec, lanes)
        check_clips(config.rho_clip, config.c_clip)
        self.corrects = config.queue.replayed > 0 or config.circular.batches > 0
        if self.recurrent and config.unroll % config.chunk:
            below = config.unroll // config.chunk * config.chunk
            some = f"{below} or {below + config.chunk}" if below else str(config.chunk)
            raise UsageError(
                f"algo.unroll {config.unroll} is not a multiple of algo.chunk {config.chunk}; use algo.unroll {some}"
            )
        if config.circular.batches and (config.queue.replayed or (self.auxiliary.tasks and config.aux.replayed)):
            raise UsageError(
                "algo.circular trains on whole batches again and replays no unrolls beside them; set "
                "algo.circular.batches, or algo.queue.replayed and algo.aux.replayed, to 0"
            )
        if config.kl_target is not None and not config.kl:
            raise UsageError("algo.kl_target adapts the weight algo.kl, which is 0; start it at 1, for example")
        # Its own network only if it differs from the policy at the start of an update.
        self.slow_target = config.correction == "vtrace" and config.target_period > 1
        self.clip = torch.tensor(config.clip)  # a tensor, like `entropy`
        self._kl = torch.zeros(2)  # of the last minibatch: sum over its live rows, and their number

    def nets(self) -> Nets:
        nets = super().nets()
        if self.slow_target:
            nets["target"] = target_of(nets, ("body", "policy"))
        nets["kl"] = KLCoefficient(self.config.kl)
        return nets

    def plan(self) -> DataPlan:
        config = self.config
        chunk = config.chunk if self.recurrent else config.unroll
        table: Any = self.queue_plan(config.queue)
        if config.circular.batches:
            assert isinstance(table, Queue)
            table = Circular(table, config.circular.batches, config.circular.uses)
        return DataPlan(config.unroll, chunk, table)

    # Learning

    @torch.no_grad()
    def prepare(self, nets: Nets, batch: Unroll, reduce: Reduce) -> APPOBatch:
        config = self.config
        tasks = tree.replace(batch, reward=self.scaled_reward(nets, batch, reduce))
        batch = self.own(tasks)
        reward, weight = batch.reward, batch.live.to(torch.float32)
        params, value = self._evaluated(nets, batch)
        discount, continues = discounts(batch.terminated, batch.truncated, config.gamma, value.dtype, batch.live)
        target_logp, _ = nets["policy"].logp_entropy(_as_params(params), batch.action)
        log_rho = target_logp - batch.logp
        if config.correction == "vtrace":
            traced = vtrace(
                log_rho, reward, discount, continues, value, config.lam, config.rho_clip, config.c_clip, 1.0
            )
            advantage, value_target = traced.pg_advantage, traced.vs
            logp = truncated_logp(target_logp, batch.logp, config.ratio_clip)
        else:
            advantage = gae(reward, discount, continues, value, config.lam)
            value_target, logp = advantage + value[:-1], batch.logp
        if config.normalize_advantage:
            pooled = moments.pooled(advantage, weight, reduce.sum)
            advantage = moments.normalized(advantage, None, pooled.mean, moments.variance(pooled))
        pool = reduce.sum if reduce.size > 1 else None
        self._facts = {
            "explained_variance": explained_variance(value[:-1], value_target, weight, pool),
            "rho": masked_mean(log_rho.exp(), weight),
            "rho_clipped": masked_mean((log_rho.exp() > config.rho_clip).float(), weight),
            "lag_kl": masked_mean(kl_estimate(target_logp, batch.logp), weight),
        }
        # A copy: a Gaussian's deviation may be a view of the parameter, which moves between the passes.
        target = tree.map(torch.clone, params) if config.kl else {}
        prepared = APPOBatch(
            obs=tree.map(lambda x: x[:-1], batch.obs), action=batch.action, logp=logp, advantage=advantage,
            value_target=value_target, weight=weight, state=batch.state0, reset=None,
            target=target, unrolls=tasks if self.auxiliary.tasks else None,
        )  # fmt: skip
        return self.as_pieces(prepared)

    def _evaluated(self, nets: Nets, batch: Unroll) -> tuple[Tree, torch.Tensor]:
        """Parameters of the target policy for the T rows, as a tree of [T, B, ...], and values of T + 1, [T+1, B].

        With a core every chunk begins with the state that was stored for it, as in the losses. States carried on from
        the unroll's start by newer weights would differ from those, and the ratio would not start at 1.
        """
        rows = self.config.chunk
        chunks = _chunks(batch, rows) if self.recurrent and rows < len(batch.live) else batch
        params, value, _ = self.forward(nets, chunks)
        if self.slow_target:
            target = nets["target"]
            params = self.policy_of(nets["normalizer"], target["body"], target["policy"], chunks)
        lanes = batch.live.shape[1]
        whole = tree.map(lambda x: _whole(x, lanes), _as_tree(params))
        return whole, torch.cat([_whole(value[:-1], lanes), value[-1:, -lanes:]])

    def minibatches(self, batch: APPOBatch, rng: torch.Generator, reduce: Reduce) -> Iterator[APPOBatch | None]:
        config = self.config
        per_lane = config.unroll // (config.chunk if self.recurrent else 1)
        pieces = batch.logp.shape[-1] * reduce.size
        if pieces < config.minibatches:
            what = "chunks" if self.recurrent else "steps"
            raise UsageError(
                f"a batch of {pieces} {what} cannot be cut into {config.minibatches} minibatches; use "
                f"algo.minibatches {pieces} or less, or larger batches"
            )
        for piece in self.pieces(batch, per_lane, config.minibatches, config.epochs, rng, reduce):
            self._kl = torch.zeros(2, device=batch.logp.device)  # a rank may have no row in this one
            yield piece

    def losses(self, nets: Nets, batch: APPOBatch) -> LossOutput:
        config, head = self.config, nets["policy"]
        params, value, code = build.policy_value_sequence(nets, batch.obs, batch.state, batch.reset)
        new_logp, entropy = head.logp_entropy(params, batch.action)
        clip = self.clip.to(value.device)

        policy = masked_mean(clipped_surrogate(new_logp, batch.logp, batch.advantage, clip), batch.weight)
        error = masked_mean(value_loss(value, batch.value_target), batch.weight)
        bonus = masked_mean(entropy, batch.weight)
        loss = policy + config.value_coef * error - self.entropy * bonus
        metrics = {"policy_loss": policy, "value_loss": error, "entropy": bonus}
        live = batch.weight.sum()
        if config.kl:
            kl = masked_mean(head.kl(_as_params(batch.target), params), batch.weight)
            loss = loss + nets["kl"].value * kl
            self._kl = torch.stack([kl.detach() * live, live])
            metrics |= {"kl": kl, "kl_coef": nets["kl"].value.clone()}  # as it is now: it adapts in place
        with torch.no_grad():
            if not config.kl:
                metrics["kl"] = masked_mean(kl_estimate(new_logp, batch.logp), batch.weight)
            metrics["clip_fraction"] = masked_mean(clip_fraction(new_logp, batch.logp, clip), batch.weight)
        reconstruction, told = self.auxiliary.reconstruction(nets, code, batch.obs, batch.weight)
        side, more = (0.0, {}) if batch.unrolls is None else self.auxiliary.losses(nets, batch.unrolls)
        metrics = {name: x.detach() for name, x in metrics.items()} | self._facts | told | more
        return LossOutput({"all": loss + reconstruction + side}, metrics, weight=live)

    def after_update(self, nets: Nets, version: int) -> None:
        super().after_update(nets, version)
        if self.slow_target and version % self.config.target_period == 0:
            copy_nets(nets, nets["target"])

    def observe(self, nets: Nets, batch: Unroll, reduce: Reduce) -> None:
        super().observe(nets, batch, reduce)
        if self.config.kl_target is not None:
            total, rows = reduce.sum(self._kl).tolist()
            if rows:
                nets["kl"].adapt(total / rows, self.config.kl_target)

    def work(self, nets: Nets) -> float:
        rows = self.config.unroll * self.lanes / self.config.minibatches
        return multiply_adds(self.spec, rows, nets.parameters())

    def schedule(self, progress: float) -> dict[str, float]:
        config = self.config
        self.clip.fill_(linear(config.clip, config.clip if config.clip_end is None else config.clip_end, progress))
        return super().schedule(progress)


def _as_tree(params: Any) -> Tree:
    """Parameters of a policy (a tensor or several) as a tree."""
    return {str(i): x for i, x in enumerate(params)} if isinstance(params, tuple) else {"0": params}


def _as_params(target: Tree) -> Any:
    return tuple(target.values()) if len(target) > 1 else target["0"]


def _chunks(batch: Unroll, rows: int) -> Unroll:
    """Every chunk of `rows` rows as an unroll of its own: chunk c of lane b becomes lane c·B + b, as in `as_pieces`."""
    count = len(batch.live) // rows

    def cut(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(0, (count, rows)).transpose(0, 1).flatten(1, 2)

    def overlapping(x: torch.Tensor) -> torch.Tensor:
        """[T+1, B, ...] -> [rows + 1, C·B, ...]: the last row of a chunk is the first of the next."""
        return torch.cat([x[c * rows : (c + 1) * rows + 1] for c in range(count)], 1)

    return tree.replace(
        batch, obs=tree.map(overlapping, batch.obs), live=cut(batch.live),
        state0=tree.map(lambda x: x.flatten(0, 1).unsqueeze(0), batch.state0),
    )  # fmt: skip


def _whole(x: torch.Tensor, lanes: int) -> torch.Tensor:
    """What belongs to chunks, [S, C·B, ...], in the order of unrolls: [T, B, ...]."""
    return x.unflatten(1, (-1, lanes)).transpose(0, 1).flatten(0, 1)
