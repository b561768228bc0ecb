"""Films of MuJoCo tasks on a machine without a display."""

import ctypes.util
import os
import subprocess
import sys

import pytest

from rookery.core.errors import EnvError
from rookery.run.run import train


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mujoco") / "run"
    return train("ppo", env="Hopper-v5", env_steps=256, envs_per_actor=1, quiet=True, out=str(folder)).path


def recorded(run, **chosen):
    """`rookery record` as a command of its own: a drawing library is settled once for a process."""
    env = {name: value for name, value in os.environ.items() if name not in ("DISPLAY", "WAYLAND_DISPLAY", "MUJOCO_GL")}
    words = [sys.executable, "-m", "rookery", "record", str(run), "--max-steps", "5"]
    return subprocess.run(words, env=env | chosen, capture_output=True, text=True, timeout=120)


def test_without_a_display_it_draws_with_egl(run):
    done = recorded(run)
    if ctypes.util.find_library("EGL") is None:  # a machine without it: the error says what to install
        assert done.returncode == EnvError.exit_code and "MUJOCO_GL" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert "6 pictures" in done.stdout and list((run / "report").glob("*.mp4"))


@pytest.mark.parametrize("backend", ["glfw", "osmesa"])
def test_a_choice_that_does_not_work_is_an_env_error_that_names_the_others(run, backend):
    done = recorded(run, MUJOCO_GL=backend)
    if backend == "osmesa" and done.returncode == 0:
        return  # it is installed here: nothing to report
    assert done.returncode == EnvError.exit_code
    assert f"MUJOCO_GL={backend}: without a display set MUJOCO_GL=egl" in done.stderr
    assert "bug in Rookery" not in done.stderr


def test_pictures_of_an_environment_that_fails_are_its_fault(tmp_path, monkeypatch, capsys):
    from rookery.cli.main import main

    (tmp_path / "unseen.py").write_text(
        "import gymnasium\n\n"
        "class Unseen(gymnasium.Wrapper):\n"
        "    def render(self):\n"
        "        raise RuntimeError('no paint')\n\n"
        "def make(render_mode=None):\n"
        "    return Unseen(gymnasium.make('CartPole-v1', render_mode=render_mode))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    out = train("ppo", env="unseen:make", env_steps=256, envs_per_actor=2, quiet=True, out=str(tmp_path / "run")).path
    assert main(["record", str(out), "--trust", "unseen"]) == EnvError.exit_code
    said = capsys.readouterr().err
    assert "raised in render: RuntimeError: no paint" in said and 'unseen.py", line 5, in render' in said
