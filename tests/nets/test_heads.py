"""Policy heads against torch.distributions and by sampling; the value head's shape and start."""

import math

import pytest
import torch
from torch import distributions as D

from rookery.core.config import NetConfig
from rookery.core.types import ActionSpec
from rookery.nets.heads import EDGE, ValueHead, policy_head

DISCRETE = ActionSpec("discrete", choices=(5,))
MULTI = ActionSpec("multi", choices=(3, 4, 2))
BOX = ActionSpec("box", size=3)
GAUSS = NetConfig(log_std=-0.5)
SQUASH = NetConfig(log_std=-0.5, squash=True)
CASES = [
    (DISCRETE, NetConfig()),
    (MULTI, NetConfig()),
    (BOX, GAUSS),
    (BOX, NetConfig(log_std=-0.5, state_std=True)),
    (BOX, SQUASH),
    (BOX, NetConfig(log_std=-0.5, squash=True, state_std=True)),
]
EVERY = pytest.mark.parametrize("action,net", CASES)


def make(action: ActionSpec, net: NetConfig, spread: float = 1.0):
    torch.manual_seed(0)
    head = policy_head(action, 8, net)
    with torch.no_grad():
        head.linear.weight.normal_(0, spread / 8)
    return head


@EVERY
@pytest.mark.parametrize("lead", [(), (4,), (3, 4)])
def test_shapes_follow_the_leading_axes(action, net, lead):
    head = make(action, net)
    params = head(torch.randn(*lead, 8))
    for pair in (head.sample(params, torch.Generator().manual_seed(1)), head.mode(params)):
        assert pair[0].shape == lead + action.shape and pair[1].shape == lead
        assert pair[0].dtype == getattr(torch, action.dtype)
    logp, entropy = head.logp_entropy(params, pair[0])
    assert logp.shape == entropy.shape == lead


@EVERY
def test_the_logp_of_a_stored_action_is_the_one_it_was_sampled_with(action, net):  # P15, P27
    head = make(action, net)
    params = head(torch.randn(500, 8) * 3)
    sampled, logp = head.sample(params, torch.Generator().manual_seed(1))
    assert torch.equal(head.logp_entropy(params, sampled.clone())[0], logp)
    best, logp = head.mode(params)
    assert torch.equal(head.logp_entropy(params, best)[0], logp)


@EVERY
def test_samples_repeat_with_the_seed(action, net):
    head = make(action, net)
    params = head(torch.randn(20, 8))
    draw = lambda seed: head.sample(params, torch.Generator().manual_seed(seed))[0]  # noqa: E731
    assert torch.equal(draw(1), draw(1)) and not torch.equal(draw(1), draw(2))


@EVERY
def test_nothing_but_the_parameters_takes_a_gradient(action, net):
    head = make(action, net)
    params = head(torch.randn(6, 8))
    action_, _ = head.sample(params, torch.Generator().manual_seed(1))
    logp, entropy = head.logp_entropy(params, action_.detach())
    (logp + entropy).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in head.parameters())


def test_categorical_is_torchs():
    head = make(DISCRETE, NetConfig(), 3.0)
    logits = head(torch.randn(7, 8))
    reference = D.Categorical(logits=logits)
    actions = torch.arange(7) % 5
    logp, entropy = head.logp_entropy(logits, actions)
    torch.testing.assert_close(logp, reference.log_prob(actions))
    torch.testing.assert_close(entropy, reference.entropy())
    assert torch.equal(head.mode(logits)[0], logits.argmax(-1))


@pytest.mark.parametrize("choices", [(3, 4, 2), (3, 3), (5,)])
def test_multi_is_the_sum_of_its_branches(choices):
    head = make(ActionSpec("multi", choices=choices), NetConfig(), 3.0)
    features = torch.randn(70, 8)
    params = head(features)
    action, logp = head.sample(params, torch.Generator().manual_seed(0))
    branches = [D.Categorical(logits=logits) for logits in head.linear(features).split(choices, -1)]
    torch.testing.assert_close(logp, sum(b.log_prob(action[:, i]) for i, b in enumerate(branches)))
    torch.testing.assert_close(head.logp_entropy(params, action)[1], sum(b.entropy() for b in branches))
    assert torch.equal(action.max(0).values, torch.tensor(choices) - 1)  # every choice is possible, and no other
    assert torch.equal(head.mode(params)[0], torch.stack([b.logits.argmax(-1) for b in branches], -1))


def test_gaussian_is_torchs():
    head = make(BOX, GAUSS)
    mean, log_std = params = head(torch.randn(7, 8))
    reference = D.Independent(D.Normal(mean, log_std.exp()), 1)
    action = torch.randn(7, 3)
    logp, entropy = head.logp_entropy(params, action)
    torch.testing.assert_close(logp, reference.log_prob(action))
    torch.testing.assert_close(entropy, reference.entropy())
    assert torch.equal(head.mode(params)[0], mean)


def test_squashed_is_torchs_inside_and_finite_at_the_edge():
    head = make(BOX, SQUASH)
    mean, log_std = params = head(torch.randn(50, 8))
    reference = D.TransformedDistribution(D.Normal(mean, log_std.exp()), D.TanhTransform())
    action = torch.rand(50, 3) * 1.9 - 0.95
    torch.testing.assert_close(
        head.logp_entropy(params, action)[0], reference.log_prob(action).sum(-1), rtol=1e-4, atol=1e-4
    )
    edge = torch.ones(50, 3)
    logp, entropy = head.logp_entropy((mean * 100, log_std), edge)
    assert logp.isfinite().all() and entropy.isfinite().all()
    sampled, _ = head.sample((mean * 100, log_std), torch.Generator().manual_seed(0))
    assert sampled.abs().max() <= EDGE < 1


