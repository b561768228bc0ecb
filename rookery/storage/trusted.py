"""What a stored run may name without `--trust`: exact names, and the type of each of their arguments.

Data only; `trust.py` checks against it. An argument is on the list if it is a number, a switch or one of a few words.
None names code, a file, a window or a process, so these are missing on purpose: `xml_file`, `default_camera_config`,
`render_mode`, `wrappers`, and the like. Numbers are bounded. Not on the list: test tasks that inject faults
(`envs/scripted.py`), and Gymnasium's ids that import what their arguments name (GymV21Environment-v0).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

from msgspec import Meta

_NAMES = ("ppo:PPO", "a2c:A2C", "impala:IMPALA", "appo:APPO", "dqn:DQN", "dpg:DPG")
ALGORITHMS = tuple(f"rookery.algorithms.{name}" for name in _NAMES)

Number = Annotated[float, Meta(ge=-1e9, le=1e9)]
Share = Annotated[float, Meta(ge=0, le=1)]
Pair = tuple[Number, Number]
Size = Annotated[int, Meta(ge=1, le=10_000)]
Cells = Annotated[int, Meta(ge=1, le=32)]  # cells per side, and pixels per cell: images up to 1024x1024
Side = Annotated[int, Meta(ge=1, le=63)]  # cells per side of a maze
Delay = Annotated[int, Meta(ge=0, le=10_000)]
Seconds = Annotated[float, Meta(ge=0, le=60)]  # that a step takes
Spread = Annotated[float, Meta(ge=0, le=2)]
Slow = Annotated[float, Meta(ge=1e-3, le=1_000)]
Skip = Annotated[int, Meta(ge=1, le=1_000)]
Steps = Annotated[int, Meta(ge=-1, le=1_000_000_000)]  # -1 is Gymnasium's "no limit"
LakeMap = Annotated[list[Annotated[str, Meta(pattern=r"\A[SFHG]{1,64}\Z")]], Meta(min_length=1, max_length=64)]


class Known(NamedTuple):
    module: str  # what a user would have to trust for other arguments
    arguments: dict[str, Any]  # name -> type, as msgspec reads it


LIMIT = {"max_episode_steps": Steps}

_OURS: dict[str, tuple[str, dict[str, Any]]] = {
    "rookery/RepeatPrevious-v0": (
        "rookery.envs.memory",
        {"k": Delay, "symbols": Size, "length": Size, "one_hot": bool},
    ),
    "rookery/TMaze-v0": ("rookery.envs.memory", {"length": Size}),
    "rookery/CliffWalk-v0": ("rookery.envs.cliffwalk", {"n": Size, "one_hot": bool}),
    "rookery/Catch-v0": ("rookery.envs.catch", {"rows": Cells, "columns": Cells, "scale": Cells}),
    "rookery/PixelSwitch-v0": ("rookery.envs.probe", {"length": Size, "truncate": bool}),
    "rookery/Cue-v0": ("rookery.envs.probe", {"length": Size, "rate": Share}),
    "rookery/GridNav-v0": (
        "rookery.envs.gridnav",
        {
            "size": Side,
            "view": Side,
            "loops": Share,
            "gps": bool,
            "max_steps": Delay,
            "delay": Seconds,
            "delay_spread": Spread,
            "slow": Slow,
        },
    ),
    "rookery/CartPoleMasked-v0": ("rookery.envs.cartpole", LIMIT | {"sutton_barto_reward": bool}),
}

# Tasks that fail on purpose, or take other environments as arguments: not on the list, here is what to trust for them.
TEST_TASKS = dict.fromkeys(("rookery/Counter-v0", "rookery/Faulty-v0"), "rookery.envs.scripted")

# The modules of Rookery that a user may trust: they define environments, and import nothing that an argument names.
OWN_MODULES = tuple(dict.fromkeys([module for module, _ in _OURS.values()] + [*TEST_TASKS.values()]))

_LANDER = {
    "continuous": bool, "gravity": Number, "enable_wind": bool, "wind_power": Number, "turbulence_power": Number,
}  # fmt: skip
_RACING = {"lap_complete_percent": Share, "domain_randomize": bool, "continuous": bool}
_LAKE = {
    "desc": LakeMap | None, "map_name": Literal["4x4", "8x8"] | None, "is_slippery": bool, "success_rate": Share,
    "reward_schedule": tuple[Number, Number, Number],
}  # fmt: skip
_TAXI = {"is_rainy": bool, "fickle_passenger": bool, "rainy_probability": Share, "fickle_probability": Share}

_GYMNASIUM: dict[str, dict[str, Any]] = {
    "CartPole-v0": {"sutton_barto_reward": bool},
    "CartPole-v1": {"sutton_barto_reward": bool},
    "MountainCar-v0": {"goal_velocity": Number},
    "MountainCarContinuous-v0": {"goal_velocity": Number},
    "Pendulum-v1": {"g": Number},
    "Acrobot-v1": {},
    "LunarLander-v3": _LANDER,
    "LunarLanderContinuous-v3": _LANDER,
    "BipedalWalker-v3": {"hardcore": bool},
    "BipedalWalkerHardcore-v3": {"hardcore": bool},
    "CarRacing-v3": _RACING,
    "Blackjack-v1": {"natural": bool, "sab": bool},
    "FrozenLake-v1": _LAKE,
    "FrozenLake8x8-v1": _LAKE,
    "CliffWalking-v0": {},  # of Gymnasium 1.1, like Taxi-v3
    "CliffWalking-v1": {"is_slippery": bool},
    "CliffWalkingSlippery-v1": {"is_slippery": bool},
    "Taxi-v3": _TAXI,
    "Taxi-v4": _TAXI,
}

_FORWARD = {"forward_reward_weight": Number, "ctrl_cost_weight": Number}
_START = {"reset_noise_scale": Number, "exclude_current_positions_from_observation": bool}
_HEALTH = {"healthy_reward": Number, "terminate_when_unhealthy": bool, "healthy_z_range": Pair}
_ANGLE = {"healthy_angle_range": Pair}
_CONTACT = {"contact_cost_weight": Number, "contact_force_range": Pair}
_INCLUDE = {
    f"include_{part}_in_observation": bool for part in ("cinert", "cvel", "qfrc_actuator", "cfrc_ext")
}  # fmt: skip
_V5 = {"frame_skip": Skip}

_MUJOCO: dict[str, dict[str, Any]] = {
    "Ant-v4": {"ctrl_cost_weight": Number, "use_contact_forces": bool} | _CONTACT | _HEALTH | _START,
    "Ant-v5": _V5 | _FORWARD | _CONTACT | _HEALTH | _START | {"include_cfrc_ext_in_observation": bool},
    "HalfCheetah-v4": _FORWARD | _START,
    "HalfCheetah-v5": _V5 | _FORWARD | _START,
    "Hopper-v4": _FORWARD | _HEALTH | _ANGLE | _START | {"healthy_state_range": Pair},
    "Hopper-v5": _V5 | _FORWARD | _HEALTH | _ANGLE | _START | {"healthy_state_range": Pair},
    "Humanoid-v4": _FORWARD | _HEALTH | _START,
    "Humanoid-v5": (
        _V5 | _FORWARD | _HEALTH | _START | _INCLUDE | {"contact_cost_weight": Number, "contact_cost_range": Pair}
    ),
    "HumanoidStandup-v4": {},
    "HumanoidStandup-v5": (
        _V5 | _START | _INCLUDE | {"uph_cost_weight": Number, "ctrl_cost_weight": Number}
        | {"impact_cost_weight": Number, "impact_cost_range": Pair}
    ),
    "InvertedDoublePendulum-v4": {},
    "InvertedDoublePendulum-v5": _V5 | {"healthy_reward": Number, "reset_noise_scale": Number},
    "InvertedPendulum-v4": {},
    "InvertedPendulum-v5": _V5 | {"reset_noise_scale": Number},
    "Pusher-v4": {},
    "Pusher-v5": (
        _V5 | {"reward_near_weight": Number, "reward_dist_weight": Number, "reward_control_weight": Number}
    ),
    "Reacher-v4": {},
    "Reacher-v5": _V5 | {"reward_dist_weight": Number, "reward_control_weight": Number},
    "Swimmer-v4": _FORWARD | _START,
    "Swimmer-v5": _V5 | _FORWARD | _START,
    "Walker2d-v4": _FORWARD | _HEALTH | _ANGLE | _START,
    "Walker2d-v5": _V5 | _FORWARD | _HEALTH | _ANGLE | _START,
}  # fmt: skip

# The games of ale-py, by the names of their ROMs; they take no arguments, but the fields of `atari`.
_ROMS = """
adventure air_raid alien amidar assault asterix asteroids atlantis atlantis2 backgammon bank_heist basic_math
battle_zone beam_rider berzerk blackjack bowling boxing breakout carnival casino centipede chopper_command combat
crazy_climber crossbow darkchambers defender demon_attack donkey_kong double_dunk earthworld elevator_action enduro
entombed et fishing_derby flag_capture freeway frogger frostbite galaxian gopher gravitar hangman haunted_house hero
human_cannonball ice_hockey jamesbond journey_escape joust kaboom kangaroo keystone_kapers king_kong klax koolaid krull
kung_fu_master laser_gates lost_luggage mario_bros maze_craze miniature_golf montezuma_revenge mr_do ms_pacman
name_this_game othello pacman phoenix pitfall pitfall2 pong pooyan private_eye qbert riverraid road_runner robotank
seaquest sir_lancelot skiing solaris space_invaders space_war star_gunner superman surround tennis tetris
tic_tac_toe_3d time_pilot trondead turmoil tutankham up_n_down venture video_checkers video_chess video_cube
video_pinball warlords wizard_of_wor word_zapper yars_revenge zaxxon
"""
GAMES = tuple(_ROMS.split())
_OLD_IDS = [f"{kind}-v{version}" for kind in ("", "NoFrameskip", "Deterministic") for version in (0, 4)]

# Fields of `atari` go to native code: it gets no number beyond what a game can mean.
ATARI = {
    "frame_skip": Skip, "stack": Annotated[int, Meta(ge=1, le=64)], "size": Annotated[int, Meta(ge=1, le=1024)],
    "noop_max": Annotated[int, Meta(ge=0, le=10_000)], "max_frames": Annotated[int, Meta(ge=1, le=2**31 - 1)],
}  # fmt: skip

# The tasks of the DeepMind Control Suite.
_TASKS = """
acrobot-swingup acrobot-swingup_sparse ball_in_cup-catch cartpole-balance cartpole-balance_sparse cartpole-swingup
cartpole-swingup_sparse cartpole-two_poles cartpole-three_poles cheetah-run dog-stand dog-walk dog-trot dog-run
dog-fetch finger-spin finger-turn_easy finger-turn_hard fish-upright fish-swim hopper-stand hopper-hop humanoid-stand
humanoid-walk humanoid-run humanoid-run_pure_state humanoid_CMU-stand humanoid_CMU-walk humanoid_CMU-run lqr-lqr_2_1
lqr-lqr_6_2 manipulator-bring_ball manipulator-bring_peg manipulator-insert_ball manipulator-insert_peg
pendulum-swingup point_mass-easy point_mass-hard quadruped-walk quadruped-run quadruped-escape quadruped-fetch
reacher-easy reacher-hard stacker-stack_2 stacker-stack_4 swimmer-swimmer6 swimmer-swimmer15 walker-stand walker-walk
walker-run
"""
CONTROL = tuple(_TASKS.split())
_CONTROL = {
    "flat": bool, "time_limit": Annotated[float, Meta(gt=0, le=1e6)], "random": Annotated[int, Meta(ge=0, lt=2**32)],
}  # fmt: skip


def _atari_ids(rom: str) -> list[str]:
    game = rom.title().replace("_", "")
    return [f"ALE/{game}-v5", *(game + old for old in _OLD_IDS)]


ENVS: dict[str, Known] = {
    **{env: Known(*how) for env, how in _OURS.items()},
    **{env: Known("gymnasium", LIMIT | how) for env, how in (_GYMNASIUM | _MUJOCO).items()},
    **{env: Known("ale_py", {}) for rom in GAMES for env in _atari_ids(rom)},
    **{f"dmc/{task}": Known("dm_control", _CONTROL) for task in CONTROL},
}
