"""The rows for images without a row of their own learn as often as those for vectors."""

from __future__ import annotations

import pytest

from rookery.recipes import RECIPES


def updates_per_step(recipe: str, preset: str) -> float:
    memory = RECIPES[recipe].build("any", spec=None, preset=preset).algo.replay
    return memory.samples_per_insert / memory.batch


@pytest.mark.parametrize("recipe, updates", [("ddpg", 1.0), ("apex_dpg", 0.0), ("d4pg", 0.125)])
def test_updates_per_step_of_the_dpg_family(recipe, updates):
    assert updates_per_step(recipe, "continuous") == updates_per_step(recipe, "pixels") == updates


def test_batches_are_those_of_the_papers():
    """DDPG has 64, and 16 with pixels; the others name one number."""
    batch = {
        (recipe, preset): RECIPES[recipe].build("any", spec=None, preset=preset).algo.replay.batch
        for recipe in ("ddpg", "apex_dpg", "d4pg")
        for preset in ("continuous", "pixels")
    }
    assert list(batch.values()) == [64, 16, 512, 512, 256, 256]
