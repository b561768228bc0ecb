"""Illegal actions have probability 0 and no gradient; the rest is the distribution over the legal ones."""

from __future__ import annotations

import math

import pytest
import torch

from rookery.ops.legal import only_legal
from rookery.ops.policy import (
    categorical_draw,
    categorical_entropy,
    categorical_kl,
    categorical_logp,
    categorical_logp_entropy,
)

ROWS, N = 64, 6


def rows(seed: int = 0, scale: float = 3.0, dtype: torch.dtype = torch.float32):
    """Logits, masks with something legal, and a legal action of each row."""
    rng = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(ROWS, N, generator=rng, dtype=dtype)
    legal = torch.rand(ROWS, N, generator=rng) < 0.4
    action = torch.randint(N, (ROWS,), generator=rng)
    legal[torch.arange(ROWS), action] = True
    return logits, legal, action


@pytest.mark.parametrize("scale", [1.0, 50.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_probabilities_of_illegal_actions_are_exactly_zero_and_the_others_sum_to_one(scale, dtype):
    logits, legal, _ = rows(scale=scale, dtype=dtype)
    masked = only_legal(logits, legal)
    p = masked.softmax(-1)
    assert (p[~legal] == 0).all() and masked.isfinite().all()
    torch.testing.assert_close(p.sum(-1), torch.ones(ROWS, dtype=dtype))
    logp = torch.stack([categorical_logp(masked, torch.full((ROWS,), a)) for a in range(N)], -1)
    torch.testing.assert_close(torch.where(legal, logp.exp(), 0.0).sum(-1), torch.ones(ROWS, dtype=dtype))


def test_log_probability_and_entropy_are_those_of_the_distribution_over_the_legal_actions():
    logits, legal, action = rows()
    masked = only_legal(logits, legal)
    logp, entropy = categorical_logp_entropy(masked, action)
    for row in range(ROWS):
        kept = legal[row].nonzero().flatten().tolist()
        alone = logits[row, kept].log_softmax(-1)
        torch.testing.assert_close(logp[row], alone[kept.index(int(action[row]))])
        torch.testing.assert_close(entropy[row], -(alone.exp() * alone).sum(), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(categorical_entropy(masked), entropy)


def test_one_legal_action_is_certain():
    logits, legal, action = rows()
    legal = torch.zeros_like(legal).scatter_(1, action.unsqueeze(1), True)
    logp, entropy = categorical_logp_entropy(only_legal(logits, legal), action)
    assert (logp == 0).all() and (entropy == 0).all()


@pytest.mark.parametrize("what", ["logp", "entropy", "both"])
def test_gradients_are_zero_for_illegal_logits_and_right_for_the_others(what):
    logits, legal, action = rows(dtype=torch.float64)
    logits.requires_grad_()

    def out(x):
        masked = only_legal(x, legal)
        if what == "entropy":
            return categorical_entropy(masked)
        return categorical_logp(masked, action) if what == "logp" else categorical_logp_entropy(masked, action)

    assert torch.autograd.gradcheck(out, (logits,))
    total = out(logits)
    (total[0] + total[1] if what == "both" else total).sum().backward()
    assert (logits.grad[~legal] == 0).all() and logits.grad[legal].abs().sum() > 0


def test_the_divergence_counts_legal_actions_only_and_is_finite():
    (logits, legal, _), (other, _, _) = rows(), rows(seed=1)
    kl = categorical_kl(only_legal(logits, legal), only_legal(other, legal))
    for row in range(ROWS):
        p, q = (x[row, legal[row]].log_softmax(-1) for x in (logits, other))
        torch.testing.assert_close(kl[row], (p.exp() * (p - q)).sum(), atol=1e-5, rtol=1e-5)


def test_where_nothing_is_legal_nothing_changes():
    logits, legal, action = rows()
    legal[::2] = False
    masked = only_legal(logits, legal)
    assert torch.equal(masked[::2], logits[::2]) and not torch.equal(masked[1::2], logits[1::2])
    logp, entropy = categorical_logp_entropy(masked, action)
    assert logp.isfinite().all() and entropy.isfinite().all()


def test_draws_are_legal_and_follow_the_probabilities():
    logits, legal, _ = rows()
    count = 4000
    masked = only_legal(logits[:4], legal[:4]).repeat(count, 1)
    action, logp = categorical_draw(masked, torch.Generator().manual_seed(1))
    assert legal[:4].repeat(count, 1).gather(1, action.unsqueeze(1)).all()
    torch.testing.assert_close(logp, categorical_logp(masked, action))
    shares = torch.stack([action.view(count, 4)[:, row].bincount(minlength=N) / count for row in range(4)])
    assert (shares - masked[:4].softmax(-1)).abs().max() < 4 * math.sqrt(0.25 / count)


def test_values_on_a_grid_are_masked_along_their_actions():
    rng = torch.Generator().manual_seed(3)
    q, legal = torch.randn(5, 2, N, 3, 4, generator=rng), torch.rand(5, 2, N, generator=rng) < 0.5
    legal[..., 0] = True
    best = only_legal(q, legal).amax(2)
    for t in range(5):
        for lane in range(2):
            torch.testing.assert_close(best[t, lane], q[t, lane, legal[t, lane]].amax(0))
