"""FlatParams: parameters and gradients stay views of one vector each, whatever autograd does."""

import copy

import pytest
import torch
from torch import nn

from rookery.nets.flat import ALIGN, FlatParams


def convnet() -> nn.ModuleDict:
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
    torso = nn.Sequential(conv, nn.ReLU(), nn.Flatten(), nn.Linear(5 * 4 * 4, 7))
    return nn.ModuleDict({"torso": torso, "head": nn.Linear(7, 3)})


def inside(tensor: torch.Tensor, flat: torch.Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


def test_values_outputs_and_gradients_are_unchanged():
    nets, x = convnet(), torch.randn(2, 3, 6, 6)
    plain = copy.deepcopy(nets)
    flat = FlatParams(nets.values())
    for net in (nets, plain):
        net["head"](net["torso"](x)).square().sum().backward()
    for ours, theirs in zip(nets.parameters(), plain.parameters()):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
        torch.testing.assert_close(ours.grad, theirs.grad)
    together = torch.cat([p.grad.flatten() for p in plain.parameters()])
    torch.testing.assert_close(flat.grad.norm(), together.norm())


def test_gradients_stay_views_over_several_backward_passes():
    nets, x = convnet(), torch.randn(2, 3, 6, 6)
    flat = FlatParams(nets.values())
    homes = [(p.data_ptr(), p.grad.data_ptr(), p.stride(), p.grad.stride()) for p in nets.parameters()]
    optimiser = torch.optim.Adam([flat.parameter], lr=0.1)
    for _ in range(3):
        flat.zero_grad()
        nets["head"](nets["torso"](x)).square().sum().backward()
        before = nets["head"].weight.detach().clone()
        optimiser.step()
        assert not torch.equal(before, nets["head"].weight)
        assert homes == [(p.data_ptr(), p.grad.data_ptr(), p.stride(), p.grad.stride()) for p in nets.parameters()]
        assert all(inside(p, flat.data) and inside(p.grad, flat.grad) for p in nets.parameters())
        assert flat.parameter.grad.data_ptr() == flat.grad.data_ptr()


def test_gradients_accumulate_until_cleared():
    nets, x = convnet(), torch.randn(2, 3, 6, 6)
    flat = FlatParams(nets.values())
    loss = lambda: nets["head"](nets["torso"](x)).square().sum()  # noqa: E731
    loss().backward()
    once = flat.grad.clone()
    loss().backward()
    torch.testing.assert_close(flat.grad, 2 * once)
    flat.zero_grad()
    assert not flat.grad.any() and not nets["head"].weight.grad.any()


def test_each_parameter_starts_on_a_cache_line_and_the_gaps_stay_zero():
    nets = convnet()
    flat = FlatParams(nets.values())
    assert all((p.data_ptr() - flat.data.data_ptr()) % (4 * ALIGN) == 0 for p in nets.parameters())
    assert flat.data.numel() % ALIGN == 0
    nets["head"](nets["torso"](torch.randn(2, 3, 6, 6))).sum().backward()
    torch.optim.Adam([flat.parameter]).step()
    assert flat.data.count_nonzero() == sum(p.count_nonzero() for p in nets.parameters())


def test_channels_last_weight_keeps_its_strides():
    nets = convnet()
    before = nets["torso"][0].weight.stride()
    assert before[1] == 1
    FlatParams(nets.values())
    weight = nets["torso"][0].weight
    assert weight.stride() == before == weight.grad.stride()


def test_shared_modules_and_parameters_are_taken_once():
    shared = nn.Linear(4, 4)
    tied = nn.Linear(4, 4)
    tied.weight = shared.weight
    flat = FlatParams([shared, tied, shared])
    assert [id(p) for p in flat.parameters] == [id(p) for p in (shared.weight, shared.bias, tied.bias)]
    assert flat.data.numel() == 3 * 16
    (shared(torch.ones(1, 4)) + tied(torch.ones(1, 4))).sum().backward()
    assert tied.weight.data_ptr() == flat.data.data_ptr()
    torch.testing.assert_close(flat.grad[:16], torch.full((16,), 2.0))


def test_prefix_is_what_the_leading_modules_need():
    nets = convnet()
    flat = FlatParams(nets.values())
    n = flat.prefix([nets["torso"]])
    assert n == (nets["head"].weight.data_ptr() - flat.data.data_ptr()) // 4
    assert flat.prefix(nets.values()) == flat.data.numel()
    assert flat.prefix([nn.ReLU()]) == 0
    with pytest.raises(ValueError, match="leading"):
        flat.prefix([nets["head"]])


def test_nothing_is_an_empty_vector_and_other_types_are_refused():
    assert FlatParams([]).data.numel() == 0
    with pytest.raises(ValueError, match=r"Linear\.weight is torch.float64.*float32"):
        FlatParams([nn.Linear(2, 2).double()])
