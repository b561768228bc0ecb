"""Auxiliary tasks: pixel changes and their Q targets against plain loops, losses and weights by hand."""

import itertools
import math

import numpy as np
import pytest
import torch

from rookery.ops.auxiliary import (
    balanced_weight,
    pixel_change,
    pixel_control_loss,
    pixel_control_target,
    reconstruction_loss,
    reward_class,
    reward_prediction_loss,
)
from rookery.ops.returns import discounts

GAMMA = 0.9


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def bytes_of(*shape, seed=0):
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=seeded(seed))


def ends(text):
    """Discount and continuation of one lane, one letter per row: '.' goes on, 'T' terminated, 'U' truncated."""
    terminated = torch.tensor([c == "T" for c in text])[:, None]
    truncated = torch.tensor([c == "U" for c in text])[:, None]
    return discounts(terminated, truncated, GAMMA, dtype=torch.float64)


def same(x, y):
    torch.testing.assert_close(x, y, atol=1e-10, rtol=1e-10)


# Pixel changes


def naive_change(frames, cell, cells):
    """Straight from the definition, pixel by pixel; frames as floats in [0, 1]."""
    steps, lanes, channels, height, width = frames.shape
    top, left = (height - cells[0] * cell) // 2, (width - cells[1] * cell) // 2
    out = np.zeros((steps - 1, lanes, *cells))
    for t, b, i, j in itertools.product(*map(range, out.shape)):
        total = 0.0
        for c, y, x in itertools.product(range(channels), range(cell), range(cell)):
            row, column = top + i * cell + y, left + j * cell + x
            total += abs(frames[t + 1, b, c, row, column] - frames[t, b, c, row, column])
        out[t, b, i, j] = total / (channels * cell * cell)
    return torch.tensor(out)


@pytest.mark.parametrize(
    "shape, cell, cells", [((1, 8, 8), 4, (2, 2)), ((3, 7, 10), 3, (2, 3)), ((2, 5, 4), 1, (5, 4))]
)
def test_a_change_is_the_naive_mean(shape, cell, cells):
    frames = bytes_of(4, 2, *shape)
    expected = naive_change(frames.numpy() / 255, cell, cells)
    torch.testing.assert_close(pixel_change(frames, cell).double(), expected, atol=1e-6, rtol=0)
    same(pixel_change(frames.double() / 255, cell), expected)


def test_bytes_do_not_wrap_around():
    """255 - 0 and 0 - 255 are both a change of 1: a difference of bytes would give 1/255 for one of them."""
    frames = torch.tensor([0, 255, 0], dtype=torch.uint8).view(3, 1, 1, 1, 1).expand(3, 1, 1, 4, 4)
    assert pixel_change(frames, 4).flatten().tolist() == [1.0, 1.0]


def test_golden_change():
    frames = torch.zeros(2, 1, 1, 4, 4, dtype=torch.uint8)
    frames[1, 0, 0, 0, 0] = 255  # one of the four pixels of the first cell
    frames[1, 0, 0, 2:, 2:] = 51
    torch.testing.assert_close(pixel_change(frames, 2), torch.tensor([[[[0.25, 0.0], [0.0, 0.2]]]]))


def test_no_change_is_zero():
    frames = bytes_of(1, 3, 2, 12, 12).expand(5, 3, 2, 12, 12)
    assert not pixel_change(frames, 4).any()


def test_unreal_takes_the_central_80_pixels_of_84():
    """84 is a multiple of 4: without `cells` there would be 21 of them, beginning at the border."""
    frames = bytes_of(3, 2, 1, 84, 84)
    change = pixel_change(frames, 4, (20, 20))
    assert change.shape == (2, 2, 20, 20)
    assert torch.equal(change, pixel_change(frames[..., 2:-2, 2:-2], 4))
    assert pixel_change(frames, 4).shape == (2, 2, 21, 21)
    frames[..., :2, :], frames[..., -2:, :], frames[..., :2], frames[..., -2:] = 0, 1, 2, 3
    assert torch.equal(change, pixel_change(frames, 4, (20, 20)))  # the border does not count


