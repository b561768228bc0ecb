"""Atari games through ale-py's native vector environment: (stack, size, size) uint8 frames, preprocessed in C++.

Native per step: the action for `frame_skip` emulator frames, rewards summed, the last two frames max-pooled, grey,
resized by area, stacked; the stack is filled with zeros at a reset. Every other observation, the final one of an
episode too, is the one before it moved by one frame (`Leaf.stack`). Reset: 0 to `noop_max` no-ops whose rewards do not
count, then FIRE where the game has it. Frames are counted from there: `max_frames` bounds an episode.
A game that is over amid a skip may show the frames of the step before as its last ones; it is terminated, so no value
is ever taken from them.

Ours, because the native version differs from what is wanted:
- a lost life ends the episode but not the game. Natively it restarts the game, and later lives would never be seen;
- reward clipping, so that the score before it stays visible (`Lanes.score`).

Sticky actions are off by default (`AtariConfig.sticky`); the ids ALE/...-v5 stand for 0.25 elsewhere.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np

from rookery.core.config import AtariConfig
from rookery.core.errors import UsageError
from rookery.envs.lanes import Step
from rookery.envs.vector import VectorLanes

SEEDS = 2**31 - 1  # ale-py takes 32-bit signed seeds, and negative ones mean "none"


def is_atari(env_id: str) -> bool:
    """Whether an id is Atari's by its form: ALE/Pong-v5, PongNoFrameskip-v4, PongDeterministic-v4."""
    return re.fullmatch(r"ALE/.+|\w+(NoFrameskip|Deterministic)-v\d+", env_id) is not None


def make_lanes(env_id: str, atari: AtariConfig, lanes: int, training: bool, threads: int) -> AtariLanes:
    env = _native(env_id, atari, lanes, threads)
    return AtariLanes(env_id, env, atari, training)


def _native(env_id: str, atari: AtariConfig, lanes: int, threads: int, **frames: Any) -> Any:
    game = _game(env_id)
    from ale_py.vector_env import AtariVectorEnv

    how = {"img_height": atari.size, "img_width": atari.size, "stack_num": atari.stack} | frames
    return AtariVectorEnv(
        game,
        lanes,
        num_threads=max(threads, 1),  # 0 would let it take every core
        max_num_frames_per_episode=atari.max_frames,
        repeat_action_probability=atari.sticky,
        full_action_space=atari.full_actions,
        frameskip=atari.frame_skip,
        noop_max=atari.noop_max + 1 if atari.noop_max else 0,  # it draws from 0 to noop_max - 1
        use_fire_reset=atari.fire_reset,
        episodic_life=False,
        reward_clipping=False,
        **how,
    )


def _game(env_id: str) -> str:
    """The ROM of an id: ALE/MsPacman-v5 -> ms_pacman."""
    try:
        from ale_py import roms
    except ImportError as error:
        raise UsageError(f"{env_id} needs ale-py (licensed GPL-2.0): pip install 'rookery[atari]'") from error
    names = {rom.title().replace("_", ""): rom for rom in roms.get_all_rom_ids()}
    name = re.sub(r"(NoFrameskip|Deterministic)?-v\d+$", "", env_id.removeprefix("ALE/"))
    if name not in names:
        near = difflib.get_close_matches(name, names, 3, 0.5)
        hint = f"; did you mean {', '.join(f'ALE/{each}-v5' for each in near)}?" if near else ""
        raise UsageError(f"there is no Atari game {name!r}{hint}")
    return names[name]


