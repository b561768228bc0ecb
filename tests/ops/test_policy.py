"""Policy losses and distributions: golden values, gradients by autograd and finite differences, frequencies."""

import math

import pytest
import torch
from torch.autograd import gradcheck
from torch.distributions import Categorical, Normal, kl_divergence

from rookery.ops import policy


def _sample(logits: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    action, logp = policy.categorical_draw(logits, generator)
    torch.testing.assert_close(logp, policy.categorical_logp(logits, action).detach())
    return action


F64 = torch.float64
CHI2_999 = {3: 16.27, 5: 20.52}  # 99.9 % points of chi-square by degrees of freedom


def leaf(*values):
    return torch.tensor(values, dtype=F64, requires_grad=True)


def randn(*shape, seed=0, grad=True):
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed)).requires_grad_(grad)


class TestClippedSurrogate:
    def test_ppo1_objective_and_where_its_gradient_vanishes(self):
        ratio, advantage = torch.tensor([1.5, 1.5, 0.5, 0.5], dtype=F64), torch.tensor([1.0, -1, 1, -1], dtype=F64)
        logp = torch.full((4,), -1.0, dtype=F64)
        new_logp = (logp + ratio.log()).requires_grad_()
        loss = policy.clipped_surrogate(new_logp, logp, advantage, 0.2)
        torch.testing.assert_close(-loss, torch.tensor([1.2, -1.5, 0.5, -0.8], dtype=F64))
        loss.sum().backward()
        torch.testing.assert_close(new_logp.grad, torch.tensor([0, 1.5, -0.5, 0], dtype=F64))

    def test_at_ratio_one_the_gradient_is_the_policy_gradient(self):
        advantage = torch.tensor([2.0, -3.0], dtype=F64)
        new_logp = leaf(-0.5, -1.5)
        policy.clipped_surrogate(new_logp, new_logp.detach(), advantage, 0.2).sum().backward()
        torch.testing.assert_close(new_logp.grad, -advantage)

    def test_gradcheck(self):
        new_logp, logp = randn(16, seed=1), randn(16, seed=2, grad=False)
        advantage = randn(16, seed=3, grad=False)
        assert gradcheck(lambda x: policy.clipped_surrogate(x, logp, advantage, 0.2), new_logp)

    def test_shapes_do_not_broadcast(self):
        with pytest.raises(AssertionError):
            policy.clipped_surrogate(torch.zeros(4, 1), torch.zeros(4, 1), torch.zeros(4), 0.2)


class TestDivergence:
    def test_kl_estimate_is_zero_at_equality_and_never_negative(self):
        logp = randn(64, grad=False)
        assert not policy.kl_estimate(logp, logp).any()
        assert (policy.kl_estimate(randn(64, seed=1), logp) >= 0).all()

    def test_kl_estimate_averages_to_the_divergence_from_old_to_new(self):
        old, new = torch.tensor([0.5, 0.3, 0.2], dtype=F64), torch.tensor([0.2, 0.3, 0.5], dtype=F64)
        expected = (old * (old / new).log()).sum()
        torch.testing.assert_close((old * policy.kl_estimate(new.log(), old.log())).sum(), expected)

    def test_kl_estimate_keeps_its_precision_for_tiny_changes(self):
        step = torch.tensor(1e-4, dtype=torch.float32)  # naively, exp(step) - 1 - step is rounding noise in float32
        torch.testing.assert_close(policy.kl_estimate(step, torch.zeros(())).item(), 0.5e-8, rtol=0.1, atol=0)

    def test_clip_fraction_marks_ratios_outside_on_both_sides(self):
        ratio = torch.tensor([0.7, 0.9, 1.0, 1.1, 1.3])
        assert policy.clip_fraction(ratio.log(), torch.zeros(5), 0.2).tolist() == [1, 0, 0, 0, 1]


