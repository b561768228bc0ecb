"""Returns against golden vectors, the papers' naive sums in plain numpy, and the identities between them."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rookery.ops.returns import backward_scan, discounts, gae, nstep_return, vtrace
from rookery.ops.value import value_loss

GAMMA, LAM = 0.9, 0.8
exact = settings(deadline=None, max_examples=80, derandomize=True)


def column(*values):
    """One environment's trace as a [T, 1] tensor."""
    return torch.tensor(values, dtype=torch.float64)[:, None]


def ends(text, gamma=GAMMA):
    """Discount and continuation of a trace in one letter per row: '.' goes on, 'T' terminated, 'U' truncated."""
    terminated = torch.tensor([c == "T" for c in text])[:, None]
    truncated = torch.tensor([c == "U" for c in text])[:, None]
    return discounts(terminated, truncated, gamma, dtype=torch.float64)


def close(x, expected, rows=slice(None)):
    torch.testing.assert_close(x[rows, 0], torch.tensor(expected, dtype=torch.float64), atol=1e-9, rtol=0)


REWARD, VALUE = column(1, 0, 2), column(0.5, 1, -0.5, 2)
# The same trace as it arrives with an end after row 1: row 2 is not live, and its observation is the final one.
LIVE = [0, 1, 3]
END_REWARD, END_VALUE = column(1, 0, 0, 2), column(0.5, 1, 3, -0.5, 2)


class TestGoldenGae:
    def test_g0_no_end(self):
        advantage = gae(REWARD, *ends("..."), VALUE, LAM)
        close(advantage, [2.58512, 1.646, 4.3])
        close(advantage + VALUE[:-1], [3.08512, 2.646, 3.8])

    def test_g1_terminated(self):
        advantage = gae(END_REWARD, *ends(".T.."), END_VALUE, LAM)
        close(advantage, [0.68, -1, 4.3], LIVE)
        close(advantage + END_VALUE[:-1], [1.18, 0, 3.8], LIVE)

    def test_g2_truncated_bootstraps_from_the_final_observation(self):
        advantage = gae(END_REWARD, *ends(".U.."), END_VALUE, LAM)
        close(advantage, [2.624, 1.7, 4.3], LIVE)
        close(advantage + END_VALUE[:-1], [3.124, 2.7, 3.8], LIVE)

    def test_g4_is_what_a_reset_observation_would_give(self):
        right = gae(END_REWARD, *ends(".U.."), END_VALUE, LAM)
        wrong = gae(REWARD, *ends(".U."), VALUE, LAM)  # the final observation was lost: row 1 is followed by the reset
        close(wrong, [0.356, -1.45, 4.3])
        assert not torch.allclose(right[LIVE], wrong)

    def test_g5_is_what_a_leaking_trace_would_give(self):
        discount, continues = ends(".U.")
        value = column(0.5, 1, 3, 2)
        delta = REWARD + discount * value[1:] - column(0.5, 1, -0.5)
        leaking = backward_scan(delta, discount * LAM)
        close(leaking, [4.85312, 4.796, 4.3])
        close(backward_scan(delta, discount * continues * LAM), [2.624, 1.7, 4.3])

    def test_p5_end_belongs_to_the_row_that_earned_the_reward(self):
        whole = gae(REWARD, *ends("..."), VALUE, LAM)
        cut = gae(REWARD, *ends("T.."), VALUE, LAM)
        close(cut, [1 - 0.5], slice(0, 1))
        assert torch.equal(cut[1:], whole[1:])


