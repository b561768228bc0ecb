"""Value losses: both clipped forms by their golden values and gradients; explained variance."""

import math

import pytest
import torch
from torch.autograd import gradcheck

from rookery.ops.value import clipped_value_loss, clipped_value_loss_habitat, explained_variance, value_loss

F64 = torch.float64
OLD, CLIP = torch.tensor([1.0], dtype=F64), 0.2


def both_forms(target):
    """Loss and gradient of form (a) and of form (b) at V = 1.5."""
    result = []
    for form in (clipped_value_loss, clipped_value_loss_habitat):
        value = torch.tensor([1.5], dtype=F64, requires_grad=True)
        loss = form(value, OLD, torch.tensor([target], dtype=F64), CLIP)
        loss.sum().backward()
        result.append((loss.item(), value.grad.item()))
    return result


def test_vc1_the_two_forms_differ_where_clipping_would_hide_a_worse_value():
    (loss_a, grad_a), (loss_b, grad_b) = both_forms(0.0)
    assert loss_a == pytest.approx(1.125) and grad_a == pytest.approx(1.5)
    assert loss_b == pytest.approx(0.72) and grad_b == 0


def test_vc2_the_two_forms_agree_where_clipping_is_the_pessimist():
    for loss, grad in both_forms(2.0):
        assert loss == pytest.approx(0.32) and grad == 0


def test_inside_the_clip_both_forms_are_the_plain_loss_with_its_gradient():
    target = torch.tensor([3.0], dtype=F64)
    for form in (clipped_value_loss, clipped_value_loss_habitat):
        value = torch.tensor([1.1], dtype=F64, requires_grad=True)
        loss = form(value, OLD, target, CLIP)
        torch.testing.assert_close(loss, value_loss(value, target))
        loss.sum().backward()
        torch.testing.assert_close(value.grad, value.detach() - target)


def test_value_loss_is_half_the_squared_error_so_its_gradient_is_the_error():
    value = torch.tensor([2.0, -1.0], dtype=F64, requires_grad=True)
    loss = value_loss(value, torch.tensor([5.0, -1.0], dtype=F64))
    loss.sum().backward()
    assert loss.tolist() == [4.5, 0] and value.grad.tolist() == [-3, 0]


def test_gradcheck():
    generator = torch.Generator().manual_seed(0)
    value, old, target = (torch.randn(32, dtype=F64, generator=generator) for _ in range(3))
    value.requires_grad_()
    assert gradcheck(lambda v: value_loss(v, target), value)
    assert gradcheck(lambda v: clipped_value_loss(v, old, target, 0.5), value)
    assert gradcheck(lambda v: clipped_value_loss_habitat(v, old, target, 0.5), value)


def test_shapes_do_not_broadcast():
    for call in (
        lambda: value_loss(torch.zeros(3, 1), torch.zeros(3)),
        lambda: clipped_value_loss(torch.zeros(3), torch.zeros(3, 1), torch.zeros(3), CLIP),
        lambda: clipped_value_loss_habitat(torch.zeros(3), torch.zeros(3), torch.zeros(1), CLIP),
        lambda: explained_variance(torch.zeros(3), torch.zeros(3), torch.zeros(3, 1)),
    ):
        with pytest.raises(AssertionError):
            call()


class TestExplainedVariance:
    target, weight = torch.tensor([[1.0, 2.0], [4.0, 9.0]]), torch.ones(2, 2)

    def test_one_if_perfect_or_off_by_a_constant_zero_if_constant_negative_if_harmful(self):
        assert explained_variance(self.target, self.target, self.weight) == 1
        assert explained_variance(self.target + 10, self.target, self.weight) == pytest.approx(1)
        assert explained_variance(torch.full((2, 2), 3.0), self.target, self.weight) == pytest.approx(0)
        assert explained_variance(-self.target, self.target, self.weight) == pytest.approx(-3)

    def test_rows_without_weight_do_not_exist(self):
        value, target = torch.tensor([1.0, 2.5, 3.5, math.nan]), torch.tensor([1.0, 2.0, 4.0, math.inf])
        some = explained_variance(value, target, torch.tensor([1.0, 1, 1, 0]))
        assert some == explained_variance(value[:3], target[:3], torch.ones(3))

    def test_is_zero_when_there_is_nothing_to_explain(self):
        assert explained_variance(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 3.0]), torch.ones(2)) == 0
        assert explained_variance(torch.tensor([1.0]), torch.tensor([3.0]), torch.ones(1)) == 0
        assert explained_variance(torch.tensor([1.0]), torch.tensor([3.0]), torch.zeros(1)) == 0

    def test_is_a_metric_and_carries_no_gradient(self):
        assert not explained_variance(self.target.clone().requires_grad_(), self.target, self.weight).requires_grad