def test_what_does_not_fit_is_refused():
    for cell, cells in ((0, None), (9, None), (4, (3, 2)), (4, (0, 1))):
        with pytest.raises(AssertionError):
            pixel_change(bytes_of(2, 1, 1, 8, 8), cell, cells)
    with pytest.raises(AssertionError):
        pixel_change(bytes_of(2, 1, 8, 8), 4)
    with pytest.raises(AssertionError):
        pixel_change(torch.zeros(2, 1, 1, 8, 8, dtype=torch.int32), 4)


# Their Q targets


def column(*values):
    """One lane of one cell, [T, 1, 1, 1]."""
    return torch.tensor(values, dtype=torch.float64).view(-1, 1, 1, 1)


def best(*values):
    """Q of two actions whose larger one is given, now the first and now the second, [T+1, 1, 2, 1, 1]."""
    pairs = [(v, v - 5) if i % 2 else (v - 1, v) for i, v in enumerate(values)]
    return torch.tensor(pairs, dtype=torch.float64).view(-1, 1, 2, 1, 1)


REWARD, Q = column(1, 0, 2), best(10, 20, 30, 40)


class TestTarget:
    def test_bootstraps_from_the_best_action_at_the_unrolls_end(self):
        expected = column(1 + 0.9 * (0.9 * (2 + 0.9 * 40)), 0.9 * (2 + 0.9 * 40), 2 + 0.9 * 40)
        same(pixel_control_target(REWARD, *ends("..."), Q), expected)

    def test_terminated_cuts(self):
        same(pixel_control_target(REWARD, *ends(".T."), Q), column(1, 0, 2 + 0.9 * 40))

    def test_truncation_bootstraps_from_the_final_observation(self):
        same(pixel_control_target(REWARD, *ends(".U."), Q), column(1 + 0.81 * 30, 0.9 * 30, 2 + 0.9 * 40))

    def test_a_dead_row_reaches_no_live_one(self):
        """Row 2 follows an end: its change, from the final frame to the reset one, is large and means nothing."""
        for end in "TU":
            calm, wild = (
                pixel_control_target(column(1, 0, x, 2), *ends(f".{end}.."), best(1, 2, 3, 4, 5)) for x in (0, 99)
            )
            assert torch.equal(calm[[0, 1, 3]], wild[[0, 1, 3]])

    def test_two_episodes_in_one_trace_are_two_traces(self):
        for end in "TU":
            discount, continues = ends(f".{end}..")
            reward, q = column(3, 1, 4, 1), best(5, 9, 2, 6, 5)
            whole = pixel_control_target(reward, discount, continues, q)
            first = pixel_control_target(reward[:2], discount[:2], continues[:2], q[:3])
            second = pixel_control_target(reward[2:], discount[2:], continues[2:], q[2:])
            same(whole, torch.cat([first, second]))

    def test_is_the_naive_sum_for_every_lane_and_cell(self):
        T, B, A, h, w = 7, 4, 3, 2, 3
        reward = torch.rand(T, B, h, w, generator=seeded(), dtype=torch.float64)
        q = torch.randn(T + 1, B, A, h, w, generator=seeded(1), dtype=torch.float64)
        terminated, truncated = torch.rand(2, T, B, generator=seeded(2)) < 0.2
        expected = torch.zeros(T, B, h, w, dtype=torch.float64)
        for start, b, i, j in itertools.product(*map(range, expected.shape)):
            for t in range(start, T):
                expected[start, b, i, j] += GAMMA ** (t - start) * reward[t, b, i, j]
                if terminated[t, b] or truncated[t, b] or t == T - 1:
                    if not terminated[t, b]:
                        expected[start, b, i, j] += GAMMA ** (t + 1 - start) * max(q[t + 1, b, :, i, j].tolist())
                    break
        same(pixel_control_target(reward, *discounts(terminated, truncated, GAMMA, torch.float64), q), expected)

    def test_carries_no_gradient_and_leaves_its_inputs(self):
        q = Q.clone().requires_grad_()
        inputs = (REWARD.clone(), *ends(".U."))
        before = [x.clone() for x in inputs]
        assert not pixel_control_target(*inputs, q).requires_grad
        assert all(torch.equal(x, y) for x, y in zip(inputs, before)) and torch.equal(q, Q)

    def test_a_wrong_shape_is_refused(self):
        discount, continues = ends("...")
        for args in (
            (REWARD, discount[:2], continues, Q),
            (REWARD, discount, continues[:2], Q),
            (REWARD, discount, continues, Q[:3]),
            (REWARD, discount, continues, Q[:, :, 0]),
            (REWARD[..., 0], discount, continues, Q),
        ):
            with pytest.raises(AssertionError):
                pixel_control_target(*args)