class TestGoldenVtrace:
    ratio = column(0.5, 2, 1.5)

    def test_vt1_on_policy(self):
        vs, pg = vtrace(torch.zeros(3, 1, dtype=torch.float64), REWARD, *ends("..."), VALUE)
        close(vs, [4.078, 3.42, 3.8])
        close(pg, [3.578, 2.42, 4.3])

    def test_vt2_clipped_at_one(self):
        vs, pg = vtrace(self.ratio.log(), REWARD, *ends("..."), VALUE)
        close(vs, [2.289, 3.42, 3.8])
        close(pg, [1.789, 2.42, 4.3])
        values_instead_of_targets = torch.tensor([0.7, -1.45, 4.3], dtype=torch.float64)
        assert not torch.allclose(pg[:, 0], values_instead_of_targets)

    def test_vt3_three_separate_clips(self):
        vs, pg = vtrace(self.ratio.log(), REWARD, *ends("..."), VALUE, rho_clip=3, c_clip=1, pg_rho_clip=1)
        close(vs, [2.50725, 3.905, 5.95])
        close(pg, [2.00725, 4.355, 4.3])

    def test_vt4_zero_discount_cuts_bootstrap_and_trace(self):
        discount, continues = ends("...")
        discount[1] = 0
        for trace in (continues, torch.where(discount == 0, 0.0, continues)):
            vs, pg = vtrace(self.ratio.log(), REWARD, discount, trace, VALUE)
            close(vs, [0.75, 0, 3.8])
            close(pg, [0.25, -1, 4.3])

    def test_truncation_bootstraps_from_the_value_not_from_the_next_target(self):
        log_rho = column(0.5, 2, 0.3, 1.5).log()
        vs, pg = vtrace(log_rho, END_REWARD, *ends(".U.."), END_VALUE)
        close(vs, [0.5 + 0.5 * (1 + 0.9 - 0.5 + 0.9 * (2.7 - 1)), 2.7, 3.8], LIVE)
        close(pg, [0.5 * (1 + 0.9 * 2.7 - 0.5), 0.9 * 3 - 1, 4.3], LIVE)

    def test_c_clip_above_rho_clip_is_refused(self):
        with pytest.raises(AssertionError):
            vtrace(self.ratio.log(), REWARD, *ends("..."), VALUE, rho_clip=1, c_clip=2)

    def test_an_overflowing_ratio_is_clipped_not_infinite(self):
        vs, pg = vtrace(column(1e4, -1e4, 0), REWARD, *ends("..."), VALUE)
        assert vs.isfinite().all() and pg.isfinite().all()


class TestGoldenNstep:
    reward, value = column(1, 2, 3, 4), column(10, 20, 30, 40, 50)

    def test_n1_terminated(self):
        close(nstep_return(self.reward, *ends("...T"), self.value, n=3), [5.23 + 0.729 * 40, 7.94, 6.6, 4])

    def test_n2_truncated(self):
        expected = [5.23 + 0.729 * 40, 7.94 + 0.729 * 50, 6.6 + 0.81 * 50, 4 + 0.9 * 50]
        close(nstep_return(self.reward, *ends("...U"), self.value, n=3), expected)
        close(nstep_return(self.reward, *ends("...."), self.value, n=3), expected)  # the unroll's end cuts like a limit

    def test_p8_constant_value_and_no_reward_give_the_power_of_gamma(self):
        target = nstep_return(torch.zeros_like(self.reward), *ends("...."), torch.ones_like(self.value), n=3)
        close(target, [0.9**3, 0.9**3, 0.9**2, 0.9])

    def test_zero_steps_are_refused(self):
        with pytest.raises(AssertionError):
            nstep_return(self.reward, *ends("...."), self.value, n=0)


# Naive sums: straight from the papers, one environment and one start at a time, no recursion.


def naive_gae(r, v, term, trunc, gamma, lam):
    out = np.zeros(len(r))
    for s in range(len(r)):
        for t in range(s, len(r)):
            delta = r[t] + gamma * (0 if term[t] else v[t + 1]) - v[t]
            out[s] += (gamma * lam) ** (t - s) * delta
            if term[t] or trunc[t]:
                break
    return out


def naive_nstep(r, v, term, trunc, gamma, n):
    out = np.zeros(len(r))
    for s in range(len(r)):
        for k in range(n):
            out[s] += gamma**k * r[s + k]
            last = s + k
            if term[last] or trunc[last] or last + 1 == len(r):
                break
        out[s] += 0 if term[last] else gamma ** (last + 1 - s) * v[last + 1]
    return out


def naive_vtrace(ratio, r, v, term, trunc, gamma, lam, rho_clip, c_clip, pg_clip):
    rho, c, pg_rho = np.minimum(rho_clip, ratio), lam * np.minimum(c_clip, ratio), np.minimum(pg_clip, ratio)
    vs, pg = v[:-1].copy(), np.zeros(len(r))
    for s in range(len(r)):
        for t in range(s, len(r)):
            delta = rho[t] * (r[t] + gamma * (0 if term[t] else v[t + 1]) - v[t])
            vs[s] += gamma ** (t - s) * np.prod(c[s:t]) * delta
            if term[t] or trunc[t]:
                break
    for s in range(len(r)):
        cut = trunc[s] or s + 1 == len(r)
        follower = 0 if term[s] else v[s + 1] if cut else lam * vs[s + 1] + (1 - lam) * v[s + 1]
        pg[s] = pg_rho[s] * (r[s] + gamma * follower - v[s])
    return vs, pg


