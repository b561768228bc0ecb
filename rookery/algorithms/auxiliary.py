"""Losses beside that of the policy: UNREAL's auxiliary tasks, and the reconstruction of an auto-encoder.

Pixel control, reward prediction and value replay (Jaderberg et al. 2017, arXiv:1611.05397) are learnt from unrolls that
were replayed, if there are any, else from the new ones; all of them shape the features that the policy reads. The
reconstruction (Luo et al. 2019) is of the observations that the policy's own loss is computed on. Heads and decoder are
never published to actors. Every actor-critic uses this one class; the mathematics is in `ops/auxiliary.py`.

Deviates: the recurrent state of a replayed unroll starts as it was stored, the paper's starts from zeros. Rewarding
rows are weighed, not drawn.
"""

from __future__ import annotations

from typing import Any

import torch

from rookery.core import tree
from rookery.core.config import AutoencoderConfig, AuxConfig
from rookery.core.errors import UsageError
from rookery.core.types import MASK, EnvSpec, Tree
from rookery.core.unroll import Unroll
from rookery.nets.autoencoder import Decoder
from rookery.nets.auxiliary import PixelControlHead, RewardHead
from rookery.nets.cnn import layout
from rookery.nets.core import resets
from rookery.nets.modules import Nets
from rookery.ops.auxiliary import (
    balanced_weight,
    pixel_change,
    pixel_control_loss,
    pixel_control_target,
    reward_prediction_loss,
)
from rookery.ops.legal import only_legal
from rookery.ops.policy import masked_mean
from rookery.ops.returns import discounts, nstep_return
from rookery.ops.value import value_loss

NETS = ("decoder", "pixel_control", "reward_prediction")  # trained with the policy, never sent to actors
FRAMES = 3  # observations that a reward is predicted from

Losses = tuple[torch.Tensor | float, dict[str, torch.Tensor]]  # their sum, and metrics


