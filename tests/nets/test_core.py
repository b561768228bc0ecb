"""Recurrent cores: every way through a sequence equals one cell after the other."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rookery.nets.core import PACK_ABOVE, Core
from rookery.nets.flat import FlatParams

KINDS = pytest.mark.parametrize("kind", ["gru", "lstm"])
F, H = 3, 5


def make(kind: str, layers: int, seed: int = 0) -> Core:
    torch.manual_seed(seed)
    core = Core(kind, F, H, layers)
    with torch.no_grad():
        for parameter in core.parameters():  # biases too: zeros would hide mistakes
            parameter.add_(0.3 * torch.randn_like(parameter))
    return core


def random_state(core: Core, lanes: int) -> dict:
    return {leaf: torch.randn(lanes, core.layers, core.size) for leaf in core.leaves}


def naive(core: Core, x: torch.Tensor, state: dict, reset: torch.Tensor):
    """One row and one lane at a time, with torch's own layers."""
    lanes = []
    for b in range(x.shape[1]):
        hidden = tuple(state[leaf][b].unsqueeze(1) for leaf in core.leaves)  # [layers, 1, H]
        rows = []
        for t in range(x.shape[0]):
            if reset[t, b]:
                hidden = tuple(torch.zeros_like(h) for h in hidden)
            y, new = core.rnn(x[t, b].view(1, 1, -1), hidden if len(hidden) == 2 else hidden[0])
            hidden = new if len(hidden) == 2 else (new,)
            rows.append(y[0, 0])
        lanes.append((torch.stack(rows), hidden))
    y = torch.stack([rows for rows, _ in lanes], 1)
    return y, {leaf: torch.stack([h[i][:, 0] for _, h in lanes]) for i, leaf in enumerate(core.leaves)}


def gradients(core: Core, run, x: torch.Tensor, state: dict) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    state = {leaf: value.clone().requires_grad_() for leaf, value in state.items()}
    y, last = run(x, state)
    weight = torch.linspace(-1, 1, y.numel()).view_as(y)
    loss = (y * weight).sum() + sum(value.square().sum() for value in last.values())
    return list(torch.autograd.grad(loss, [x, *state.values(), *core.parameters()]))


