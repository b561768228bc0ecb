"""An exception of the user's code is shown with file and line, wherever it is raised."""

import os
import re

import pytest
from support_ray import SMALL, cluster_of

import rookery
from rookery.cli.main import main
from rookery.core.errors import EnvError, LearnerError

ENV = """
import gymnasium

class Env(gymnasium.Wrapper):
    def step(self, action):
        return self.help(action)

    def help(self, action):
        raise RuntimeError("the wheel came off")

def step(render_mode=None):
    return Env(gymnasium.make("CartPole-v1"))

class Old(gymnasium.Wrapper):
    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, reward, terminated or truncated, info

def old(render_mode=None):
    return Old(gymnasium.make("CartPole-v1"))

def make():
    return 1 / 0
"""
NET = """
import torch

class Late(torch.nn.Linear):
    def __init__(self, spec, net):
        super().__init__(4, 8)
        self.features, self.calls = 8, 0

    def forward(self, obs):
        self.calls += 1
        if self.calls > 40:
            raise RuntimeError("forty calls are enough")
        return super().forward(obs["obs"])
"""
LINE = {"step": r'user_env.py", line 9, in help\n    raise RuntimeError\("the wheel came off"\)',
        "make": r'user_env.py", line 23, in make\n    return 1 / 0'}  # fmt: skip


@pytest.fixture(autouse=True)
def modules(tmp_path, monkeypatch):
    (tmp_path / "user_env.py").write_text(ENV)
    (tmp_path / "user_net.py").write_text(NET)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize("topology", ["serial", "local"])
@pytest.mark.parametrize("what", ["step", "make"])
def test_the_error_of_an_environment_has_the_users_frames(topology, what, tmp_path):
    fields = {"topology": topology, "supervisor": {"restarts": 0}, "out": str(tmp_path / "run"), "quiet": True}
    with pytest.raises(EnvError) as caught:
        rookery.train("ppo", env=f"user_env:{what}", preset="cartpole", env_steps=500, **fields)
    message = str(caught.value)
    assert re.search(LINE[what], message), message
    assert "rookery/envs" not in message, "frames of Rookery say nothing to its user"


def test_the_error_of_an_environment_on_a_ray_node_has_them_too(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with cluster_of(1), pytest.raises(EnvError) as caught:
        fields = {"preset": "cartpole", "env_steps": 500, "supervisor": {"restarts": 0}, "out": str(tmp_path / "run")}
        rookery.train("ppo", env="user_env:step", **(SMALL | fields))
    assert re.search(LINE["step"], str(caught.value)), str(caught.value)


def test_check_env_shows_the_frames(capsys):
    assert main(["check-env", "user_env:step"]) == EnvError.exit_code
    text = capsys.readouterr().out
    assert "RuntimeError: the wheel came off" in text and re.search(r"user_env.py.*line 9, in help", text)


def test_the_old_interface_is_told_what_to_return(capsys):
    assert main(["check-env", "user_env:old"]) == EnvError.exit_code
    text = " ".join(capsys.readouterr().out.split())
    assert "returned 4 values from step" in text and "return terminated (the task has ended) and truncated" in text
    assert "gymnasium.wrappers" not in text


def test_a_network_that_fails_in_the_learner_is_not_called_a_bug_in_rookery(tmp_path, capsys):
    words = ["--env", "CartPole-v1", "--net.module", "user_net:Late", "--out", str(tmp_path / "run"), "--quiet"]
    assert main(["train", "ppo", *words]) == LearnerError.exit_code
    end = capsys.readouterr().err.rpartition("error: ")[2]
    assert end.startswith("RuntimeError: forty calls are enough") and "bug in Rookery" not in end
    assert re.search(r'user_net.py", line 12, in forward\n    raise RuntimeError', end)
