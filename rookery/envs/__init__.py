"""Environments: the border where everything becomes next-step reset, and tasks of our own.

Importing this package registers our tasks with Gymnasium and does nothing else; torch is not loaded.
"""

from typing import Any

import gymnasium

_TASKS: dict[str, dict[str, Any]] = {
    "rookery/RepeatPrevious-v0": {
        "entry_point": "rookery.envs.memory:RepeatPrevious",
        "vector_entry_point": "rookery.envs.memory:RepeatPreviousVector",
    },
    "rookery/TMaze-v0": {
        "entry_point": "rookery.envs.memory:TMaze",
        "vector_entry_point": "rookery.envs.memory:TMazeVector",
    },
    "rookery/CliffWalk-v0": {
        "entry_point": "rookery.envs.cliffwalk:CliffWalk",
        "vector_entry_point": "rookery.envs.cliffwalk:CliffWalkVector",
    },
    "rookery/CartPoleMasked-v0": {
        "entry_point": "rookery.envs.cartpole:MaskedCartPole",
        "vector_entry_point": "rookery.envs.cartpole:MaskedCartPoleVector",
        "max_episode_steps": 500,
    },
    "rookery/Catch-v0": {
        "entry_point": "rookery.envs.catch:Catch",
        "vector_entry_point": "rookery.envs.catch:CatchVector",
    },
    "rookery/GridNav-v0": {
        "entry_point": "rookery.envs.gridnav:GridNav",
        "vector_entry_point": "rookery.envs.gridnav:GridNavVector",
    },
    "rookery/PixelSwitch-v0": {
        "entry_point": "rookery.envs.probe:PixelSwitch",
        "vector_entry_point": "rookery.envs.probe:PixelSwitchVector",
    },
    "rookery/Cue-v0": {
        "entry_point": "rookery.envs.probe:Cue",
        "vector_entry_point": "rookery.envs.probe:CueVector",
    },
    "rookery/Counter-v0": {"entry_point": "rookery.envs.scripted:Counter"},
    "rookery/Faulty-v0": {"entry_point": "rookery.envs.scripted:Faulty"},
}

for _id, _how in _TASKS.items():
    if _id not in gymnasium.registry:
        gymnasium.register(_id, **_how)
