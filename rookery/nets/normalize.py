"""Running statistics: observations to mean 0 and deviation 1, rewards to returns of deviation 1.

Both are part of the weights: what actors see with is what the learner learns with. Only `update` (observations) and
the learner's call of `RewardScaler` change them; acting and evaluation never do. Across ranks only sums are reduced,
so the statistics of several ranks are those of all their data pooled.
"""

from __future__ import annotations

import torch
from torch import nn

from rookery.core.reduce import ALONE, Reduce
from rookery.core.types import MASK, EnvSpec
from rookery.nets.modules import Modules
from rookery.ops.moments import Moments, from_sums, merge, moments, to_sums, variance
from rookery.ops.returns import backward_scan

CLIP = 10.0
EPSILON = 1e-8


class Running(nn.Module):
    """Moments of everything seen so far, as float64 buffers."""

    count: torch.Tensor
    mean: torch.Tensor
    m2: torch.Tensor

    def __init__(self, shape: tuple[int, ...]):
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("m2", torch.zeros(shape, dtype=torch.float64))

    def moments(self) -> Moments:
        return Moments(self.count, self.mean, self.m2)

    def sums(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """[3, ...] of a batch, additive over ranks; about the running mean, which all ranks share."""
        return to_sums(moments(x, weight), self.mean)

    def merge(self, sums: torch.Tensor) -> None:
        merged = merge(self.moments(), from_sums(sums, self.mean))
        for buffer, value in zip(self.moments(), merged):
            buffer.copy_(value)


class LeafNormalizer(nn.Module):
    scale32: torch.Tensor
    shift32: torch.Tensor
    low32: torch.Tensor
    high32: torch.Tensor

    def __init__(self, shape: tuple[int, ...]):
        super().__init__()
        self.running = Running(shape)
        self.register_buffer("scale32", torch.ones(shape))
        self.register_buffer("shift32", torch.zeros(shape))
        self.register_buffer("low32", torch.tensor(-torch.inf))  # no clipping before the first update
        self.register_buffer("high32", torch.tensor(torch.inf))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addcmul(self.shift32, x, self.scale32).clamp_(self.low32, self.high32)

    def refresh(self) -> None:
        """Derive what `forward` uses from the moments: (x - mean) / deviation, as one multiplication and addition."""
        if self.running.count > 0:
            scale = (variance(self.running.moments()) + EPSILON).rsqrt()
            self.scale32.copy_(scale)
            self.shift32.copy_(-self.running.mean * scale)
            self.low32.fill_(-CLIP)
            self.high32.fill_(CLIP)

    def derived(self) -> list[torch.Tensor]:
        return [self.scale32, self.shift32, self.low32, self.high32]


class ObsNormalizer(nn.Module):
    """Standardises float vector leaves and clips them to ±10; images and integers pass. The identity when disabled.

    What it returns is what networks see: without the mask of legal actions.
    """

    def __init__(self, spec: EnvSpec, enabled: bool):
        super().__init__()
        vectors = (key for key, leaf in spec.obs.items() if leaf.kind == "vector" and leaf.dtype.startswith("float"))
        self.keys = tuple(vectors) if enabled else ()
        self.masked = spec.masked
        self.leaves = Modules(LeafNormalizer(spec.obs[key].shape) for key in self.keys)

    def forward(self, obs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if self.masked:
            obs = {key: x for key, x in obs.items() if key != MASK}
        if not self.keys:
            return obs
        return obs | {key: leaf.forward(obs[key]) for key, leaf in zip(self.keys, self.leaves)}

    @torch.no_grad()
    def update(self, obs: dict[str, torch.Tensor], live: torch.Tensor, reduce: Reduce = ALONE) -> None:
        """Merge the live rows of obs [T, B, ...] into the statistics, on all ranks alike."""
        if not self.keys:
            return
        sums = [leaf.running.sums(obs[key], live) for key, leaf in zip(self.keys, self.leaves)]
        reduced = reduce.sum(torch.cat([part.flatten() for part in sums]))  # one collective for all leaves
        for leaf, old, new in zip(self.leaves, sums, reduced.split([part.numel() for part in sums])):
            leaf.running.merge(new.view_as(old))
            leaf.refresh()

    def published(self) -> list[torch.Tensor]:
        """What actors need of the statistics, float32."""
        return [buffer for leaf in self.leaves for buffer in leaf.derived()]


class RewardScaler(nn.Module):
    """Rewards divided by the deviation of the discounted return, clipped to ±10.

    The running return of each environment (lane) continues from one call to the next and is zeroed after an end.
    Lanes are those of the whole run. Each rank computes the returns of its own lanes; they share them, and the moments.
    """

    returns: torch.Tensor  # [lanes]

    def __init__(self, lanes: int, gamma: float, enabled: bool):
        super().__init__()
        self.gamma, self.enabled = gamma, enabled
        self.register_buffer("returns", torch.zeros(lanes, dtype=torch.float64))
        self.running = Running(())

    @torch.no_grad()
    def forward(
        self,
        reward: torch.Tensor,
        ends: torch.Tensor,
        live: torch.Tensor,
        lane: torch.Tensor,
        reduce: Reduce = ALONE,
        replayed: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Update, then scale. reward, ends (terminated or truncated), live [T, B]; lane, replayed [B].

        What is replayed was counted before. A lane that is there several times (unrolls of one actor, in the order in
        which it made them) is continued from one to the next.
        """
        if not self.enabled:
            return reward
        sums = torch.zeros(3, dtype=torch.float64, device=reward.device)
        for columns in _turns(lane, replayed):
            sums += self._continued(reward[:, columns], ends[:, columns], live[:, columns], lane[columns])
        self.running.merge(self._exchanged(sums, reduce))  # one collective, however often a lane is there
        deviation = (variance(self.running.moments()) + EPSILON).sqrt()
        return (reward / deviation).to(reward.dtype).clamp_(-CLIP, CLIP)

    def _exchanged(self, sums: torch.Tensor, reduce: Reduce) -> torch.Tensor:
        """The sums of all ranks; each gets the running returns of the others' lanes too, so that nets stay the same."""
        if reduce.size == 1:
            return sums
        own = torch.zeros_like(self.returns).tensor_split(reduce.size)
        own[reduce.rank].copy_(self.returns.tensor_split(reduce.size)[reduce.rank])
        total = reduce.sum(torch.cat([sums, *own]))
        self.returns.copy_(total[3:])
        return total[:3]

    def _continued(
        self, reward: torch.Tensor, ends: torch.Tensor, live: torch.Tensor, lane: torch.Tensor
    ) -> torch.Tensor:
        """Continue the returns of different lanes, and give the sums of their moments, [3]."""
        gain = torch.where(live, reward, 0.0).double()
        decay = torch.where(live, self.gamma, 1.0).double()
        gain[0] += decay[0] * self.returns[lane]
        decay[1:] *= ~ends[:-1]
        totals = backward_scan(gain.flip(0), decay.flip(0)).flip(0)  # the scan of values, run from past to future
        self.returns[lane] = totals[-1] * ~ends[-1]
        return self.running.sums(totals, live)


def _turns(lane: torch.Tensor, replayed: torch.Tensor | None) -> list[torch.Tensor | slice]:
    """Columns of new unrolls, in groups in which each lane is there once."""
    if replayed is None and len(lane.unique()) == len(lane):
        return [slice(None)]
    turns: list[list[int]] = []
    seen: dict[int, int] = {}
    for column, number in enumerate(lane.tolist()):
        if replayed is None or not replayed[column]:
            turn = seen[number] = seen.get(number, -1) + 1
            turns += [[]] if turn == len(turns) else []
            turns[turn].append(column)
    return [torch.tensor(columns) for columns in turns]