@st.composite
def traces(draw):
    """Random numbers, adversarial episode ends: (reward, value, log_rho, terminated, truncated), [T, B] each."""
    T, B = draw(st.integers(1, 10)), draw(st.integers(1, 3))
    kind = draw(st.lists(st.sampled_from([0, 0, 0, 1, 2, 3]), min_size=T * B, max_size=T * B))
    kind = np.array(kind).reshape(T, B)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return rng.normal(size=(T, B)), rng.normal(size=(T + 1, B)), rng.normal(size=(T, B)), kind % 2 == 1, kind >= 2


def tensors(reward, value, log_rho, terminated, truncated, gamma):
    discount, continues = discounts(*map(torch.tensor, (terminated, truncated)), gamma, dtype=torch.float64)
    return torch.tensor(log_rho), torch.tensor(reward), discount, continues, torch.tensor(value)


def per_lane(fn, *arrays):
    """Apply a naive function lane by lane and stack its results as [..., T, B]."""
    lanes = [np.asarray(fn(*(a[:, b] for a in arrays))) for b in range(arrays[0].shape[1])]
    return torch.tensor(np.stack(lanes, axis=-1))


def same(x, y):
    torch.testing.assert_close(x, y, atol=1e-10, rtol=1e-10)


unit = st.sampled_from([0.0, 0.5, 0.97, 1.0])


@exact
@given(traces(), unit, unit)
def test_gae_is_the_naive_sum(trace, gamma, lam):
    r, v, _, term, trunc = trace
    _, *args = tensors(*trace, gamma)
    same(gae(*args, lam), per_lane(lambda *a: naive_gae(*a, gamma, lam), r, v, term, trunc))


@exact
@given(traces(), unit, st.integers(1, 12))
def test_nstep_return_is_the_naive_sum(trace, gamma, n):
    r, v, _, term, trunc = trace
    _, *args = tensors(*trace, gamma)
    same(nstep_return(*args, n=n), per_lane(lambda *a: naive_nstep(*a, gamma, n), r, v, term, trunc))
    same(nstep_return(*args), per_lane(lambda *a: naive_nstep(*a, gamma, len(r)), r, v, term, trunc))


@exact
@given(traces(), unit, unit, st.sampled_from([(1, 1, 1), (3, 1, 1), (2, 2, 0.5), (math.inf, 1.5, math.inf)]))
def test_vtrace_is_the_naive_sum(trace, gamma, lam, clips):
    r, v, log_rho, term, trunc = trace
    result = vtrace(*tensors(*trace, gamma), lam, *clips)
    expected = per_lane(lambda *a: naive_vtrace(*a, gamma, lam, *clips), np.exp(log_rho), r, v, term, trunc)
    same(result.vs, expected[0])
    same(result.pg_advantage, expected[1])


@exact
@given(traces(), unit)
def test_gae_with_lam_0_is_the_td_error_and_with_lam_1_the_return(trace, gamma):
    _, reward, discount, continues, value = tensors(*trace, gamma)
    same(gae(reward, discount, continues, value, 0.0), reward + discount * value[1:] - value[:-1])
    same(gae(reward, discount, continues, value, 1.0), nstep_return(reward, discount, continues, value) - value[:-1])


@exact
@given(traces(), unit, unit)
def test_on_policy_vtrace_is_the_return_and_with_lam_it_is_gae(trace, gamma, lam):
    log_rho, *args = tensors(*trace, gamma)
    on_policy = torch.zeros_like(log_rho)
    same(vtrace(on_policy, *args).vs, nstep_return(*args))
    result = vtrace(on_policy, *args, lam=lam)
    same(result.vs - args[-1][:-1], gae(*args, lam))
    same(result.pg_advantage, gae(*args, lam))


@exact
@given(traces(), unit, unit, st.sampled_from([0.5, 1.0, 2.0]))
def test_with_equal_clips_the_pg_advantage_is_vs_minus_value(trace, gamma, lam, clip):
    log_rho, reward, discount, continues, value = tensors(*trace, gamma)
    result = vtrace(log_rho, reward, discount, continues, value, lam, clip, clip, clip)
    same(result.pg_advantage, result.vs - value[:-1])


@exact
@given(traces(), st.integers(1, 9), st.booleans())
def test_two_episodes_in_one_trace_are_two_traces(trace, cut, terminal):
    reward, value, log_rho, term, trunc = (x.copy() for x in trace)
    cut = min(cut, len(reward))
    term[cut - 1], trunc[cut - 1] = terminal, not terminal
    whole = tensors(reward, value, log_rho, term, trunc, GAMMA)
    first = [x[:cut] for x in whole[:-1]] + [whole[-1][: cut + 1]]
    second = [x[cut:] for x in whole]
    for fn in (
        lambda *a: gae(*a[1:], LAM),
        lambda *a: nstep_return(*a[1:], n=3),
        lambda *a: torch.stack(vtrace(*a), 1),
    ):
        parts = [fn(*first)] + ([fn(*second)] if cut < len(reward) else [])
        same(fn(*whole), torch.cat(parts))


