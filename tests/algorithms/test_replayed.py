"""What the algorithms with a replay memory say of themselves and of their numbers."""

from __future__ import annotations

import support_dpg
import support_dqn
from support_lanes import SMALL, ScriptedLanes

from rookery.algorithms.dpg import DPG
from rookery.algorithms.dqn import DQN
from rookery.algorithms.ppo import PPO
from rookery.core.config import NetConfig


def test_returns_that_are_clipped_are_remarked_upon_once():
    for made in (support_dqn.algorithm(atoms=11), support_dpg.algorithm(critic="categorical", v_min=-2.0, v_max=2.0)):
        assert made.remarks({}) == made.remarks({"mass_at_ends": 0.05}) == []
        (text,) = made.remarks({"mass_at_ends": 0.31})
        assert text.startswith("v_min -2 and v_max 2 clip the returns: 31% of the target's mass")
        assert made.remarks({"mass_at_ends": 0.31}) == []


def test_others_have_nothing_to_say():
    assert PPO(SMALL, NetConfig(hidden=()), ScriptedLanes().spec, 4).remarks({"mass_at_ends": 1.0}) == []


def test_whose_gradients_workers_may_compute():
    """DPG has target networks that would not follow the weights that a worker pulls; DQN's do."""
    assert (bool(PPO.not_remote), bool(DQN.not_remote), bool(DPG.not_remote)) == (True, False, True)
