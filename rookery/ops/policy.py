"""Policy losses and the two distributions of actions, as functions of tensors.

PPO's clipped surrogate: Schulman et al. 2017, eq. 7. KL estimator k3: Schulman's note "Approximating KL Divergence".
Losses are per element and to be minimised; `masked_mean` turns them into a number. There are no distribution objects:
logits, or mean and log deviation, are what a head returns and what these functions take.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
LOG_2 = math.log(2)


def masked_mean(x: Tensor, weight: Tensor) -> Tensor:
    """Mean of x under weights (or a bool mask); 0 if nothing has weight.

    Elements without weight may be NaN or infinite: they touch neither the mean nor the gradient of x. Where x itself
    was computed from something non-finite, its own backward pass may still turn that zero gradient into NaN.
    """
    assert x.shape == weight.shape, (x.shape, weight.shape)
    weight = weight.to(x.dtype)
    total = weight.sum()
    kept = torch.where(weight != 0, x, 0.0)  # not x * weight: NaN * 0 is NaN
    return (kept * weight).sum() / torch.where(total > 0, total, 1.0)


def clipped_surrogate(new_logp: Tensor, logp: Tensor, advantage: Tensor, clip: float | Tensor) -> Tensor:
    """PPO's loss per element: no gradient once the ratio has moved beyond the clip in the advantage's direction."""
    assert new_logp.shape == logp.shape == advantage.shape, (new_logp.shape, logp.shape, advantage.shape)
    return _ClippedSurrogate.apply(new_logp, logp, advantage, clip)


class _ClippedSurrogate(torch.autograd.Function):
    """In closed form: small networks spend more time in autograd's bookkeeping than in arithmetic."""

    @staticmethod
    def forward(ctx: Any, new_logp: Tensor, logp: Tensor, advantage: Tensor, clip: Any) -> Tensor:
        ratio = (new_logp - logp).exp_()
        gain = ratio * advantage
        clipped = ratio.clamp_(1 - clip, 1 + clip).mul_(advantage)
        # d gain / d new_logp = gain, where the unclipped term is the smaller one (equal inside the clip)
        # (asked the other way round, so that NaN keeps its slope and is found at the gate)
        ctx.save_for_backward(torch.where(gain > clipped, 0.0, gain))
        return torch.minimum(gain, clipped).neg_()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (slope,) = ctx.saved_tensors
        return -grad * slope, None, None, None


def truncated_logp(target_logp: Tensor, logp: Tensor, ratio_clip: float) -> Tensor:
    """log q with pi / q = min(mu / target, ratio_clip) · pi / mu: IMPACT's ratio, written as one of two policies.

    `logp` is that of mu, which acted. Where mu is not much more likely than the target, q is the target.
    """
    assert target_logp.shape == logp.shape, (target_logp.shape, logp.shape)
    return torch.maximum(target_logp, logp - math.log(ratio_clip))


def kl_estimate(new_logp: Tensor, logp: Tensor) -> Tensor:
    """KL(old || new) per element from the old policy's actions (k3): unbiased and never negative."""
    assert new_logp.shape == logp.shape, (new_logp.shape, logp.shape)
    log_ratio = new_logp - logp
    return log_ratio.expm1() - log_ratio


def clip_fraction(new_logp: Tensor, logp: Tensor, clip: float | Tensor) -> Tensor:
    """1 where the ratio is outside the clip, else 0; the mean of it is the fraction."""
    assert new_logp.shape == logp.shape, (new_logp.shape, logp.shape)
    return ((new_logp - logp).expm1().abs() > clip).to(new_logp.dtype)


def categorical_logp(logits: Tensor, action: Tensor) -> Tensor:
    """log pi(action), [...]; logits [..., A], a forbidden action's logit is -inf."""
    assert logits.shape[:-1] == action.shape, (logits.shape, action.shape)
    return logits.log_softmax(-1).gather(-1, action.unsqueeze(-1)).squeeze(-1)


def categorical_entropy(logits: Tensor) -> Tensor:
    """[...] in nats."""
    logp = logits.log_softmax(-1)
    finite = logp.clamp(min=torch.finfo(logp.dtype).min)  # 0 * -inf is NaN, and so would be its gradient
    return -(logp.exp() * finite).sum(-1)