class TestTruncatedLogp:
    def test_im1(self):
        """mu .2, target .05, pi .1: bounded at 2 the ratio is 1.0; without a bound it is pi / target = 2.0."""
        mu, target, pi = (torch.tensor(p, dtype=F64).log() for p in (0.2, 0.05, 0.1))
        ratio = lambda bound: (pi - policy.truncated_logp(target, mu, bound)).exp().item()  # noqa: E731
        assert ratio(2.0) == pytest.approx(1.0) and ratio(math.inf) == ratio(4.5) == pytest.approx(2.0)

    @pytest.mark.parametrize("bound", [0.5, 1.0, 2.0, 7.0])
    def test_the_ratio_to_it_is_impacts(self, bound):
        mu, target, pi = (randn(200, seed=seed, grad=False).mul(2).exp() for seed in (1, 2, 3))
        ratio = pi / policy.truncated_logp(target.log(), mu.log(), bound).exp()
        expected = torch.minimum(mu / target, torch.tensor(bound)) * pi / mu
        torch.testing.assert_close(ratio, expected, rtol=1e-12, atol=0)
        assert 0 < (mu / target > bound).sum() < 200, "some are truncated and some are not"

    def test_shapes_do_not_broadcast(self):
        with pytest.raises(AssertionError):
            policy.truncated_logp(torch.zeros(3, 1), torch.zeros(3), 2.0)


class TestCategoricalKL:
    def test_is_the_sum_over_all_actions(self):
        p, q = randn(5, 2, 4, grad=False) * 3, randn(5, 2, 4, seed=1, grad=False) * 3
        found = policy.categorical_kl(p, q)
        for row in range(5):
            for column in range(2):
                a, b = ([math.exp(x) for x in logits[row, column].tolist()] for logits in (p, q))
                a, b = [x / sum(a) for x in a], [x / sum(b) for x in b]
                expected = sum(x * math.log(x / y) for x, y in zip(a, b))
                assert found[row, column].item() == pytest.approx(expected, rel=1e-10)
        torch.testing.assert_close(found, kl_divergence(Categorical(logits=p), Categorical(logits=q)))

    def test_is_zero_at_equality_and_never_negative(self):
        p = randn(500, 6, grad=False)
        assert not policy.categorical_kl(p, p).any()
        for scale in (1e-6, 1e-3, 1.0, 30.0):
            found = policy.categorical_kl(p, p + scale * randn(500, 6, seed=1, grad=False))
            assert found.min() > -1e-15 and found.max() > 0
        assert policy.categorical_kl(p, p + 5).abs().max() < 1e-14, "a constant changes no probability"

    def test_gradcheck(self):
        assert gradcheck(policy.categorical_kl, (randn(4, 5), randn(4, 5, seed=1)))

    def test_what_both_forbid_counts_nothing(self):
        p, q = leaf(0.3, -math.inf, 1.0, -2.0), leaf(-1.0, -math.inf, 0.5, 0.2)
        kl = policy.categorical_kl(p, q)
        a, b = (x.detach()[[0, 2, 3]].requires_grad_() for x in (p, q))
        expected = policy.categorical_kl(a, b)
        torch.testing.assert_close(kl, expected)
        kl.backward()
        expected.backward()
        for mine, theirs in ((p, a), (q, b)):
            assert mine.grad[1] == 0
            torch.testing.assert_close(mine.grad[[0, 2, 3]], theirs.grad)

    def test_what_only_p_forbids_costs_what_q_wastes_on_it(self):
        p, q = leaf(0.3, -math.inf, 1.0), leaf(-1.0, 0.4, 0.5)
        kl = policy.categorical_kl(p, q)
        a, b = p.detach()[[0, 2]].softmax(-1), q.detach().softmax(-1)[[0, 2]]
        torch.testing.assert_close(kl, (a * (a / b).log()).sum())
        kl.backward()
        assert p.grad.isfinite().all() and q.grad.isfinite().all()

    def test_what_only_q_forbids_is_as_far_as_it_gets_and_not_a_nan(self):
        p, q = torch.tensor([0.3, 0.0, 1.0], requires_grad=True), torch.tensor([0.1, -math.inf, 0.5])
        kl = policy.categorical_kl(p, q)
        assert kl > 1e30 and not kl.isnan()

    def test_shapes_do_not_broadcast(self):
        with pytest.raises(AssertionError):
            policy.categorical_kl(torch.zeros(4, 3), torch.zeros(3))


