"""What actor-critic algorithms share: their networks, how they act, and the order in which they visit a batch.

How each of them learns is in its own file: `ppo.py`, `a2c.py`, `impala.py`, `appo.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from rookery.algorithms import auxiliary
from rookery.algorithms.auxiliary import Auxiliary, columns
from rookery.algorithms.base import Algorithm
from rookery.core import tree
from rookery.core.config import NetConfig, QueueConfig
from rookery.core.reduce import Reduce
from rookery.core.types import ActOutput, EnvSpec, Explore, Mix, Queue, Tree
from rookery.core.unroll import Unroll
from rookery.core.wording import setting
from rookery.nets import build
from rookery.nets.core import resets
from rookery.nets.flat import FlatParams
from rookery.nets.modules import Nets
from rookery.nets.normalize import RewardScaler
from rookery.nets.optimizer import Optimizer
from rookery.nets.optimizers import make_optimizer
from rookery.nets.quick import Quick, QuickPolicy
from rookery.ops.schedule import linear
from rookery.ops.shuffle import own_pieces, without_dead

OWN = ("state", "unrolls")  # fields of a batch that are not cut like the others


class ActorCritic(Algorithm):
    """A policy and a value, and auxiliary losses.

    `config` has the fields gamma, scale_reward, max_grad_norm, lr, lr_end, entropy, entropy_end, aux and autoencoder.
    """

    corrects = False  # whether the policy may learn from what older ones did
    groups = {"all": ("body", "policy", "value_body", "value", *auxiliary.NETS)}  # noqa: RUF012 - constant

    def __init__(self, config: Any, net: NetConfig, spec: EnvSpec, lanes: int):
        super().__init__(config, net, spec, lanes)
        self.recurrent = net.core != "none"
        self.shared = build.is_shared(spec, net)
        self.published = ("normalizer", "body", "policy")
        self.max_grad_norm = config.max_grad_norm
        self._quick = Quick(QuickPolicy)  # small policies act through numpy
        # A tensor, not a number: schedules change it, and a compiled loss would be compiled again for each number.
        self.entropy = torch.tensor(config.entropy)
        self.auxiliary = Auxiliary(config.aux, config.autoencoder, spec, config.gamma, config.unroll)
        self._encoder = 0  # floats of the encoder: the first of the flat parameters
        self._frozen = False
        self._kept: torch.Tensor | None = None  # the frozen encoder
        self._parameters: dict[str, nn.Parameter] = {}
        self._optimizers: dict[str, Optimizer] = {}
        if config.scale_reward and not self.not_remote:
            self.not_remote = f"the applier sees no rewards to scale; use {setting('algo.scale_reward', False)}"

    def nets(self) -> Nets:
        autoencoder = self.config.autoencoder
        nets = build.actor_critic(self.spec, self.net, autoencoder.latent if autoencoder.on else 0)
        self.auxiliary.add_nets(nets)
        encoder = [nets["body"].torso, nets["body"].latent]
        self._encoder = FlatParams.room(module for module in encoder if module is not None)
        nets["reward_scaler"] = RewardScaler(self.lanes, self.config.gamma, self.config.scale_reward)
        return nets

    def initial_state(self, nets: Nets, lanes: int) -> Tree:
        return nets["body"].initial(lanes)

    def store_values(self) -> None:
        """Have actors store values with their actions, if policy and value share features: nearly free there."""
        if self.shared:
            self.published = (*self.published, "value")

    @property
    def stored(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """The extra columns of an unroll."""
        return {"value": ((), "float32")} if "value" in self.published else {}

    # Acting

    def act(self, nets: Nets, obs: Tree, state: Tree, explore: Explore | None) -> ActOutput:
        if quick := self._quick.of(nets):
            action, logp = quick.act(obs, None if explore is None else explore.rng)
            return ActOutput(action, logp, state)
        features, state = nets["body"].step(nets["normalizer"].forward(obs), state)
        head = nets["policy"]
        params = head.params(features, obs)
        action, logp = head.mode(params) if explore is None else head.sample(params, explore.rng)
        extras = {"value": nets["value"](features)} if "value" in self.published else {}
        return ActOutput(action, logp, state, extras)

    def quantities(self, nets: Nets, obs: Tree, state: Tree, output: ActOutput) -> dict[str, torch.Tensor]:
        seen = nets["normalizer"].forward(obs)
        body, memory = (nets["value_body"], {}) if "value_body" in nets else (nets["body"], state)
        return {"logp": torch.as_tensor(output.logp), "value": nets["value"](body.step(seen, memory)[0])}

    # Learning

    def queue_plan(self, queue: QueueConfig) -> Queue | Mix:
        """A queue, with unrolls of earlier batches if the policy or auxiliary tasks are to learn from them."""
        aux = self.config.aux
        plan = Queue(queue.lag, queue.batch, queue.loaders, queue.buffers)
        if queue.replayed:
            return Mix(plan, queue.replayed, queue.ring)
        return Mix(plan, aux.replayed, aux.ring, config="algo.aux") if self.auxiliary.tasks and aux.replayed else plan

    def own(self, batch: Unroll) -> Unroll:
        """What the policy's own loss is computed on: not on unrolls that were replayed for auxiliary tasks only."""
        if batch.replayed is None or self.corrects:
            return batch
        return columns(batch, ~batch.replayed)

    def scaled_reward(self, nets: Nets, batch: Unroll, reduce: Reduce) -> torch.Tensor:
        """Rewards as they are learnt from, [T, B]."""
        nets["body"].frozen = self._frozen
        ends = batch.terminated | batch.truncated
        return nets["reward_scaler"](batch.reward, ends, batch.live, batch.lane, reduce, batch.replayed)

    def forward(self, nets: Nets, batch: Unroll) -> build.Forward:
        """Policy parameters of the T rows of whole unrolls, and values of T + 1."""
        reset = resets(batch.live) if self.recurrent else None
        return build.unroll_policy_value(nets, batch.obs, tree.map(lambda x: x[0], batch.state0), reset)

    def policy_of(self, normalizer: Any, body: Any, policy: Any, batch: Unroll) -> Any:
        """Parameters of another policy than the one that learns, for the T rows of whole unrolls."""
        obs = normalizer(tree.map(lambda x: x[:-1], batch.obs))
        reset = resets(batch.live)[:-1] if self.recurrent else None
        return policy.params(body.sequence(obs, tree.map(lambda x: x[0], batch.state0), reset)[0], batch.obs)

    def as_pieces(self, batch: Any) -> Any:
        """What `minibatches` shuffles: steps [N, ...], or with recurrence sequences of `chunk` rows, [S, N, ...].

        `batch` is a dataclass of tensors [T, B, ...] with weight, state [C, B, ...], reset (None) and unrolls.
        Chunk c of lane b becomes sequence c·B + b, as in the stored states.
        """
        if not self.recurrent:
            return tree.map_fields(batch, lambda x: x.flatten(0, 1), skip=("unrolls",))
        rows = self.config.chunk

        def cut(x: torch.Tensor) -> torch.Tensor:
            return x.unflatten(0, (-1, rows)).transpose(0, 1).flatten(1, 2)

        chunks = tree.map_fields(batch, cut, skip=("state", "reset", "unrolls"))
        reset = resets(chunks.weight.bool())[:-1]
        return tree.replace(chunks, state=tree.map(lambda x: x.flatten(0, 1), batch.state), reset=reset)

    def pieces(
        self, batch: Any, per_lane: int, minibatches: int, epochs: int, rng: torch.Generator, reduce: Reduce
    ) -> Iterator[Any]:
        """Shuffled minibatches, epoch by epoch. The last axis of `batch.logp` counts the pieces (steps or sequences).

        The pieces of all ranks are permuted; of each minibatch a rank gets those of its lanes, or None. Where many
        pieces have no live row (unrolls that were cut short) these are left out.
        """
        axis = batch.logp.dim() - 1
        alive = batch.weight.bool().reshape(-1, batch.logp.shape[axis]).any(0).cpu()
        for _ in range(epochs):
            unrolls = batch.unrolls  # for auxiliary tasks: with the first piece of each pass
            order = torch.randperm(batch.logp.shape[axis] * reduce.size, generator=rng)
            order, sizes = own_pieces(order, per_lane, minibatches, reduce.rank, reduce.size)
            order, sizes = without_dead(order, sizes, alive)
            order, start = order.to(batch.logp.device), 0
            shuffled = tree.map_fields(batch, lambda x: x.index_select(axis, order), skip=OWN)  # noqa: B023
            shuffled = tree.replace(shuffled, state=tree.map(lambda x: x.index_select(0, order), batch.state))  # noqa: B023
            for size in sizes:
                if size == 0:
                    yield None
                    continue
                piece = tree.map_fields(shuffled, lambda x: x.narrow(axis, start, size), skip=OWN)  # noqa: B023
                state = tree.map(lambda x: x.narrow(0, start, size), shuffled.state)  # noqa: B023
                yield tree.replace(piece, state=state, unrolls=unrolls)
                start, unrolls = start + size, None

    def observe(self, nets: Nets, batch: Unroll, reduce: Reduce) -> None:
        # After, not before: all epochs must see the statistics the actors saw, or the ratio does not start at 1.
        live = batch.live if batch.replayed is None else batch.live & ~batch.replayed
        nets["normalizer"].update(tree.map(lambda x: x[:-1], batch.obs), live, reduce)

    def after_update(self, nets: Nets, version: int) -> None:
        if self._kept is not None:  # a gradient that a worker has sent before it was frozen moves the encoder
            self._encoder_floats().copy_(self._kept)

    def optimizers(self, parameters: dict[str, nn.Parameter]) -> dict[str, Optimizer]:
        self._parameters = parameters
        self._optimizers = {name: self.optimizer(parameter) for name, parameter in parameters.items()}
        return self._optimizers

    def optimizer(self, parameter: nn.Parameter) -> Optimizer:
        c = self.config
        return make_optimizer(c.optimizer, parameter, c.lr, c.optimizer_eps, c.decay)

    def schedule(self, progress: float) -> dict[str, float]:
        config = self.config
        end = config.entropy if config.entropy_end is None else config.entropy_end
        self.entropy.fill_(linear(config.entropy, end, progress))
        if config.autoencoder.on and config.autoencoder.freeze < 1 and progress >= config.autoencoder.freeze:
            self._freeze()
        return {"all": linear(config.lr, config.lr_end, progress)}

    def _freeze(self) -> None:
        """The encoder stays as it is from now on: no gradient, and no momentum left of earlier ones."""
        if not self._frozen and self._parameters:
            self._kept = self._encoder_floats().clone()
        self._frozen = True
        for optimizer in self._optimizers.values():
            for state in optimizer.state.values():
                if "exp_avg" in state:
                    state["exp_avg"][: self._encoder].zero_()

    def _encoder_floats(self) -> torch.Tensor:
        return self._parameters["all"].detach()[: self._encoder]