class TestPixelControlLoss:
    def test_golden(self):
        q = torch.zeros(1, 1, 2, 1, 2)
        q[0, 0, 1] = torch.tensor([1.0, 3.0])
        target = torch.tensor([[[[0.0, 1.0]]]])
        assert pixel_control_loss(q, torch.tensor([[1]]), target).tolist() == [[0.5 * (1 + 4) / 2]]
        assert pixel_control_loss(q, torch.tensor([[0]]), target).tolist() == [[0.5 * (0 + 1) / 2]]

    def test_is_the_naive_mean_and_only_the_action_taken_gets_a_gradient(self):
        T, B, A, h, w = 3, 2, 4, 2, 5
        q = torch.randn(T, B, A, h, w, generator=seeded(), dtype=torch.float64, requires_grad=True)
        action = torch.randint(0, A, (T, B), generator=seeded(1))
        target = torch.randn(T, B, h, w, generator=seeded(2), dtype=torch.float64)
        loss = pixel_control_loss(q, action, target)
        assert loss.shape == (T, B)
        loss.sum().backward()
        for t, b in itertools.product(range(T), range(B)):
            error = q[t, b, action[t, b]].detach() - target[t, b]
            same(loss[t, b].detach(), 0.5 * (error**2).sum() / (h * w))
            expected = torch.zeros(A, h, w, dtype=torch.float64)
            expected[action[t, b]] = error / (h * w)
            same(q.grad[t, b], expected)

    def test_the_papers_sum_is_this_mean_times_the_number_of_cells(self):
        q, target = torch.randn(2, 3, 4, 20, 20, generator=seeded()), torch.rand(2, 3, 20, 20, generator=seeded(1))
        action = torch.randint(0, 4, (2, 3), generator=seeded(2))
        taken = torch.stack([torch.stack([q[t, b, action[t, b]] for b in range(3)]) for t in range(2)])
        summed = 0.5 * (taken - target).square().sum((-2, -1))
        torch.testing.assert_close(400 * pixel_control_loss(q, action, target), summed)

    def test_gradcheck(self):
        q = torch.randn(2, 2, 3, 2, 2, generator=seeded(), dtype=torch.float64, requires_grad=True)
        target = torch.randn(2, 2, 2, 2, generator=seeded(1), dtype=torch.float64)
        action = torch.tensor([[0, 2], [1, 1]])
        assert torch.autograd.gradcheck(lambda q: pixel_control_loss(q, action, target), q)

    def test_a_wrong_shape_is_refused(self):
        q, action, target = torch.zeros(2, 3, 4, 5, 5), torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3, 5, 5)
        for args in ((q[0], action, target), (q, action[0], target), (q, action, target[..., :1])):
            with pytest.raises(AssertionError):
                pixel_control_loss(*args)


# Reward prediction


def test_classes_are_zero_positive_negative():
    classes = reward_class(torch.tensor([[0.0, 1e-30, -1e-30], [-0.0, 7.0, -7.0]]))
    assert classes.tolist() == [[0, 1, 2], [0, 1, 2]] and classes.dtype == torch.int64
    assert reward_class(torch.tensor([3, 0, -3])).tolist() == [1, 0, 2]


def test_golden_reward_prediction_loss():
    reward = torch.tensor([0.0, 2.0, -2.0])
    loss = reward_prediction_loss(torch.tensor([1.0, 2.0, 3.0]).log().expand(3, 3), reward)
    torch.testing.assert_close(loss, torch.tensor([math.log(6), math.log(3), math.log(2)]))
    torch.testing.assert_close(reward_prediction_loss(torch.zeros(3, 3), reward), torch.full((3,), math.log(3)))


