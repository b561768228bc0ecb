"""Targets of Q-learning against loops: n-step sums of sequences, values of actions, the bound of Huber's gradient."""

from __future__ import annotations

import pytest
import torch

from rookery.ops.qlearning import at_action, huber, nstep, td_target
from rookery.ops.rescale import rescaled, unrescaled
from rookery.ops.returns import discounts, nstep_return


def rows(*columns):
    return [torch.tensor(column, dtype=torch.float32).unsqueeze(1) for column in columns]


# n-step


def naive(reward, terminated, truncated, gamma, n):
    """Row by row: sum until n steps, the episode's end or the end of the rows."""
    T, B = reward.shape
    total, discount, row = torch.zeros(T, B), torch.zeros(T, B), torch.zeros(T, B, dtype=torch.int64)
    for t in range(T):
        for b in range(B):
            m = 0
            while True:
                total[t, b] += gamma**m * reward[t + m, b]
                m += 1
                if terminated[t + m - 1, b] or truncated[t + m - 1, b] or m == n or t + m == T:
                    break
            discount[t, b] = 0.0 if terminated[t + m - 1, b] else gamma**m
            row[t, b] = t + m
    return total, discount, row


@pytest.mark.parametrize("n", [1, 2, 3, 5, 50])
def test_sums_of_random_sequences_are_those_of_a_loop(n):
    """P6, P7, P85: short sums at ends, with their own power of gamma, and the row that really follows."""
    rng = torch.Generator().manual_seed(n)
    reward = torch.randn(12, 6, generator=rng)
    terminated = torch.rand(12, 6, generator=rng) < 0.15
    truncated = torch.rand(12, 6, generator=rng) < 0.15
    steps = nstep(reward, *discounts(terminated, truncated, 0.9), n)
    total, discount, row = naive(reward, terminated, truncated, 0.9, n)
    torch.testing.assert_close(steps.reward, total)
    torch.testing.assert_close(steps.discount, discount)
    assert torch.equal(steps.row, row)
    value = torch.randn(13, 6, generator=rng)
    expected = nstep_return(reward, *discounts(terminated, truncated, 0.9), value, n)
    torch.testing.assert_close(steps.reward + steps.discount * value.gather(0, steps.row), expected)


@pytest.mark.parametrize(
    "terminates, discount", [(True, [0.729, 0, 0, 0]), (False, [0.729, 0.729, 0.81, 0.9])], ids=["N1", "N2"]
)
def test_golden_sums(terminates, discount):
    """N1 and N2, P7."""
    (reward,) = rows([1, 2, 3, 4])
    end = torch.tensor([[False], [False], [False], [True]])
    no = torch.zeros_like(end)
    steps = nstep(reward, *discounts(end if terminates else no, no if terminates else end, 0.9), 3)
    torch.testing.assert_close(steps.reward[:, 0], torch.tensor([5.23, 7.94, 6.6, 4.0]))
    torch.testing.assert_close(steps.discount[:, 0], torch.tensor(discount, dtype=torch.float32))
    assert steps.row[:, 0].tolist() == [3, 4, 4, 4]


def test_the_discount_is_applied_once():
    """P8: with rewards 0 and values 1 a target is gamma^n."""
    zeros, no = torch.zeros(6, 1), torch.zeros(6, 1, dtype=torch.bool)
    steps = nstep(zeros, *discounts(no, no, 0.9), 3)
    target = td_target(steps.reward, steps.discount, torch.ones(6, 1))
    torch.testing.assert_close(target[:4, 0], torch.full((4,), 0.9**3))


def test_rows_behind_an_end_do_not_reach_rows_before_it():
    reward, terminated, truncated = torch.randn(8, 2), torch.zeros(8, 2, dtype=torch.bool), torch.zeros(8, 2).bool()
    terminated[3, 0] = truncated[4, 1] = True
    before = nstep(reward, *discounts(terminated, truncated, 0.9), 5)
    reward[4:, 0], reward[5:, 1] = 1e6, 1e6
    after = nstep(reward, *discounts(terminated, truncated, 0.9), 5)
    assert torch.equal(before.reward[:4, 0], after.reward[:4, 0])
    assert torch.equal(before.reward[:5, 1], after.reward[:5, 1])


# Targets and losses


def test_what_belongs_to_an_action():
    out, action = torch.randn(4, 3, 5), torch.tensor([[2, 0, 4], [1, 1, 1], [0, 3, 2], [4, 4, 0]])
    expected = torch.stack([torch.stack([out[t, n, action[t, n]] for n in range(3)]) for t in range(4)])
    assert torch.equal(at_action(out, action), expected)
    logits = torch.randn(4, 5, 7)
    chosen = at_action(logits, action[:, 0])
    assert chosen.shape == (4, 7) and all(torch.equal(chosen[i], logits[i, action[i, 0]]) for i in range(4))


def test_the_argmax_of_one_net_picks_a_value_of_the_other():
    """P66: the online net prefers action 0, whose value in the target net is 1."""
    online, target = torch.tensor([[3.0, 2.0]]), torch.tensor([[1.0, 5.0]])
    assert at_action(target, online.argmax(-1)).tolist() == [1.0]


def test_a_target_on_the_scale_of_roots():
    """P82."""
    reward, discount, value = torch.randn(3, 50).double().unbind(0)
    torch.testing.assert_close(td_target(reward, discount, value), reward + discount * value)
    expected = rescaled(reward + discount * unrescaled(value))
    torch.testing.assert_close(td_target(reward, discount, value, rescale=True), expected)
    golden = td_target(*(torch.tensor([x], dtype=torch.float64) for x in (1.0, 0.997, 2.0)), rescale=True)
    assert float(golden) == pytest.approx(2.15987948, abs=1e-8)


@pytest.mark.parametrize("bound", [1.0, 0.25])
def test_the_gradient_is_the_error_up_to_the_bound(bound):
    """P75: for an error of 10 the gradient with respect to the value is the bound."""
    value = torch.tensor([10.0, -10.0, 0.1, -0.1, bound], requires_grad=True)
    loss = huber(value, torch.zeros(5), bound)
    loss.sum().backward()
    loss = loss.detach()
    torch.testing.assert_close(value.grad, torch.tensor([bound, -bound, 0.1, -0.1, bound]))
    assert float(loss[2]) == pytest.approx(0.5 * 0.1**2) and float(loss[0]) == pytest.approx(bound * (10 - bound / 2))


def test_targets_are_constants_and_huber_has_its_gradient():
    value = torch.randn(20, dtype=torch.float64, requires_grad=True)
    assert not td_target(value, value, value).requires_grad
    assert torch.autograd.gradcheck(lambda x: huber(x, torch.zeros(20).double(), 0.7), value)
