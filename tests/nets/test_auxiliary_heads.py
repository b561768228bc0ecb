"""Heads of auxiliary tasks: exact shapes, the dueling identity, what they learn."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rookery.nets.auxiliary import PixelControlHead, RewardHead, transposed
from rookery.nets.flat import FlatParams
from rookery.ops.auxiliary import pixel_control_loss, reward_class, reward_prediction_loss


def make(cells=(5, 4), features=6, actions=3):
    torch.manual_seed(0)
    return PixelControlHead(features, actions, cells)


def features(*lead, width=6, seed=0):
    return torch.randn(*lead, width, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("cells", [*((n, n) for n in range(1, 13)), (20, 20), (21, 21), (1, 9), (10, 7), (52, 40)])
def test_every_grid_is_met_exactly(cells):
    q = make(cells)(features(2))
    assert q.shape == (2, 3, *cells)


@pytest.mark.parametrize("side", range(1, 60))
@pytest.mark.parametrize("stride", [1, 2, 4])
def test_a_transposed_convolution_gives_the_side_and_its_kernel_leaves_no_gap(side, stride):
    small, kernel = transposed(side, stride)
    assert small >= 1 and (small - 1) * stride + kernel == side
    assert kernel >= stride or small == 1  # a smaller kernel would leave pixels that depend on nothing


def test_20x20_cells_are_the_reference_network():
    head = make((20, 20), features=256, actions=4)
    assert head.linear.weight.shape == (32 * 9 * 9, 256)
    layer = head.deconv
    assert (layer.kernel_size, layer.stride, layer.in_channels, layer.out_channels) == ((4, 4), (2, 2), 32, 5)


@pytest.mark.parametrize("lead", [(), (4,), (3, 2), (2, 3, 2), (0,), (0, 2)])
def test_leading_axes_are_kept(lead):
    head, x = make(), features(*lead)
    q = head(x)
    assert q.shape == (*lead, 3, 5, 4)
    torch.testing.assert_close(q.reshape(-1, 3, 5, 4), head(x.reshape(-1, 6)))


def test_rows_do_not_depend_on_their_neighbours():
    head, x = make(), features(5)
    torch.testing.assert_close(head(x), torch.cat([head(x[i : i + 1]) for i in range(5)]))


def test_q_is_the_papers_dueling_sum():
    head, x = make(), features(4)
    small = F.relu(head.linear(x)).view(4, *head.map, 32).permute(0, 3, 1, 2)
    weight, bias = head.deconv.weight, head.deconv.bias
    value = F.conv_transpose2d(small, weight[:, :1], bias[:1], head.deconv.stride)
    advantage = F.conv_transpose2d(small, weight[:, 1:], bias[1:], head.deconv.stride)
    torch.testing.assert_close(head(x), value + advantage - advantage.mean(1, keepdim=True))
    torch.testing.assert_close(head(x).mean(1, keepdim=True), value)


def test_a_constant_added_to_all_advantages_changes_nothing():  # P68
    head, x = make(), features(4)
    before = head(x).detach()
    with torch.no_grad():
        head.deconv.bias[1:] += 7.0
    torch.testing.assert_close(head(x), before, atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        head.deconv.bias[0] += 7.0
    torch.testing.assert_close(head(x), before + 7.0, atol=1e-5, rtol=1e-5)


def test_weights_start_orthogonal_biases_zero_and_q_small():
    head = make((20, 20), features=256)
    weight = head.linear.weight.detach()
    torch.testing.assert_close(weight.T @ weight, 2 * torch.eye(256), atol=1e-4, rtol=0)
    rows = head.deconv.weight.detach().flatten(1)
    torch.testing.assert_close(rows @ rows.T / rows[0].square().sum(), torch.eye(32), atol=1e-4, rtol=0)
    assert not any(p.any() for name, p in head.named_parameters() if name.endswith("bias"))
    assert head(F.relu(features(16, width=256))).abs().mean() < 0.1  # pixel changes are fractions of 1


def test_the_gradient_reaches_every_parameter_and_the_features():
    head, x = make(), features(4, 2).requires_grad_()
    loss = pixel_control_loss(head(x), torch.zeros(4, 2, dtype=torch.int64), torch.ones(4, 2, 5, 4))
    loss.mean().backward()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in (*head.parameters(), x))


def test_parameters_may_become_views_of_one_vector():
    head, x = make(), features(4)
    before = head(x)
    FlatParams([head])
    assert torch.equal(head(x), before)


def test_q_of_each_action_and_cell_can_be_learnt():
    """One action changes the left half, another the right half, depending on the features."""
    head = make((4, 6), features=2, actions=2)
    x = torch.eye(2)[torch.arange(16) % 2]
    action = torch.arange(16) // 2 % 2
    target = torch.zeros(16, 4, 6)
    target[(x[:, 0] == 1) == (action == 0), :, :3] = 1.0
    optimizer = torch.optim.Adam(head.parameters(), 1e-2)
    for _ in range(150):
        loss = pixel_control_loss(head(x), action, target).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 1e-3


def test_grids_and_actions_of_no_size_are_refused():
    for cells, actions in (((0, 3), 2), ((3, 0), 2), ((3, 3), 0)):
        with pytest.raises(AssertionError):
            PixelControlHead(4, actions, cells)


class TestRewardHead:
    def test_is_one_hidden_layer_of_128(self):
        head = RewardHead(18)
        assert [tuple(m.weight.shape) for m in head.modules() if isinstance(m, nn.Linear)] == [(128, 18), (3, 128)]
        x = features(5, width=18)
        assert head(x).shape == (5, 3)
        torch.testing.assert_close(head(x), head.out(F.relu(head.hidden(x))))

    def test_starts_nearly_uniform(self):
        torch.manual_seed(0)
        loss = reward_prediction_loss(RewardHead(18)(features(50, width=18)), torch.ones(50))
        torch.testing.assert_close(loss, torch.full((50,), math.log(3)), atol=0.1, rtol=0)

    def test_learns_the_sign_of_a_reward_and_passes_the_gradient_on(self):
        torch.manual_seed(0)
        head, x = RewardHead(6), features(60).requires_grad_()
        reward = (x[:, 0] - x[:, 4]).detach().round()
        assert set(reward_class(reward).tolist()) == {0, 1, 2}
        optimizer = torch.optim.Adam(head.parameters(), 1e-2)
        for _ in range(100):
            optimizer.zero_grad()
            loss = reward_prediction_loss(head(x), reward).mean()
            loss.backward()
            optimizer.step()
        assert loss < 0.2 and x.grad.any()
