"""Code in the current directory: taken where the command names it, never because it lies there."""

import os
import subprocess
import sys

import pytest

from rookery.cli.local import find_local_code


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A current directory with modules in it; one of them would hide a module that is installed."""
    for name in ("local_task", "numpy", "local_pack/inner"):
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each not in ("", ".")])
    return str(tmp_path)


@pytest.mark.parametrize(
    ("verb", "words"),
    [
        ("train", ["ppo", "--env", "local_task:make"]),
        ("train", ["ppo", "--env=local_task:make"]),
        ("train", ["ppo", "--env", "local_task:Own-v0"]),
        ("train", ["ppo", "--env", "CartPole-v1", "--net.module", "local_pack.inner:Net"]),
        ("check-env", ["local_task:make"]),
        ("eval", ["runs/a", "--trust", "local_task"]),
        ("eval", ["runs/a", "--trust=local_pack.inner", "--seed", "1"]),
        ("resume", ["runs/a", "--trust", "numpy", "local_task"]),
    ],
)
def test_a_module_that_the_words_name_is_found_behind_everything_else(here, verb, words):
    before = list(sys.path)
    find_local_code(verb, words)
    assert sys.path == [*before, here]


@pytest.mark.parametrize(
    ("verb", "words"),
    [
        ("eval", ["local_task:1"]),  # a run folder with an odd name
        ("eval", ["local_task:make", "--seed", "1"]),
        ("record", ["runs/a", "--out", "local_task:film.mp4"]),
        ("plot", ["local_task:make"]),
        ("eval", ["runs/a", "--trust", "numpy"]),
        ("eval", ["runs/a", "--trust", "nowhere_at_all"]),
        ("eval", ["runs/a", "--trust", "local_pack.other"]),
        ("train", ["ppo", "--env", "numpy:make"]),
        ("train", ["ppo", "--env", "CartPole-v1", "--env-kwargs", '{"local_task": 1}']),
        ("train", ["ppo", "--env", "CartPole-v1", "--out", "a:b"]),
    ],
)
def test_nothing_else_makes_the_directory_a_source_of_code(here, verb, words):
    before = list(sys.path)
    find_local_code(verb, words)
    assert sys.path == before


def test_a_process_for_an_environment_does_not_look_in_the_current_directory_first(tmp_path):
    """An environment without a row of its own is asked what it looks like, by a child process."""
    for name in ("json", "msgspec", "gymnasium", "traceback", "rookery"):
        (tmp_path / f"{name}.py").write_text("import os\nos.write(2, b'A STRANGER')\nos._exit(9)\n")
    code = "import rookery; print(rookery.configure('ppo', 'rookery/Counter-v0').preset)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert "STRANGER" not in done.stderr
    assert done.stdout == "vector\n", done.stderr


def test_settings_in_the_current_directory_do_not_start_latex(run, tmp_path):
    """matplotlib reads a matplotlibrc where it is started, and with usetex runs a program on the text it draws."""
    stranger = tmp_path / "stranger"
    stranger.mkdir()
    (stranger / "matplotlibrc").write_text("text.usetex: True\ntext.latex.preamble: \\input{/etc/passwd}\n")
    for name in ("latex", "dvipng", "kpsewhich"):
        (stranger / name).write_text(f"#!/bin/sh\ntouch {stranger}/started\nexit 1\n")
        (stranger / name).chmod(0o755)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "PATH": f"{stranger}{os.pathsep}{os.environ['PATH']}",
    }
    command = [sys.executable, "-P", "-m", "rookery", "plot", str(run)]
    done = subprocess.run(command, cwd=stranger, env=environment, capture_output=True, text=True, timeout=120)
    assert not (stranger / "started").exists()
    assert done.returncode == 0, done.stderr