class TestGaussianKL:
    def test_agrees_with_torch_distributions_in_every_direction(self):
        args = [randn(5, 2, 3, seed=seed, grad=False) for seed in range(4)]
        p, q = Normal(args[0], args[1].exp()), Normal(args[2], args[3].exp())
        torch.testing.assert_close(policy.gaussian_kl(*args), kl_divergence(p, q).sum(-1))
        torch.testing.assert_close(policy.gaussian_kl(*args[2:], *args[:2]), kl_divergence(q, p).sum(-1))

    def test_is_the_integral_of_its_definition(self):
        mean, log_std, other_mean, other_log_std = (torch.tensor([x], dtype=F64) for x in (0.4, -0.3, -0.2, 0.1))
        x = torch.linspace(-12, 12, 40_001, dtype=F64)[:, None]
        p = policy.gaussian_logp(mean.expand_as(x), log_std, x)
        q = policy.gaussian_logp(other_mean.expand_as(x), other_log_std, x)
        expected = torch.trapezoid(p.exp() * (p - q), x[:, 0])
        torch.testing.assert_close(policy.gaussian_kl(mean, log_std, other_mean, other_log_std), expected)

    def test_is_the_same_for_tanh_of_both(self):
        """The change of variables cancels: by quadrature over the squashed action."""
        mean, log_std, other_mean, other_log_std = (torch.tensor([x], dtype=F64) for x in (0.4, -0.8, -0.2, -0.5))
        u = torch.linspace(-9, 9, 40_001, dtype=F64)[:, None]
        p = policy.squashed_gaussian_logp(mean.expand_as(u), log_std, u)
        q = policy.squashed_gaussian_logp(other_mean.expand_as(u), other_log_std, u)
        expected = torch.trapezoid(p.exp() * (p - q), u[:, 0].tanh())
        torch.testing.assert_close(
            policy.gaussian_kl(mean, log_std, other_mean, other_log_std), expected, rtol=1e-5, atol=0
        )

    def test_is_zero_at_equality_and_never_negative(self):
        mean, log_std = randn(500, 3, grad=False), randn(500, 3, seed=1, grad=False)
        assert not policy.gaussian_kl(mean, log_std, mean, log_std).any()
        for scale in (1e-6, 1e-3, 1.0):
            moved = [x + scale * randn(500, 3, seed=seed, grad=False) for seed, x in ((2, mean), (3, log_std))]
            found = policy.gaussian_kl(mean, log_std, *moved)
            assert found.min() > -1e-15 and found.max() > 0

    def test_keeps_its_precision_for_tiny_changes_of_the_deviation(self):
        step = torch.tensor([1e-4], dtype=torch.float32)  # naively, exp(2 step) - 1 - 2 step is rounding noise
        zero = torch.zeros(1)
        assert policy.gaussian_kl(zero, step, zero, zero).item() == pytest.approx(1e-8, rel=0.1)

    def test_gradcheck(self):
        assert gradcheck(policy.gaussian_kl, tuple(randn(4, 3, seed=seed) for seed in range(4)))

    def test_shapes_do_not_broadcast(self):
        with pytest.raises(AssertionError):
            policy.gaussian_kl(torch.zeros(4, 3), torch.zeros(4, 3), torch.zeros(3), torch.zeros(3))


