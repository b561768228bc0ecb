"""The ladder of epsilons."""

from __future__ import annotations

import pytest
import torch

from rookery.ops.explore import epsilon_ladder

EP8 = [0.4, 0.16, 0.064, 0.0256, 0.01024, 0.004096, 0.0016384, 0.00065536]
EP4 = [0.4, 0.047156, 0.005559, 0.00065536]


@pytest.mark.parametrize("expected", [EP8, EP4])
def test_golden_ladders(expected):
    """EP8 and EP4, P64."""
    torch.testing.assert_close(epsilon_ladder(len(expected)), torch.tensor(expected), rtol=2e-4, atol=0)


def test_one_environment_is_the_boldest_and_divides_by_nothing():
    assert epsilon_ladder(1).tolist() == [pytest.approx(0.4)]


def test_rungs_are_a_geometric_row_between_the_ends():
    ladder = epsilon_ladder(360, epsilon=0.3, alpha=5.0).double()
    assert float(ladder[0]) == pytest.approx(0.3) and float(ladder[-1]) == pytest.approx(0.3**6)
    torch.testing.assert_close(ladder[1:] / ladder[:-1], (ladder[1] / ladder[0]).expand(359), rtol=1e-5, atol=0)
