"""Returns and advantages from one backward scan: GAE, n-step, V-trace.

GAE: Schulman et al. 2016, eq. 16. n-step and its bootstrap at a cut: Mnih et al. 2016, algorithm 3.
V-trace: Espeholt et al. 2018, section 4.1 and remark 1 for the recursion.

All tensors are time-major [T, B] (more trailing dimensions are more lanes); `value` has one row more. Resets happen on
the step after an end (see types.Unroll), so value[t+1] is always the value of row t's true successor: of the final
observation, too, when row t ends an episode. A row that is not live gets a number as well; it means nothing, reaches
no live row, and must be given weight 0. Inputs must be finite everywhere: a factor of 0 does not hide a NaN.

Two factors per row, never merged: `discount` is gamma * (1 - terminated) and multiplies values; `continues` is
1 - (terminated | truncated) and lets the trace pass. Results are targets: they carry no gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class VTrace(NamedTuple):
    vs: Tensor  # [T, B] value targets
    pg_advantage: Tensor  # [T, B] advantages for the policy gradient


def discounts(
    terminated: Tensor,
    truncated: Tensor,
    gamma: float,
    dtype: torch.dtype = torch.float32,
    live: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Discount and continuation of every row, from its two end flags (bool).

    With `live`, a row also ends its trace if the row behind it is dead: so an unroll that was cut short bootstraps from
    the value of the observation behind its last step, and its episode goes on in the next one.
    """
    assert terminated.shape == truncated.shape, (terminated.shape, truncated.shape)
    discount = terminated.logical_not().to(dtype).mul_(gamma)
    passes = (terminated | truncated).logical_not()
    if live is not None:
        assert live.shape == terminated.shape, (live.shape, terminated.shape)
        passes[:-1] &= live[1:]
    return discount, passes.to(dtype)


@torch.no_grad()
def backward_scan(delta: Tensor, decay: Tensor) -> Tensor:
    """x with x_t = delta_t + decay_t * x_{t+1} and nothing beyond the last row."""
    assert delta.shape == decay.shape, (delta.shape, decay.shape)
    x = delta.clone(memory_format=torch.contiguous_format)
    rows, decays = x.unbind(0), decay.unbind(0)  # once: indexing a tensor T times costs as much as the arithmetic
    for t in range(len(rows) - 2, -1, -1):
        rows[t].addcmul_(decays[t], rows[t + 1])
    return x


@torch.no_grad()
def gae(reward: Tensor, discount: Tensor, continues: Tensor, value: Tensor, lam: float) -> Tensor:
    """Generalised advantage estimates, [T, B]; add value[:-1] for the value targets."""
    _check(reward, discount, continues, value)
    delta = reward + discount * value[1:] - value[:-1]
    return backward_scan(delta, discount * continues * lam)


@torch.no_grad()
def nstep_return(reward: Tensor, discount: Tensor, continues: Tensor, value: Tensor, n: int | None = None) -> Tensor:
    """Discounted rewards of up to n steps (all if None), then the value: after n, at the episode's or unroll's end."""
    _check(reward, discount, continues, value)
    assert n is None or n >= 1, n
    bootstrap = value[1:]
    if n is None or n >= len(reward):
        cut = bootstrap * (1 - continues)
        cut[-1] = bootstrap[-1]
        return backward_scan(reward + discount * cut, discount * continues)
    target = reward + discount * bootstrap
    for _ in range(n - 1):  # the k-step return of a row is one step more than the (k-1)-step return of the next
        target = reward + discount * _successor(target, bootstrap, continues)
    return target


@torch.no_grad()
def vtrace(
    log_rho: Tensor,
    reward: Tensor,
    discount: Tensor,
    continues: Tensor,
    value: Tensor,
    lam: float = 1.0,
    rho_clip: float = 1.0,
    c_clip: float = 1.0,
    pg_rho_clip: float = 1.0,
) -> VTrace:
    """V-trace targets and advantages; log_rho is log pi(a) - log mu(a) of the action taken.

    rho_clip fixes what the values converge to, c_clip how fast; math.inf means no clip. With lam < 1 the advantage's
    successor is lam * vs + (1 - lam) * value, so that both results are the lam-return's and on-policy they are GAE's.
    """
    _check(reward, discount, continues, value)
    assert log_rho.shape == reward.shape, (log_rho.shape, reward.shape)
    assert rho_clip >= c_clip, (rho_clip, c_clip)
    ratio = log_rho.exp()
    bootstrap = value[1:]
    delta = ratio.clamp(max=rho_clip) * (reward + discount * bootstrap - value[:-1])
    vs = value[:-1] + backward_scan(delta, discount * continues * ratio.clamp(max=c_clip) * lam)
    target = reward + discount * _successor(vs, bootstrap, continues * lam)
    return VTrace(vs, ratio.clamp(max=pg_rho_clip) * (target - value[:-1]))


def _successor(target: Tensor, bootstrap: Tensor, share: Tensor) -> Tensor:
    """The next row's target by its share; the bootstrap value for the rest, and where the episode or unroll is cut."""
    successor = bootstrap.clone()
    successor[:-1].lerp_(target[1:], share[:-1])
    return successor


def _check(reward: Tensor, discount: Tensor, continues: Tensor, value: Tensor) -> None:
    assert reward.shape == discount.shape == continues.shape, (reward.shape, discount.shape, continues.shape)
    assert value.shape == (len(reward) + 1, *reward.shape[1:]), (value.shape, reward.shape)