class TestCategorical:
    masked = (0.3, -math.inf, 1.0, -2.0)

    def test_logp_and_entropy_agree_with_torch_distributions(self):
        logits = randn(5, 3, 7, grad=False) * 4
        action = torch.arange(15).reshape(5, 3) % 7
        reference = Categorical(logits=logits)
        torch.testing.assert_close(policy.categorical_logp(logits, action), reference.log_prob(action))
        torch.testing.assert_close(policy.categorical_entropy(logits), reference.entropy())

    def test_gradcheck(self):
        logits, action = randn(4, 5), torch.tensor([0, 4, 2, 2])
        assert gradcheck(lambda x: policy.categorical_logp(x, action), logits)
        assert gradcheck(policy.categorical_entropy, logits)

    def test_a_forbidden_action_leaves_entropy_and_gradients_finite(self):
        logits = leaf(*self.masked)
        allowed = torch.tensor([0.3, 1.0, -2.0], dtype=F64)
        entropy, logp = policy.categorical_entropy(logits), policy.categorical_logp(logits, torch.tensor(2))
        torch.testing.assert_close(entropy, Categorical(logits=allowed).entropy())
        torch.testing.assert_close(logp, allowed.log_softmax(-1)[1])
        (entropy + logp).backward()
        assert logits.grad.isfinite().all() and logits.grad[1] == 0

    def test_extreme_logits_do_not_overflow(self):
        logits = torch.tensor([1e4, 0.0, -1e4])
        assert policy.categorical_entropy(logits) == 0
        assert policy.categorical_logp(logits, torch.tensor(0)) == 0

    def test_a_stray_dimension_is_refused(self):
        with pytest.raises(AssertionError):
            policy.categorical_logp(torch.zeros(4, 3), torch.zeros(4, 1, dtype=torch.int64))