def test_what_a_dead_row_holds_never_reaches_a_live_one():
    results = []
    for junk in (0.0, 1e6):
        reward, value = column(1, 0, junk, 2), column(0.5, 1, 3, -0.5, 2)
        args = (reward, *ends(".U.."), value)
        results.append((gae(*args, LAM), nstep_return(*args), *vtrace(column(0.2, 0.1, junk, 0.3), *args)))
    for clean, dirty in zip(*results):
        assert torch.equal(clean[LIVE], dirty[LIVE])


def test_targets_carry_no_gradient_and_the_value_gradient_is_value_minus_target():
    value = VALUE.clone().requires_grad_()
    log_rho = torch.zeros(3, 1, dtype=torch.float64, requires_grad=True)
    args = (REWARD, *ends("..."), value)
    vs, pg = vtrace(log_rho, *args)
    results = (vs, pg, gae(*args, LAM), nstep_return(*args), nstep_return(*args, n=2))
    assert not any(x.requires_grad for x in results)
    value_loss(value[:-1], vs).sum().backward()
    torch.testing.assert_close(value.grad[:-1], (value[:-1] - vs).detach())
    assert value.grad[-1] == 0 and log_rho.grad is None


def test_targets_can_be_saved_for_backward():
    parameter = torch.ones(3, 1, dtype=torch.float64, requires_grad=True)
    (parameter * gae(REWARD, *ends("..."), VALUE, LAM)).sum().backward()
    close(parameter.grad, [2.58512, 1.646, 4.3])


def test_inputs_are_left_as_they_were():
    args = (REWARD.clone(), *ends(".U."), VALUE.clone())
    before = [x.clone() for x in args]
    log_rho = torch.zeros(3, 1, dtype=torch.float64)
    gae(*args, LAM), nstep_return(*args), nstep_return(*args, n=2), vtrace(log_rho, *args)
    backward_scan(args[0], args[1])
    assert all(torch.equal(x, y) for x, y in zip(args, before)) and not log_rho.any()


def test_trailing_dimensions_are_independent_lanes():
    generator = torch.Generator().manual_seed(0)
    reward, value = torch.randn(5, 2, 3, generator=generator), torch.randn(6, 2, 3, generator=generator)
    discount, continues = discounts(*(torch.rand(2, 5, 2, 3, generator=generator) < 0.3), GAMMA)
    flat = [x.flatten(1) for x in (reward, discount, continues, value)]
    assert torch.equal(gae(reward, discount, continues, value, LAM).flatten(1), gae(*flat, LAM))


def test_backward_scan_reads_views_and_expanded_inputs():
    delta, decay = torch.tensor([1.0, 2.0]).expand(4, 2), torch.full((2, 4), 0.5).T
    expected = torch.tensor([1.875, 1.75, 1.5, 1.0])
    torch.testing.assert_close(backward_scan(delta, decay), torch.stack([expected, 2 * expected], 1))
    assert backward_scan(torch.ones(0, 2), torch.ones(0, 2)).shape == (0, 2)


def test_discounts_keep_termination_and_truncation_apart():
    terminated, truncated = torch.tensor([0, 1, 0, 1]).bool(), torch.tensor([0, 0, 1, 1]).bool()
    discount, continues = discounts(terminated, truncated, 0.5)
    assert discount.tolist() == [0.5, 0, 0.5, 0] and continues.tolist() == [1, 0, 0, 0]
    assert discount.dtype == continues.dtype == torch.float32


@pytest.mark.parametrize("field", range(4))
def test_a_wrong_shape_is_refused_not_broadcast(field):
    args = [torch.zeros(3, 2), torch.zeros(3, 2), torch.zeros(3, 2), torch.zeros(4, 2)]
    args[field] = args[field][:, :1]
    log_rho = torch.zeros(3, 2)
    for fn in (lambda *a: gae(*a, LAM), nstep_return, lambda *a: vtrace(log_rho, *a)):
        with pytest.raises(AssertionError):
            fn(*args)
    with pytest.raises(AssertionError):
        backward_scan(torch.zeros(3, 2), torch.zeros(3, 1))
    with pytest.raises(AssertionError):
        gae(*args[:3], torch.zeros(3, 2), LAM)
