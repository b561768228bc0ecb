"""Double DQN (van Hasselt et al. 2016): the online net chooses the next action, the target net values it.

The Atari row has the paper's tuned numbers: a slower target (30,000 steps), a smaller final epsilon,
one bias for all actions.
"""

from __future__ import annotations

import dataclasses

from rookery.recipes import dqn

ATARI = {
    "algo.double": True, "algo.target_period": 7_500, "algo.epsilon_end": 0.01, "algo.shared_bias": True,
}  # fmt: skip

RECIPE = dataclasses.replace(
    dqn.RECIPE,
    name="double_dqn",
    about="DQN that chooses actions with one net and values them with the other",
    presets=dqn.presets(ATARI, dqn.PLAIN | {"algo.double": True}, "van Hasselt et al. 2016, tuned, as in DQN Zoo"),
)
