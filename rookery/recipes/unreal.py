"""UNREAL (Jaderberg et al. 2017): A3C with an LSTM, and three auxiliary tasks learnt from a small memory of a worker.

The paper's weight of pixel control is for a sum over 20x20 cells, 0.01 to 0.1 in Labyrinth and 0.0001 to 0.01 on Atari;
for a mean over the cells it is 400 times as large. Unrolls have 20 steps: RMSProp's numbers are those of A3C for these.
"""

from __future__ import annotations

import dataclasses

from rookery.recipes import a3c
from rookery.recipes.recipe import Preset

UNREAL = {
    "net.core": "lstm", "net.core_size": 256, "algo.unroll": 20, "algo.entropy": 1e-3,
    "algo.aux.pixel_control": 1.0, "algo.aux.reward_prediction": 1.0, "algo.aux.value_replay": 1.0,
}  # fmt: skip
ATARI = {"algo.optimizer_eps": 2.5e-4, "algo.square_start": 2.5e-3, "algo.max_grad_norm": 2.0}
# Without images there are no pixels to control.
PLAIN = UNREAL | {"net.core_size": 64, "algo.aux.pixel_control": 0.0}


def _changed(preset: Preset) -> Preset:
    changes = {"atari": UNREAL | ATARI, "pixels": UNREAL}.get(preset.name, PLAIN)
    return dataclasses.replace(preset, fields=preset.fields | changes)


RECIPE = dataclasses.replace(
    a3c.RECIPE,
    name="unreal",
    about="A3C with an LSTM, pixel control, reward prediction and value replay",
    presets=tuple(_changed(preset) for preset in a3c.RECIPE.presets),
)