@KINDS
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_sequence_equals_the_naive_loop(kind, data):
    T, B = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 5))
    layers = data.draw(st.integers(1, 2))
    reset = torch.tensor(data.draw(st.lists(st.lists(st.booleans(), min_size=B, max_size=B), min_size=T, max_size=T)))
    core = make(kind, layers)
    x, state = torch.randn(T, B, F), random_state(core, B)
    y, last = naive(core, x, state, reset)
    rows = reset.any(1).nonzero().flatten().tolist()
    for run in (
        core.sequence,
        core._packed,
        lambda x, state, reset: core._segments(x, state, reset, rows),
    ):
        ours, end = run(x, state, reset)
        torch.testing.assert_close(ours, y, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(end, last, rtol=1e-5, atol=1e-5)


@KINDS
@pytest.mark.parametrize("share", [0.0, 0.05, 0.6])
def test_gradients_equal_those_of_the_naive_loop(kind, share):
    core = make(kind, 2)
    x, state = torch.randn(11, 4, F), random_state(core, 4)
    reset = torch.rand(11, 4) < share
    expected = gradients(core, lambda x, s: naive(core, x, s, reset), x, state)
    rows = reset.any(1).nonzero().flatten().tolist()
    for run in (
        lambda x, s: core.sequence(x, s, reset),
        lambda x, s: core._packed(x, s, reset),
        lambda x, s: core._segments(x, s, reset, rows),
    ):
        for ours, theirs in zip(gradients(core, run, x, state), expected):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@KINDS
@pytest.mark.parametrize("layers", [1, 2])
def test_step_agrees_with_sequence(kind, layers):
    core = make(kind, layers)
    x, state = torch.randn(7, 4, F), random_state(core, 4)
    y, last = core.sequence(x, state, torch.zeros(7, 4, dtype=torch.bool))
    for t in range(7):
        row, state = core.step(x[t], state)
        torch.testing.assert_close(row, y[t], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(state, last, rtol=1e-6, atol=1e-6)


@KINDS
def test_rows_after_a_reset_equal_a_fresh_run(kind):  # P25
    core = make(kind, 2)
    x, state = torch.randn(9, 3, F), random_state(core, 3)
    reset = torch.zeros(9, 3, dtype=torch.bool)
    reset[5, 1] = True
    y, _ = core.sequence(x, state, reset)
    fresh, _ = core.sequence(x[5:, 1:2], core.initial(1), torch.zeros(4, 1, dtype=torch.bool))
    torch.testing.assert_close(y[5:, 1:2], fresh, rtol=1e-6, atol=1e-6)
    other, _ = core.sequence(x, state, torch.zeros_like(reset))
    torch.testing.assert_close(y[:, [0, 2]], other[:, [0, 2]], rtol=1e-6, atol=1e-6)


@KINDS
def test_state_is_lanes_first_and_each_layer_reads_its_own(kind):  # P26
    core = make(kind, 2)
    state = {leaf: torch.zeros(3, 2, H) for leaf in core.leaves}
    for value in state.values():
        value += 0.1 * torch.arange(3).view(3, 1, 1) + 0.01 * torch.arange(2).view(1, 2, 1)
    x = torch.randn(3, F)
    y, after = core.step(x, state)
    for lane in range(3):
        own, _ = core.step(x[lane : lane + 1], {leaf: value[lane : lane + 1] for leaf, value in state.items()})
        torch.testing.assert_close(y[lane : lane + 1], own, rtol=1e-6, atol=1e-6)
    assert all(value.shape == (3, 2, H) for value in after.values())
    torch.testing.assert_close(after["h"][:, -1], y)  # the last layer's h is the output


def test_few_resets_cut_time_and_many_pack(monkeypatch):
    core = make("gru", 1)
    calls = []
    monkeypatch.setattr(core, "_packed", lambda *args: calls.append("packed"))
    monkeypatch.setattr(core, "_segments", lambda *args: calls.append("segments"))
    reset = torch.zeros(20, 2, dtype=torch.bool)
    few = int(20 * PACK_ABOVE)
    reset[:few, 0] = True
    core.sequence(torch.zeros(20, 2, F), core.initial(2), reset)
    reset[few, 1] = True
    core.sequence(torch.zeros(20, 2, F), core.initial(2), reset)
    assert calls == ["segments", "packed"]


@KINDS
def test_initial_weights_and_state(kind):
    core = Core(kind, 6, 6)
    w = core.rnn.weight_hh_l0
    torch.testing.assert_close(w.t() @ w, torch.eye(6), rtol=0, atol=1e-5)
    assert not core.rnn.bias_ih_l0.any() and not core.rnn.bias_hh_l0.any()
    state = core.initial(4)
    assert set(state) == ({"h", "c"} if kind == "lstm" else {"h"})
    assert all(value.shape == (4, 1, 6) and not value.any() for value in state.values())


@KINDS
def test_copies_and_flat_parameters_act_on_their_own_weights(kind):
    core = make(kind, 2)
    twin = copy.deepcopy(core)
    x, state = torch.randn(4, F), random_state(core, 4)
    before = core.step(x, state)[0]
    flat = FlatParams([twin])
    torch.testing.assert_close(twin.step(x, state)[0], before, rtol=0, atol=0)
    flat.data.zero_()
    assert not torch.allclose(twin.step(x, state)[0], before)
    reset = torch.zeros(1, 4, dtype=torch.bool)
    torch.testing.assert_close(twin.step(x, state)[0], twin.sequence(x[None], state, reset)[0][0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(core.step(x, state)[0], before, rtol=0, atol=0)