class TestCategoricalSample:
    @pytest.mark.parametrize("logits", [[0.0, 0.0, 0.0, 0.0], [2.0, 0.0, -1.0, 1.0], [5.0, 1.0, 0.0, 2.0]])
    def test_frequencies(self, logits):
        draws, logits = 40_000, torch.tensor(logits)
        sample = _sample(logits.expand(draws, 4), torch.Generator().manual_seed(7))
        expected = logits.softmax(-1) * draws
        assert ((sample.bincount(minlength=4) - expected) ** 2 / expected).sum() < CHI2_999[3]

    def test_rows_are_independent(self):
        sample = _sample(torch.zeros(40_000, 2, 3)[..., :2], torch.Generator().manual_seed(3))
        pairs = (2 * sample[:, 0] + sample[:, 1]).bincount(minlength=4).double()
        assert ((pairs - 10_000) ** 2 / 10_000).sum() < CHI2_999[3]

    def test_a_forbidden_action_never_comes(self):
        logits = torch.tensor([-math.inf, -80.0, -math.inf, -81.0]).expand(200_000, 4)
        sample = _sample(logits, torch.Generator().manual_seed(1))
        assert sorted(set(sample.tolist())) == [1, 3]

    def test_a_forbidden_action_never_comes_even_if_the_noise_is_zero(self, monkeypatch):
        monkeypatch.setattr(torch.Tensor, "exponential_", lambda self, generator=None: self.zero_())
        logits = torch.tensor([[-math.inf, 1.0, 3.0], [2.0, 1.0, -math.inf]])
        assert _sample(logits, None).tolist() == [2, 0]

    def test_the_generator_decides(self):
        logits = randn(3, 5, 6)
        first, second, other = (_sample(logits, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
        assert torch.equal(first, second) and not torch.equal(first, other)
        assert first.shape == (3, 5) and first.dtype == torch.int64

    def test_logits_are_left_as_they_were(self):
        logits = randn(4, 3)
        before = logits.detach().clone()
        _sample(logits, None)
        assert torch.equal(logits, before)


class TestGaussian:
    def test_logp_and_entropy_agree_with_torch_distributions(self):
        mean, action = randn(5, 2, 3), randn(5, 2, 3, seed=1)
        for log_std in (randn(3, seed=2), randn(5, 2, 3, seed=2)):
            reference = Normal(mean, log_std.exp())
            torch.testing.assert_close(policy.gaussian_logp(mean, log_std, action), reference.log_prob(action).sum(-1))
            entropy = policy.gaussian_entropy(log_std)
            torch.testing.assert_close(entropy, Normal(torch.zeros_like(log_std), log_std.exp()).entropy().sum(-1))

    def test_gradcheck(self):
        args = randn(4, 3), randn(3, seed=1), randn(4, 3, seed=2)
        assert gradcheck(policy.gaussian_logp, args)
        assert gradcheck(policy.squashed_gaussian_logp, args)
        assert gradcheck(policy.gaussian_entropy, args[1])

    def test_squashed_density_integrates_to_one(self):
        action = torch.linspace(-1, 1, 200_001, dtype=F64)[1:-1]
        pre_tanh, log_std = action.atanh()[:, None], torch.tensor([-0.3], dtype=F64)
        logp = policy.squashed_gaussian_logp(torch.full_like(pre_tanh, 0.4), log_std, pre_tanh)
        assert torch.trapezoid(logp.exp(), action).item() == pytest.approx(1, abs=1e-4)

    def test_squashed_logp_is_finite_where_tanh_saturates(self):
        pre_tanh = torch.tensor([[-60.0], [-10.0], [0.0], [10.0], [60.0]], requires_grad=True)
        mean, log_std = pre_tanh.detach(), torch.zeros(1)
        logp = policy.squashed_gaussian_logp(mean, log_std, pre_tanh)
        log_det = 2 * (math.log(2) - pre_tanh[:, 0].abs()) + torch.tensor([0, 0, -2 * math.log(2), 0, 0])
        torch.testing.assert_close(logp, -0.5 * math.log(2 * math.pi) - log_det, rtol=1e-6, atol=1e-6)
        logp.sum().backward()
        torch.testing.assert_close(pre_tanh.grad[:, 0], torch.tensor([-2.0, -2, 0, 2, 2]))


class TestMaskedMean:
    def test_is_the_mean_under_weights(self):
        x, weight = leaf(1, 2, 3, 4), torch.tensor([1, 0, 0.5, 0.5], dtype=F64)
        assert policy.masked_mean(x, weight).item() == (1 + 1.5 + 2) / 2

    def test_live_rows_may_be_given_as_booleans(self):
        assert policy.masked_mean(torch.tensor([1.0, 5.0, 3.0]), torch.tensor([True, False, True])) == 2

    @pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
    def test_what_has_no_weight_contributes_nothing_not_even_to_the_gradient(self, poison):
        x = leaf(1, poison, 3)
        mean = policy.masked_mean(x, torch.tensor([1.0, 0, 1], dtype=F64))
        mean.backward()
        assert mean.item() == 2 and x.grad.tolist() == [0.5, 0, 0.5]

    def test_no_weight_at_all_is_zero_with_zero_gradient(self):
        x = leaf(1, math.nan)
        mean = policy.masked_mean(x, torch.zeros(2, dtype=F64))
        mean.backward()
        assert mean.item() == 0 and x.grad.tolist() == [0, 0]

    def test_gradcheck(self):
        weight = torch.tensor([0.3, 0, 1, 0.7], dtype=F64)
        assert gradcheck(lambda x: policy.masked_mean(x, weight), randn(4))

    def test_shapes_do_not_broadcast(self):
        with pytest.raises(AssertionError):
            policy.masked_mean(torch.zeros(3, 2), torch.ones(3))


def test_the_closed_form_of_logp_and_entropy_is_that_of_autograd():
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(7, 4, dtype=torch.float64, generator=generator)
    action = torch.randint(0, 4, (7,), generator=generator)
    a, b = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    weights = torch.randn(2, 7, dtype=torch.float64, generator=generator)
    logp, entropy = policy.categorical_logp_entropy(a, action)
    (weights[0] @ logp + weights[1] @ entropy).backward()
    (weights[0] @ policy.categorical_logp(b, action) + weights[1] @ policy.categorical_entropy(b)).backward()
    torch.testing.assert_close(logp, policy.categorical_logp(b, action))
    torch.testing.assert_close(entropy, policy.categorical_entropy(b))
    torch.testing.assert_close(a.grad, b.grad)
    assert gradcheck(lambda x: policy.categorical_logp_entropy(x, action), (logits.clone().requires_grad_(),))


def test_the_closed_form_is_finite_with_a_forbidden_action():
    logits = torch.tensor([[0.0, float("-inf"), 1.0]], requires_grad=True)
    logp, entropy = policy.categorical_logp_entropy(logits, torch.tensor([2]))
    (logp.sum() + entropy.sum()).backward()
    assert torch.isfinite(logp).all() and torch.isfinite(entropy).all() and torch.isfinite(logits.grad).all()
    assert logits.grad[0, 1] == 0
