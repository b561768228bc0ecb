"""Gorila (Nair et al. 2015): DQN whose workers have memories of their own and send gradients to one applier.

The paper's parameter server steps with AdaGrad; it is one process here, and the workers are those of one machine.
"""

from __future__ import annotations

import dataclasses

from rookery.recipes import dqn

GORILA = {"topology": "async_grads", "gradients.by_workers": True, "actors": 2, "algo.double": False}
ATARI = GORILA | {"envs_per_actor": 2, "algo.optimizer": "adagrad", "algo.lr": 1e-2, "algo.optimizer_eps": 1e-8}
SMALL = GORILA | {"envs_per_actor": 4, "algo.replay.samples_per_insert": 16.0}

RECIPE = dataclasses.replace(
    dqn.RECIPE,
    name="gorila",
    about="DQN by asynchronous gradients: workers with memories of their own, one applier",
    presets=dqn.presets(ATARI, SMALL, "Nair et al. 2015; its learning rate is not published, this one is our own"),
)