@pytest.mark.parametrize("mean,log_std", [(0.0, 0.0), (0.7, -1.0), (-2.0, 0.3), (0.2, 1.0)])
def test_squashed_entropy_is_the_mean_of_minus_logp(mean, log_std):
    head = make(ActionSpec("box", size=1), SQUASH)
    params = (torch.full((200_000, 1), mean), torch.full((200_000, 1), log_std))
    action, logp = head.sample(params, torch.Generator().manual_seed(0))
    entropy = head.logp_entropy((params[0][:1], params[1][:1]), action[:1])[1]
    assert entropy.item() == pytest.approx(-logp.mean().item(), abs=0.03)


def two(head, rows: int = 7):
    """Parameters of two policies."""
    return head(torch.randn(rows, 8) * 2), head(torch.randn(rows, 8) * 2)


@EVERY
def test_the_divergence_is_zero_at_equality_positive_elsewhere_and_has_a_direction(action, net):
    head = make(action, net, 3.0)
    p, q = two(head)
    there, back = head.kl(p, q), head.kl(q, p)
    assert there.shape == (7,) and (there > 0).all() and (back > 0).all()
    assert not torch.allclose(there, back) or net in (GAUSS, SQUASH)  # equal deviations: the same both ways
    assert not head.kl(p, p).any()


@EVERY
def test_the_divergence_is_the_mean_of_the_log_ratio_of_sampled_actions(action, net):
    """KL(p, q) = E_p[log p - log q], by the head's own samples and densities: what it is made of must not matter."""
    head = make(action, net, 2.0)
    p, q = (head(features.expand(40_000, 8)) for features in torch.randn(2, 8) * 2)
    taken, logp = head.sample(p, torch.Generator().manual_seed(0))
    ratio = logp - head.logp_entropy(q, taken)[0]
    assert head.kl(p, q)[0].item() == pytest.approx(ratio.mean().item(), abs=5 * ratio.std().item() / 200)


@EVERY
def test_the_gradient_of_the_divergence_pulls_the_second_policy_towards_the_first(action, net):
    head = make(action, net, 2.0)
    features = torch.randn(6, 8)
    p = head(torch.randn(6, 8))
    p = tuple(x.detach() for x in p) if isinstance(p, tuple) else p.detach()
    optimizer = torch.optim.SGD(head.parameters(), lr=0.01)
    before = head.kl(p, head(features)).mean()
    before.backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in head.parameters())
    optimizer.step()
    assert head.kl(p, head(features)).mean() < before


@pytest.mark.parametrize("choices", [(3, 4, 2), (2, 7), (3, 3), (5,)])
def test_the_divergence_of_multi_is_the_sum_over_its_branches(choices):
    """Branches of unequal width are padded with impossible choices, which count nothing."""
    head = make(ActionSpec("multi", choices=choices), NetConfig(), 3.0)
    a, b = torch.randn(9, 8), torch.randn(9, 8)
    branches = [
        D.kl_divergence(D.Categorical(logits=p), D.Categorical(logits=q))
        for p, q in zip(head.linear(a).split(choices, -1), head.linear(b).split(choices, -1))
    ]
    torch.testing.assert_close(head.kl(head(a), head(b)), sum(branches))


@pytest.mark.parametrize("state_std", [False, True])
def test_the_divergence_of_gaussians_is_torchs_squashed_or_not(state_std):
    plain, squashed = (make(BOX, NetConfig(log_std=-0.5, state_std=state_std, squash=s), 3.0) for s in (False, True))
    p, q = two(plain)
    reference = D.kl_divergence(*(D.Independent(D.Normal(mean, log_std.exp()), 1) for mean, log_std in (p, q)))
    torch.testing.assert_close(plain.kl(p, q), reference)
    assert torch.equal(squashed.kl(p, q), plain.kl(p, q))


def test_sample_frequencies_follow_the_logits():
    head = make(DISCRETE, NetConfig())
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5]).expand(40_000, 5)
    action, _ = head.sample(logits, torch.Generator().manual_seed(0))
    expected = 40_000 * logits[0].softmax(0)
    chi2 = ((action.bincount(minlength=5) - expected).square() / expected).sum()
    assert chi2 < 18.47  # 0.001 quantile, 4 degrees of freedom


@pytest.mark.parametrize("n", [2, 6, 18])
def test_the_first_policy_is_nearly_uniform(n):  # P31
    torch.manual_seed(0)
    head = policy_head(ActionSpec("discrete", choices=(n,)), 64, NetConfig())
    logits = head(torch.randn(256, 64))
    assert head.logp_entropy(logits, torch.zeros(256, dtype=torch.long))[1].min() >= 0.99 * math.log(n)


def test_first_gaussian_has_the_configured_deviation():
    for net in (NetConfig(log_std=-0.7), NetConfig(log_std=-0.7, state_std=True)):
        torch.manual_seed(0)
        mean, log_std = policy_head(BOX, 64, net)(torch.randn(9, 64))
        torch.testing.assert_close(log_std, torch.full((9, 3), -0.7), rtol=0, atol=0.1)
        assert mean.abs().max() < 0.1


def test_initial_gains():
    policy, value = policy_head(DISCRETE, 32, NetConfig()), ValueHead(32)
    w = policy.linear.weight
    torch.testing.assert_close(w @ w.t(), 1e-4 * torch.eye(5), rtol=0, atol=1e-9)
    assert value.linear.weight.norm().item() == pytest.approx(1.0, rel=1e-5)
    assert not policy.linear.bias.any() and not value.linear.bias.any()
    assert value(torch.randn(3, 4, 32)).shape == (3, 4)
