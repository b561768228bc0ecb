"""Every extra that brings environments brings all that they need: one of each is made and stepped, none is skipped."""

import re
import tomllib
from importlib.metadata import requires
from pathlib import Path

import numpy as np
import pytest
from packaging.requirements import Requirement

from rookery.core.config import AtariConfig, NetConfig
from rookery.envs.make import make

ENVS = {
    "atari": ["ALE/Pong-v5"],
    "mujoco": ["Hopper-v5"],
    "dmc": ["dmc/cartpole-swingup"],
    "box2d": ["LunarLander-v3", "BipedalWalker-v3", "CarRacing-v3"],
}
EXTRAS = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["optional-dependencies"]


class Config:
    def __init__(self, env):
        self.env, self.env_kwargs, self.atari, self.net = env, {}, AtariConfig(), NetConfig()


@pytest.mark.parametrize("extra, env", [(extra, env) for extra, envs in ENVS.items() for env in envs])
def test_an_environment_of_each_extra_steps(extra, env):
    installed = re.findall(r"rookery\[(.*?)\]", " ".join(EXTRAS["all"] + EXTRAS["dev"]))
    assert extra in ",".join(installed).split(","), f"make test does not install {extra}"
    lanes = make(Config(env), 2)
    action = lanes.spec.action
    obs = lanes.reset([1, 2])
    for _ in range(5):
        obs, reward, terminated, truncated = lanes.step(np.zeros((2, *action.shape), action.dtype))
    assert all(np.isfinite(leaf).all() for leaf in obs.values()) and np.isfinite(reward).all()
    assert terminated.shape == truncated.shape == (2,)
    lanes.close()


@pytest.mark.parametrize("extra", ["mujoco", "box2d"])
def test_an_extra_has_all_that_gymnasiums_extra_of_this_name_has(extra):
    """The tests' environment has more packages than a user's: an import that succeeds here may fail there."""
    theirs = [each for each in map(Requirement, requires("gymnasium")) if each.marker and "extra" in str(each.marker)]
    needed = {each.name for each in theirs if each.marker.evaluate({"extra": extra})}
    assert needed and needed <= {Requirement(each).name for each in EXTRAS[extra]}
