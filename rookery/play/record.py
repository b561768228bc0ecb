"""Videos of a policy: frames stream to ffmpeg one by one, so that memory does not grow with the length of the video.

The policy sees what it saw in training: the environment is stepped through the same lane as everywhere else, and only
its picture is taken besides. Atari shows the real screen in colour, one picture per decision.
"""

from __future__ import annotations

import base64
import html
import math
import os
import secrets
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rookery.core.config import RunConfig
from rookery.core.errors import EnvError, StorageError, UsageError
from rookery.core.frames import with_frames
from rookery.core.seeding import seed_of
from rookery.envs import dmc
from rookery.envs.lanes import Lanes, SyncLanes
from rookery.envs.last import LastLanes
from rookery.envs.make import make_single
from rookery.play.policy import Policy
from rookery.storage import folder as folders

SMALLEST = 320  # pixels of the shorter side; smaller pictures are enlarged by whole factors
SUFFIXES = (".mp4", ".mkv", ".mov")
BACKENDS = "without a display set MUJOCO_GL=egl (needs libegl1) or MUJOCO_GL=osmesa (needs libosmesa6), else glfw"
SMALL = 8 << 20  # bytes of a video that is shown within a notebook
PATIENCE = 120.0  # seconds for ffmpeg to finish


@dataclass
class Recording:
    path: Path
    fps: float
    frames: int = 0
    returns: list[float] = field(default_factory=list)  # of the recorded episodes
    note: str = ""

    def __fspath__(self) -> str:
        return str(self.path)

    def _repr_html_(self) -> str:
        """What a notebook shows: the video, if it is small enough for a notebook."""
        if self.path.suffix.lower() != ".mp4" or self.path.stat().st_size > SMALL:
            return f"<code>{html.escape(str(self.path))}</code>"
        video = base64.b64encode(self.path.read_bytes()).decode()
        return f'<video controls loop width="480" src="data:video/mp4;base64,{video}"></video>'


def record(
    policy: Policy, config: RunConfig, out: str | Path, episodes: int = 1, seed: int = 7, fps: float = 0.0,
    max_steps: int = 10_000, greedy: bool = True, within: Path | None = None,
) -> Recording:  # fmt: skip
    """Play whole episodes and record them. `fps` 0: as the environment says. LaneFault if the environment fails.

    `within`: `out` is the name of a file in a run folder.
    """
    if within is not None:
        _check_target(within, str(out))
    out = Path(out) if within is None else Path(within, out)
    if out.suffix.lower() not in SUFFIXES:
        raise UsageError(f"{out}: a video file ends in {', '.join(SUFFIXES)}")
    _writer()  # before the environment is made, so that a missing package is reported first
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pictures are drawn in memory, without a display
    with _drawing(config.env):
        return _record(policy, config, out, episodes, seed, fps, max_steps, greedy)


def _record(
    policy: Policy, config: RunConfig, out: Path, episodes: int, seed: int, fps: float, max_steps: int, greedy: bool
) -> Recording:  # fmt: skip
    try:
        env = make_single(config, render_mode="rgb_array")
    except EnvError as error:
        if any(word in str(error) for word in ("OpenGL", "mujoco", "glfw")):
            error.add_note(_backend())
        raise
    lanes: Lanes = SyncLanes(config.env, [env], masks=config.net.action_mask)
    if config.net.feed_last:
        lanes = LastLanes(lanes, clip=policy.spec.clipped)
    try:
        policy.check_fits(lanes.spec)
        fps = fps or float(env.metadata.get("render_fps") or 30)
        done = Recording(out, fps)
        with _film(out, fps) as film:
            for number in range(episodes):
                rng = None if greedy else torch.Generator().manual_seed(seed_of(seed, "record-act", number))
                begin = seed_of(seed, "record", number) % 2**31
                total, ended = _episode(policy, lanes, env, film, begin, rng, max_steps)
                done.returns.append(total)
                if not ended:
                    done.note = f"episode {number + 1} was cut after {max_steps:,} steps"
        done.frames = film.frames
        return done
    finally:
        lanes.close()