class AtariLanes(VectorLanes):
    """The native environment, with lives and clipping of our own."""

    def __init__(self, env_id: str, env: Any, atari: AtariConfig, training: bool):
        super().__init__(env_id, env)
        frames = {name: replace(leaf, stack=atari.stack) for name, leaf in self.spec.obs.items()}
        self.spec = replace(self.spec, obs=frames, clipped=atari.reward_clip)
        self.score = np.zeros(self.count, np.float32) if training and atari.reward_clip else None
        self._by_life = training and atari.episodic_life
        self._lives = np.zeros(self.count, np.int32)
        self._lost = np.zeros(self.count, bool)  # lanes that ended by a lost life: their game continues
        # What to press in the row after a lost life: FIRE, as after a reset, where games wait for it.
        names = [action.name for action in env.ale.get_action_set()]
        self._wake = names.index("FIRE" if atari.fire_reset and "FIRE" in names else "NOOP")

    def reset(self, seeds: Sequence[int]) -> dict[str, np.ndarray]:
        assert len(seeds) == self.count, (len(seeds), self.count)
        numbers = np.array([int(seed) % SEEDS for seed in seeds])
        obs, info = self._call("reset", lambda: self.env.reset(seed=numbers))
        self._ended, self._lost = np.zeros(self.count, bool), np.zeros(self.count, bool)
        self._lives, self._infos = info["lives"], None
        return self._read(obs)

    def step(self, action: np.ndarray) -> Step:
        pressed = np.where(self._lost, self._wake, action)
        obs, reward, over, truncated, info = self._call("step", lambda: self.env.step(pressed))
        lives = info["lives"]
        if self._by_life:
            over, lives = self._lose(obs, over, truncated, lives)
        self._lives = lives
        row = self._row(self._read(obs), reward, over, truncated, info)
        if self.score is not None:
            self.score[:] = self._reward
            np.clip(self._reward, -1.0, 1.0, out=self._reward)
        return row

    def _lose(self, obs: Any, over: Any, truncated: Any, lives: Any) -> tuple[np.ndarray, np.ndarray]:
        """Make lost lives ends; a lane that lost one in the row before has just taken its dead row.

        The rewards and lives of a dead row are passed over, as in the baselines' EpisodicLife, but an end of the whole
        game in it is not: that lane is reset at once, since a dead row returns the first observation of an episode.
        """
        woke = self._lost
        gone = woke & (over | truncated)
        if gone.any():
            fresh, info = self._call("reset", lambda: self.env.reset(options={"reset_mask": gone}))
            obs[gone], lives = fresh[gone], info["lives"]
            over[gone] = truncated[gone] = False
        # Some games stay at 0 lives for a few frames before they are over: that is no loss of its own.
        self._lost = (lives < self._lives) & (lives > 0) & ~woke & ~over & ~truncated
        return over | self._lost, lives


class AtariSingle(gymnasium.Env):
    """One game as evaluation sees it, with rendering: for recording and for checks.

    A native environment of one lane. Pictures come from a second one in full size and colour, which gets the same
    seeds and actions and so plays the same game.
    """

    def __init__(self, env_id: str, atari: AtariConfig, render_mode: str | None = None):
        self.render_mode = render_mode
        self._envs = [_native(env_id, atari, 1, 1)]
        if render_mode is not None:
            self._envs.append(_native(env_id, atari, 1, 1, img_height=210, img_width=160, stack_num=1, grayscale=False))
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": 60 / atari.frame_skip}
        self.observation_space = self._envs[0].single_observation_space
        self.action_space = self._envs[0].single_action_space
        self._picture: np.ndarray | None = None
        self._seeded = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is None and not self._seeded:
            seed = int(self.np_random.integers(SEEDS))
        self._seeded = True
        number = None if seed is None else np.array([seed % SEEDS])
        (obs, info), *rest = [env.reset(seed=number) for env in self._envs]
        self._picture = rest[0][0] if rest else None
        return obs[0], {"lives": int(info["lives"][0])}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        pressed = np.array([int(action)])
        (obs, reward, over, truncated, info), *rest = [env.step(pressed) for env in self._envs]
        self._picture = rest[0][0] if rest else None
        return obs[0], float(reward[0]), bool(over[0]), bool(truncated[0]), {"lives": int(info["lives"][0])}

    def render(self) -> np.ndarray | None:
        return None if self._picture is None else self._picture[0, -1]

    def close(self) -> None:
        for env in self._envs:
            env.close()