class Auxiliary:
    def __init__(self, aux: AuxConfig, autoencoder: AutoencoderConfig, spec: EnvSpec, gamma: float, unroll: int):
        self.aux, self.autoencoder, self.spec, self.gamma = aux, autoencoder, spec, gamma
        self.tasks = aux.pixel_control > 0 or aux.reward_prediction > 0 or aux.value_replay > 0
        if aux.pixel_control:
            self.image, self._cells = _control(spec, aux.cell)
        if aux.reward_prediction and unroll < FRAMES:
            raise UsageError(f"reward prediction looks at {FRAMES} rows of an unroll, and algo.unroll is {unroll}; use "
                             f"algo.unroll {FRAMES} or more, or algo.aux.reward_prediction 0")  # fmt: skip

    def add_nets(self, nets: Nets) -> None:
        body = nets["body"]
        if self.autoencoder.on:
            nets["decoder"] = Decoder(self.spec, body.code)
            body.cut = self.autoencoder.stop == "policy"
        if self.aux.pixel_control:
            actions = self.spec.action.choices[0]
            nets["pixel_control"] = PixelControlHead(body.features, actions, self._cells)
        if self.aux.reward_prediction:
            nets["reward_prediction"] = RewardHead(FRAMES * body.code)

    def reconstruction(self, nets: Nets, code: torch.Tensor | None, obs: Tree, weight: torch.Tensor) -> Losses:
        """Of encoded observations; code [..., F], obs [..., ...], weight [...]: what counts."""
        config = self.autoencoder
        if not config.on or nets["body"].frozen:
            return 0.0, {}
        assert code is not None
        axes = weight.dim()
        obs = nets["normalizer"](tree.map(lambda x: x.flatten(0, axes - 1), obs))
        code = code.detach() if config.stop == "reconstruction" else code
        error = masked_mean(nets["decoder"].loss(code.flatten(0, axes - 1), obs), weight.flatten().float())
        return config.weight * error, {"reconstruction_loss": error.detach()}

    def losses(self, nets: Nets, batch: Unroll) -> Losses:
        """Of the tasks, on whole unrolls: those that were replayed, if there are any."""
        if not self.tasks:
            return 0.0, {}
        batch = batch if batch.replayed is None else columns(batch, batch.replayed)
        aux, body = self.aux, nets["body"]
        state, reset = tree.map(lambda x: x[0], batch.state0), resets(batch.live)
        code = body.encode(nets["normalizer"](batch.obs))  # [T+1, B, ...]
        total: torch.Tensor | float = 0.0
        metrics: dict[str, torch.Tensor] = {}
        if aux.pixel_control or aux.value_replay:
            features, _ = body.behind(code, state, reset if body.core is not None else None)
        if aux.pixel_control:
            metrics["pixel_control_loss"] = loss = self._pixel_control(nets["pixel_control"], features, batch)
            total = total + aux.pixel_control * loss
        if aux.reward_prediction:
            seen = code.detach() if body.cut else code
            metrics["reward_prediction_loss"] = loss = _reward_prediction(nets["reward_prediction"], seen, batch)
            total = total + aux.reward_prediction * loss
        if aux.value_replay:
            metrics["value_replay_loss"] = loss = self._value_replay(nets, features, batch)
            total = total + aux.value_replay * loss
        return total, {name: x.detach() for name, x in metrics.items()}

    def _pixel_control(self, head: Any, features: torch.Tensor, batch: Unroll) -> torch.Tensor:
        q = head(features)  # [T+1, B, A, h, w]
        change = pixel_change(self._frames(batch.obs[self.image]), self.aux.cell)
        behind = q.detach()
        if self.spec.masked:  # the best action of a cell is one that can be taken
            behind = only_legal(behind, batch.obs[MASK])
        target = pixel_control_target(
            change, *discounts(batch.terminated, batch.truncated, self.aux.gamma, live=batch.live), behind
        )  # fmt: skip
        return masked_mean(pixel_control_loss(q[:-1], batch.action, target), batch.live)

    def _frames(self, x: torch.Tensor) -> torch.Tensor:
        """The newest frames [T+1, B, C, H, W] of images as they are stored."""
        leaf = self.spec.obs[self.image]
        if len(leaf.shape) == 2:
            return x.unsqueeze(2)
        if leaf.stack > 1:
            return x[:, :, -1:]
        return x.movedim(-1, 2) if layout(leaf)[3] else x

    def _value_replay(self, nets: Nets, features: torch.Tensor, batch: Unroll) -> torch.Tensor:
        value = nets["value"](features) if "value_body" not in nets else nets["value"](
            nets["value_body"].sequence(nets["normalizer"](batch.obs), {}, None)[0]
        )  # fmt: skip
        factors = discounts(batch.terminated, batch.truncated, self.gamma, live=batch.live)
        target = nstep_return(batch.reward, *factors, value.detach())
        return masked_mean(value_loss(value[:-1], target), batch.live)


def _reward_prediction(head: Any, code: torch.Tensor, batch: Unroll) -> torch.Tensor:
    """The reward of row t from what was seen in rows t-2, t-1 and t of one episode."""
    rows = len(batch.live) - FRAMES + 1
    seen = torch.cat([code[i : i + rows] for i in range(FRAMES)], -1)  # [rows, B, 3F]
    usable = torch.stack([batch.live[i : i + rows] for i in range(FRAMES)]).all(0)
    reward = batch.reward[FRAMES - 1 :]
    loss = reward_prediction_loss(head(seen.flatten(0, 1)).unflatten(0, seen.shape[:2]), reward)
    return (loss * balanced_weight(reward, usable)).sum()


def columns(batch: Unroll, which: torch.Tensor) -> Unroll:
    """The unrolls of some lanes, [B] bool."""
    index = which.nonzero().flatten()

    def pick(x: torch.Tensor) -> torch.Tensor:
        return x.index_select(1 if x.dim() > 1 else 0, index)

    return tree.map_fields(batch, pick)


def _control(spec: EnvSpec, cell: int) -> tuple[str, tuple[int, int]]:
    """The image whose changes are controlled, and how many cells it has."""
    images = [key for key, leaf in spec.obs.items() if leaf.kind == "image"]
    if not images or spec.action.kind != "discrete":
        what = "no image" if not images else f"actions of the kind {spec.action.kind!r}"
        raise UsageError(f"pixel control needs images and discrete actions, and {spec.id} has {what}; use "
                         "algo.aux.pixel_control 0")  # fmt: skip
    _, height, width, _ = layout(spec.obs[images[0]])
    cells = height // cell, width // cell
    if min(cells) < 1:
        raise UsageError(f"cells of {cell} pixels do not fit into an image of {height}x{width}; use a smaller "
                         "algo.aux.cell")  # fmt: skip
    return images[0], cells
