"""Tasks of the DeepMind Control Suite as Gymnasium environments: dmc/DOMAIN-TASK, e.g. dmc/cartpole-swingup.

Observations are one float32 vector, in the order of the task's own names, or a Dict of them (env_kwargs
{"flat": false}). The time limit truncates; a last step of discount 0 terminates. Rewards are the task's. Other
env_kwargs go to the task, e.g. {"time_limit": 5}. Not restorable: tasks move parts of the model itself (targets,
bodies), which no state of the physics holds. Not here: dm_control's locomotion and manipulation, pixels.
"""

from __future__ import annotations

import difflib
import importlib
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rookery.core.errors import UsageError

PREFIX = "dmc/"


def is_dmc(env_id: str) -> bool:
    return env_id.startswith(PREFIX)


def make_env(env_id: str, flat: bool = True, render_mode: str | None = None, **task: Any) -> DMControl:
    suite = _suite(env_id, draws=render_mode is not None)
    domain, _, name = env_id.removeprefix(PREFIX).partition("-")
    if (domain, name) not in suite.ALL_TASKS:
        known = [f"{PREFIX}{each}-{its}" for each, its in suite.ALL_TASKS]
        near = difflib.get_close_matches(env_id, known, 3)
        hint = f"; did you mean {', '.join(near)}?" if near else f", e.g. {known[0]}"
        raise UsageError(f"dm_control has no task {env_id!r}; an id is dmc/DOMAIN-TASK{hint}")
    # A task draws from the generator it is made with: some (lqr) draw their physics, which lanes should share.
    return DMControl(suite.load(domain, name, {"random": 0} | task), flat, render_mode)


def _suite(env_id: str, draws: bool) -> Any:
    """dm_control's suite. What it draws with is settled when it is imported, by MUJOCO_GL.

    Where that is not set and there is no display, it would take the library that needs one. Physics needs none at
    all, pictures come from EGL.
    """
    blind = sys.platform == "linux" and not any(os.environ.get(n) for n in ("DISPLAY", "WAYLAND_DISPLAY", "MUJOCO_GL"))
    try:
        with _gl(("egl" if draws else "disable") if blind else None):
            from dm_control import _render, suite

            if blind and draws and _render.BACKEND != "egl":
                importlib.reload(_render)  # it was imported for physics alone
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] not in ("dm_control", "mujoco"):
            raise
        raise UsageError(f"{env_id} needs dm_control: pip install 'rookery[dmc]'") from error
    except (ImportError, RuntimeError, AttributeError) as error:  # what PyOpenGL raises without the library varies
        if not draws:
            raise
        raise UsageError(
            f"{env_id} cannot be drawn here ({error}); install EGL (libegl1), or set MUJOCO_GL to osmesa or glfw"
        ) from error
    return suite


@contextmanager
def _gl(backend: str | None) -> Iterator[None]:
    """MUJOCO_GL for as long as an import takes; what the user's code imports later is not affected."""
    if backend is None:
        yield
        return
    os.environ["MUJOCO_GL"] = backend
    try:
        yield
    finally:
        del os.environ["MUJOCO_GL"]


class DMControl(gymnasium.Env):
    """A dm_control task, seeded and ended as Gymnasium has it."""

    def __init__(self, inner: Any, flat: bool = True, render_mode: str | None = None):
        if render_mode not in (None, "rgb_array"):
            raise UsageError(f"dm_control tasks are drawn with render_mode 'rgb_array', not {render_mode!r}")
        self.inner, self.flat, self.render_mode = inner, flat, render_mode
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": round(1 / inner.control_timestep(), 3)}
        # Scalars become vectors of one.
        self._shapes = {name: spec.shape or (1,) for name, spec in inner.observation_spec().items()}
        self._parts, self._size = {}, 0  # where each goes in the flat vector
        for name, shape in self._shapes.items():
            start, self._size = self._size, self._size + math.prod(shape)
            self._parts[name] = slice(start, self._size)
        if flat:
            self.observation_space = spaces.Box(-np.inf, np.inf, (self._size,), np.float32)
        else:
            self.observation_space = spaces.Dict(
                {name: spaces.Box(-np.inf, np.inf, shape, np.float32) for name, shape in self._shapes.items()}
            )
        action = inner.action_spec()
        low, high = (np.broadcast_to(x, action.shape).astype(np.float32) for x in (action.minimum, action.maximum))
        self.action_space = spaces.Box(low, high, dtype=np.float32)
        self._camera = 0 if inner.physics.model.ncam else -1  # the task's own view, or the free one
        self._seeded = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None or not self._seeded:
            self.inner.task.random.seed(int(self.np_random.integers(2**32)))
            self._seeded = True
        return self._observe(self.inner.reset().observation), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        row = self.inner.step(action)
        terminated = row.last() and row.discount == 0.0
        return self._observe(row.observation), float(row.reward), terminated, row.last() and not terminated, {}

    def _observe(self, seen: dict[str, Any]) -> Any:
        if not self.flat:
            return {name: np.asarray(seen[name], np.float32).reshape(shape) for name, shape in self._shapes.items()}
        obs = np.empty(self._size, np.float32)
        for name, part in self._parts.items():
            obs[part] = np.ravel(seen[name])
        return obs

    def render(self) -> np.ndarray | None:
        if self.render_mode is None:
            return None
        return self.inner.physics.render(height=480, width=480, camera_id=self._camera)

    def close(self) -> None:
        self.inner.physics.free()  # pictures hold memory of the graphics card
