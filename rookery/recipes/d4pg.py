"""D4PG (Barth-Maron et al. 2018): DDPG with a distribution of returns, 5-step returns and many actors.

`--algo.critic mixture` takes the mixture of Gaussians instead of the categorical. The memory is drawn from uniformly,
as in Acme; the paper found that priorities help little (`--algo.replay.sampler proportional --algo.replay.weights raw
--algo.replay.beta 1` are its own).
"""

from __future__ import annotations

import dataclasses

from rookery.recipes import ddpg
from rookery.recipes.recipe import Preset

D4PG = {
    "envs_per_actor": 4, "algo.critic": "categorical", "algo.n_step": 5, "algo.actor_lr": 1e-4, "algo.critic_lr": 1e-4,
    "algo.clip_action_gradient": "norm", "algo.target_period": 100, "algo.noise_scale": 0.3,
    "algo.replay.batch": 256, "algo.replay.samples_per_insert": 32.0,
}  # fmt: skip
# With more steps or less noise some runs settle on swinging up on one side only; with larger steps of the policy, some
# on maximal actions for ever, before the critic (a mixture above all) has learnt anything.
PENDULUM = {"algo.n_step": 2, "algo.noise_scale": 0.5, "algo.actor_lr": 3e-4}
SUITE = {
    "algo.v_min": 0.0, "algo.v_max": 100.0, "algo.actor_hidden": (256, 256), "algo.critic_hidden": (256, 256),
    "algo.actor_lr": 3e-4, "algo.critic_lr": 1e-3,  # for 10^5 steps; the paper's 1e-4 are for 10^8
}  # fmt: skip

RECIPE = dataclasses.replace(
    ddpg.RECIPE,
    name="d4pg",
    about="DDPG with a distribution of returns; continuous actions",
    presets=(
        Preset("dmc", ("dmc/*",), ddpg.GENERIC | D4PG | SUITE, "Barth-Maron et al. 2018; returns of the control suite"),
        *ddpg.presets(D4PG, PENDULUM, "Barth-Maron et al. 2018, as in Acme"),
    ),
)