def _episode(
    policy: Policy, lanes: Lanes, env: Any, film: Film, seed: int, rng: torch.Generator | None, max_steps: int
) -> tuple[float, bool]:
    """Record one episode: its return, and whether it ended."""
    obs, state, total = lanes.reset([seed]), policy.initial_state(1), 0.0
    film.add(_picture(env, lanes.spec.id))
    for _ in range(max_steps):
        action, state = policy.act_batch(obs, state, rng)
        obs, reward, terminated, truncated = lanes.step(action)
        total += float(reward[0])
        film.add(_picture(env, lanes.spec.id))
        if terminated[0] or truncated[0]:
            return total, True
    return total, False


def _picture(env: Any, env_id: str) -> Any:
    try:
        return env.render()
    except (Exception, SystemExit) as error:
        words = f"environment {env_id} raised in render: {type(error).__name__}: {error}"
        if "mujoco" in type(env.unwrapped).__module__ or type(error).__module__.startswith("mujoco"):
            words += f"; {_backend()}"
        raise EnvError(with_frames(words, error), "env_raised") from error


def _backend() -> str:
    return f"MuJoCo drew with MUJOCO_GL={os.environ.get('MUJOCO_GL', '(not set)')}: {BACKENDS}"


@contextmanager
def _drawing(env_id: str) -> Iterator[None]:
    """Without a display, MuJoCo draws with EGL unless the user has chosen: its own choice is a window's library.

    Tasks of dm_control settle it themselves (`dmc.py`).
    """
    blind = (
        not dmc.is_dmc(env_id)
        and sys.platform == "linux"
        and not any(os.environ.get(n) for n in ("DISPLAY", "WAYLAND_DISPLAY", "MUJOCO_GL"))
    )
    if blind:
        os.environ["MUJOCO_GL"] = "egl"
    try:
        yield
    finally:
        if blind:
            del os.environ["MUJOCO_GL"]


class Film:
    """Pictures of one size into one file."""

    def __init__(self, path: Path, fps: float):
        self.path, self.fps, self.frames = path, fps, 0
        self._shape: tuple[int, ...] = ()
        self._writer: Generator[None, Any, None] | None = None

    def add(self, picture: Any) -> None:
        picture = np.asarray(picture)
        if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != 3:
            raise EnvError(
                f"render() returned {picture.dtype} of shape {picture.shape}; a video needs uint8 (height, width, 3): "
                "give the environment render_mode 'rgb_array'"
            )
        if self._writer is None:
            self._shape = picture.shape
            height, width = _frame(picture).shape[:2]
            self._writer = _writer()(
                str(self.path), (width, height), fps=self.fps, quality=8, codec="libx264", macro_block_size=1,
                ffmpeg_log_level="error", ffmpeg_timeout=PATIENCE,
            )  # fmt: skip
            self._writer.send(None)
        if picture.shape != self._shape:
            raise EnvError(f"render() changed its size from {self._shape} to {picture.shape} during the recording")
        try:
            self._writer.send(_frame(picture))
        except OSError as error:
            raise StorageError(f"cannot write {self.path}: {error}") from error
        self.frames += 1

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


@contextmanager
def _film(out: Path, fps: float) -> Iterator[Film]:
    """A video under a temporary name, renamed when it is complete."""
    temporary = out.with_name(f".{out.stem}-{secrets.token_hex(16)}.part{out.suffix}")
    film = Film(temporary, fps)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield film
        finally:
            film.close()
        if not temporary.exists() or temporary.stat().st_size == 0:
            raise StorageError(f"cannot write {out}: ffmpeg wrote no video; is the disk full?")
        os.replace(temporary, out)
    except OSError as error:
        raise StorageError(f"cannot write {out}: {error}") from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def _check_target(within: Path, name: str) -> None:
    try:
        folders.check_target(within, name)
    except OSError as error:
        raise StorageError(f"cannot write {within / name}: {error.strerror or error}") from error


def _frame(picture: np.ndarray) -> np.ndarray:
    """Enlarged if small, with even sides as the codec requires."""
    factor = math.ceil(SMALLEST / min(picture.shape[:2]))
    if factor > 1:
        picture = picture.repeat(factor, axis=0).repeat(factor, axis=1)
    odd = [(0, side % 2) for side in picture.shape[:2]]
    if any(after for _, after in odd):
        picture = np.pad(picture, (*odd, (0, 0)), mode="edge")
    return np.ascontiguousarray(picture)


def _writer() -> Any:
    try:
        from imageio_ffmpeg import write_frames
    except ImportError as error:
        raise UsageError("recording needs ffmpeg: pip install 'rookery[video]'") from error
    return write_frames
