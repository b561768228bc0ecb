"""A3C (Mnih et al. 2016): workers that act and learn by themselves, and send gradients to one shared RMSProp.

The paper's 16 threads update shared memory without locks; here one applier takes the gradients in the order of arrival.
Its epsilon of 0.1, clip of 40 and mean square that starts at 1 are for sums over an unroll of 5 steps: for means they
are 0.1 / 25, 40 / 5 and 1 / 25.
"""

from __future__ import annotations

import dataclasses

from rookery.recipes import a2c

A3C = {"topology": "async_grads", "gradients.by_workers": True, "actors": 2}
ATARI = A3C | {
    "envs_per_actor": 1, "algo.optimizer": "rmsprop", "algo.lr": 7e-4, "algo.optimizer_eps": 4e-3,
    "algo.square_start": 0.04, "algo.max_grad_norm": 8.0,
}  # fmt: skip
SMALL = A3C | {"envs_per_actor": 8, "net.normalize_obs": False, "algo.scale_reward": False}

RECIPE = dataclasses.replace(
    a2c.RECIPE,
    name="a3c",
    about="advantage actor-critic by asynchronous gradients: workers act and learn, one applier",
    presets=a2c.presets(ATARI, SMALL, A3C | {"envs_per_actor": 8}, "Mnih et al. 2016, for means instead of sums"),
)