def categorical_kl(logits: Tensor, other: Tensor) -> Tensor:
    """KL(p || q) of two categorical distributions, [...]; logits [..., A]. An action that p forbids counts nothing."""
    assert logits.shape == other.shape, (logits.shape, other.shape)
    p, q = logits.log_softmax(-1), other.log_softmax(-1)
    lowest = torch.finfo(p.dtype).min
    return (p.exp() * (p.clamp(min=lowest) - q.clamp(min=lowest))).sum(-1)


def gaussian_kl(mean: Tensor, log_std: Tensor, other_mean: Tensor, other_log_std: Tensor) -> Tensor:
    """KL(p || q) of two diagonal Gaussians, [...]; all [..., A]. The same if both are squashed by one function."""
    assert mean.shape == other_mean.shape, (mean.shape, other_mean.shape)
    spread = 2 * (log_std - other_log_std)
    shift = ((mean - other_mean) * (-other_log_std).exp()).square()
    # expm1: a small change would be lost in exp(spread) - 1, and the divergence could be negative
    return 0.5 * (spread.expm1() - spread + shift).sum(-1)


def categorical_logp_entropy(logits: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """`categorical_logp` and `categorical_entropy` at once, with their gradient in closed form."""
    assert logits.shape[:-1] == action.shape, (logits.shape, action.shape)
    return _CategoricalLogpEntropy.apply(logits, action)


class _CategoricalLogpEntropy(torch.autograd.Function):
    """d logp(a) = onehot(a) - p and d H = -p (log p + H), with respect to the logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        logp = logits.log_softmax(-1)
        probability = logp.exp()
        # A forbidden action has p = 0 and log p = -inf: 0 · -inf must give 0.
        weighted = probability * logp.clamp(min=torch.finfo(logp.dtype).min)
        entropy = weighted.sum(-1).neg_()
        index = action.unsqueeze(-1)
        ctx.save_for_backward(probability, weighted, entropy, index)
        return logp.gather(-1, index).squeeze(-1), entropy

    @staticmethod
    def backward(ctx: Any, grad_logp: Tensor, grad_entropy: Tensor) -> tuple[Tensor, None]:
        probability, weighted, entropy, index = ctx.saved_tensors
        grad_logp = grad_logp.unsqueeze(-1)
        grad = torch.addcmul(weighted, probability, entropy.unsqueeze(-1)).mul_(-grad_entropy.unsqueeze(-1))
        grad.addcmul_(probability, grad_logp, value=-1.0)
        return grad.scatter_add_(-1, index, grad_logp), None


def categorical_draw(logits: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """One action per row, [...] int64, and its log-probability, [...]: what acting needs, with one softmax.

    A race of exponential clocks, several times faster than multinomial.
    """
    logp = logits.detach().log_softmax(-1)
    noise = torch.empty_like(logp).exponential_(generator=generator)
    noise.clamp_(min=torch.finfo(noise.dtype).tiny)  # -log 0 is +inf: it would let a forbidden action win
    action = (logp - noise.log_()).argmax(-1, keepdim=True)
    return action.squeeze(-1), logp.gather(-1, action).squeeze(-1)


def gaussian_logp(mean: Tensor, log_std: Tensor, action: Tensor) -> Tensor:
    """log density of a diagonal Gaussian, [...]; mean and action [..., A], log_std the same or [A]."""
    assert mean.shape == action.shape, (mean.shape, action.shape)
    assert log_std.shape in (mean.shape, mean.shape[-1:]), (log_std.shape, mean.shape)
    z = (action - mean) * (-log_std).exp()
    return (-0.5 * z.square() - log_std - HALF_LOG_2PI).sum(-1)


def gaussian_entropy(log_std: Tensor) -> Tensor:
    """[...] in nats, of the Gaussian before any squashing."""
    return (log_std + (HALF_LOG_2PI + 0.5)).sum(-1)


def squashed_gaussian_logp(mean: Tensor, log_std: Tensor, pre_tanh: Tensor) -> Tensor:
    """log density of tanh(u) with u Gaussian, given u: exact where tanh saturates, which atanh(action) is not."""
    # log(1 - tanh(u)^2) = 2 (log 2 - u - softplus(-2u)), without the cancellation of the left side
    log_det = 2 * (LOG_2 - pre_tanh - F.softplus(-2 * pre_tanh))
    return gaussian_logp(mean, log_std, pre_tanh) - log_det.sum(-1)
