"""The mix of largest and mean error: the golden number, and which rows count."""

from __future__ import annotations

import pytest
import torch

from rookery.ops.priority import mixed


def test_golden_number():
    """R2, P80."""
    size = torch.tensor([0.1, 0.2, 0.9, 0.0]).unsqueeze(1)
    assert float(mixed(size, torch.ones(4, 1, dtype=torch.bool), 0.9)) == pytest.approx(0.84)


def test_it_runs_over_time_and_only_over_live_rows():
    size = torch.tensor([[9.0, 1.0], [2.0, 3.0], [4.0, 99.0]])
    live = torch.tensor([[False, True], [True, True], [True, False]])
    expected = torch.tensor([0.5 * 4 + 0.5 * 3, 0.5 * 3 + 0.5 * 2])
    torch.testing.assert_close(mixed(size, live, 0.5), expected)


def test_padding_of_any_length_and_content_changes_nothing():
    """P83."""
    size, live = torch.rand(5, 3), torch.ones(5, 3, dtype=torch.bool)
    padded = torch.cat([size, torch.full((4, 3), torch.nan)])
    padded_live = torch.cat([live, torch.zeros(4, 3, dtype=torch.bool)])
    assert torch.equal(mixed(padded, padded_live, 0.9), mixed(size, live, 0.9))


def test_the_ends_of_the_mix_and_a_sequence_without_a_live_row():
    size, live = torch.rand(6, 4), torch.ones(6, 4, dtype=torch.bool)
    torch.testing.assert_close(mixed(size, live, 1.0), size.amax(0))
    torch.testing.assert_close(mixed(size, live, 0.0), size.mean(0))
    assert mixed(size, torch.zeros_like(live), 0.9).tolist() == [0, 0, 0, 0]
