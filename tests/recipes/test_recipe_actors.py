"""How many actors a run has if only `--topology local` is given: one per core, if they divide the environments."""

import pytest

from rookery.core.machine import Machine
from rookery.recipes import RECIPES


@pytest.mark.parametrize("cores, actors", [(1, 1), (2, 2), (3, 2), (64, 8)])
def test_actors_are_as_many_as_the_cores_that_the_cgroup_allows(monkeypatch, cores, actors):
    monkeypatch.setattr(Machine, "cores", lambda _: cores)
    config = RECIPES["ppo"].build("CartPole-v1", spec=None, topology="local")
    assert (config.actors, config.lanes) == (actors, 8)
