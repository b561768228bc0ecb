"""One tiny finished run for the verbs that read runs. Tests that change it work on a copy."""

import shutil
from pathlib import Path

import pytest

from rookery.cli.main import main

ENV = """
import os
import gymnasium

def make(limit=20, render_mode=None):
    print("printed by the environment")
    os.write(1, b"written by a library")
    return gymnasium.make("CartPole-v1", max_episode_steps=limit, render_mode=render_mode)

class Broken(gymnasium.Wrapper):
    def step(self, action):
        raise RuntimeError("the wheel [came off]")

class FailsLate(gymnasium.Wrapper):
    taken = 0

    def step(self, action):
        self.taken += 1
        if self.taken > 200:
            raise RuntimeError("worn out")
        return super().step(action)

def fails_late(render_mode=None):
    return FailsLate(make(render_mode=render_mode))

def broken(render_mode=None):
    return Broken(gymnasium.make("CartPole-v1", render_mode=render_mode))
"""
TINY = ["--env-steps", "1500", "--algo.epochs", "2", "--quiet"]


@pytest.fixture(autouse=True)
def piped(monkeypatch) -> None:
    """Output as a pipe gets it; tests that run beside each other are told a width, which would break paths."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("cli") / "run"
    assert main(["train", "ppo", "--env", "CartPole-v1", "--out", str(folder), *TINY]) == 0
    return folder


@pytest.fixture
def run(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture
def own_env(tmp_path, monkeypatch) -> str:
    """A module outside Rookery, with factories `make` and `broken`."""
    (tmp_path / "own_cli_env.py").write_text(ENV)
    monkeypatch.syspath_prepend(tmp_path)
    return "own_cli_env"