def test_reward_prediction_loss_takes_any_leading_axes_and_checks_them():
    logits, reward = torch.randn(4, 2, 3, generator=seeded()), torch.randn(4, 2, generator=seeded(1))
    loss = reward_prediction_loss(logits, reward)
    assert loss.shape == (4, 2)
    assert torch.equal(loss.flatten(), reward_prediction_loss(logits.flatten(0, 1), reward.flatten()))
    for args in ((logits, reward[:, :1]), (logits[..., :2], reward)):
        with pytest.raises(AssertionError):
            reward_prediction_loss(*args)


def test_gradcheck_of_reward_prediction():
    logits = torch.randn(6, 3, generator=seeded(), dtype=torch.float64, requires_grad=True)
    reward = torch.tensor([0.0, 1, -1, 0, 2, -2])
    assert torch.autograd.gradcheck(lambda x: reward_prediction_loss(x, reward), logits)


# Skewed draws


def rewarding(T, B, *places):
    reward = torch.zeros(T, B)
    for i, (row, lane) in enumerate(places):
        reward[row, lane] = (-1) ** i  # a punishment is a reward too
    return reward


def test_rewarding_rows_weigh_one_half_however_few_there_are():
    reward = torch.tensor([[0.0, 2.0], [0.0, 0.0], [-1.0, 0.0], [0.0, 5.0]])
    usable = torch.tensor([[True, True], [True, True], [True, True], [True, False]])
    expected = torch.tensor([[0.1, 0.25], [0.1, 0.1], [0.25, 0.1], [0.1, 0.0]])
    torch.testing.assert_close(balanced_weight(reward, usable), expected)


@pytest.mark.parametrize("value", [0.0, 3.0])
def test_if_a_kind_is_missing_the_other_has_all_the_weight(value):
    weight = balanced_weight(torch.full((2, 2), value), torch.tensor([[True, True], [True, False]]))
    torch.testing.assert_close(weight, torch.tensor([[1 / 3, 1 / 3], [1 / 3, 0.0]]))


def test_without_usable_rows_nothing_weighs():
    assert not balanced_weight(torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.bool)).any()


def test_weights_need_a_mask_of_the_same_shape():
    for usable in (torch.ones(3, 1, dtype=torch.bool), torch.ones(3, 2)):
        with pytest.raises(AssertionError):
            balanced_weight(torch.zeros(3, 2), usable)


# Reconstruction


def test_golden_reconstruction_loss():
    predicted, target = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]), torch.tensor([[[1.0, 0.0], [0.0, 4.0]]])
    torch.testing.assert_close(reconstruction_loss(predicted, target), torch.tensor([0.5 * (4 + 9) / 4]))
    torch.testing.assert_close(reconstruction_loss(predicted, target, lead=2), torch.tensor([[0.5 * 2, 0.5 * 4.5]]))
    assert not reconstruction_loss(target, target).any()


def test_rows_of_the_reconstruction_loss_are_those_of_each_row_alone():
    predicted, target = torch.randn(2, 3, 2, 4, 5, 2, generator=seeded(), dtype=torch.float64)
    loss = reconstruction_loss(predicted, target, lead=2)
    assert loss.shape == (3, 2)
    for t, b in itertools.product(range(3), range(2)):
        error = (predicted[t, b] - target[t, b]).flatten().tolist()
        assert math.isclose(loss[t, b], sum(x * x for x in error) / len(error) / 2)


def test_a_row_may_be_one_number_and_there_may_be_no_rows():
    assert reconstruction_loss(torch.tensor([1.0, 3.0]), torch.zeros(2)).tolist() == [0.5, 4.5]
    assert reconstruction_loss(torch.zeros(0, 3, 4), torch.zeros(0, 3, 4)).shape == (0,)


def test_a_reconstruction_of_another_shape_is_refused():
    for args in ((torch.zeros(3, 4), torch.zeros(3, 1)), (torch.zeros(3), torch.zeros(3), 2), (*torch.zeros(2, 3), 0)):
        with pytest.raises(AssertionError):
            reconstruction_loss(*args)


def test_gradcheck_of_the_reconstruction():
    predicted = torch.randn(2, 3, 2, generator=seeded(), dtype=torch.float64, requires_grad=True)
    target = torch.randn(2, 3, 2, generator=seeded(1), dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: reconstruction_loss(x, target), predicted)
