"""Prioritised replay needs far fewer updates where success is rare: the blind cliffwalk (Schaul et al. 2016, §3.1)."""

from __future__ import annotations

import statistics

import pytest

from examples.cliffwalk import transitions, updates_needed


def median(n: int, sampler: str) -> float:
    return statistics.median(updates_needed(n, sampler, seed) for seed in range(3))


def test_the_memory_holds_every_way_to_play_once():
    assert len(transitions(3)) == 4 * 1 + 2 * 2 + 2 * 3
    assert transitions(5)[:, 2].sum() == 1.0


@pytest.mark.parametrize("sampler", ["proportional", "rank"])
def test_priorities_find_what_is_rare(sampler):
    uniform, prioritized = median(8, "uniform"), median(8, sampler)
    assert prioritized < uniform / 3, (prioritized, uniform)


def test_the_gap_grows_with_the_memory():
    gap = {n: median(n, "uniform") / median(n, "proportional") for n in (4, 8)}
    assert gap[8] > 1.5 * gap[4], gap
