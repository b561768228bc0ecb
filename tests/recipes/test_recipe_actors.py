"""Where actors run and how many there are, by what was said: `--topology local`, `--actors 4`, `--ranks 2`."""

import pytest

from rookery.core.machine import Machine
from rookery.recipes import RECIPES


@pytest.mark.parametrize("cores, actors", [(1, 1), (2, 2), (3, 2), (64, 8)])
def test_actors_are_as_many_as_the_cores_that_the_cgroup_allows(monkeypatch, cores, actors):
    monkeypatch.setattr(Machine, "cores", lambda _: cores)
    config = RECIPES["ppo"].build("CartPole-v1", spec=None, topology="local")
    assert (config.actors, config.lanes) == (actors, 8)


@pytest.mark.parametrize(
    "recipe, fields, topology",
    [
        ("ppo", {}, "auto"),
        ("ppo", {"actors": 4}, "local"),
        ("ppo", {"actors": 1}, "serial"),
        ("ppo", {"envs_per_actor": 2}, "serial"),
        ("ppo", {"topology": "auto"}, "auto"),
        ("ppo", {"topology": "auto", "actors": 2}, "local"),
        ("ppo", {"actors": 4, "topology": "serial"}, "serial"),
        ("ppo", {"ranks": 2}, "allreduce"),
        ("ppo", {"ranks": 2, "actors": 2}, "allreduce"),
        ("ppo", {"ranks": 2, "ray": {"address": "auto"}}, "ray_cluster"),
        ("ppo", {"ray.address": "auto"}, "ray_cluster"),
        ("ppo", {"actors": "two"}, "serial"),  # refused later, in words
        ("appo", {}, "local"),
        ("appo", {"topology": "auto"}, "local"),
        ("a3c", {"actors": 4}, "async_grads"),
        ("ddppo", {"actors": 4, "ranks": 2}, "allreduce"),
        ("a3c", {"ray": {"address": "auto"}}, "ray_cluster"),
    ],
)
def test_where_actors_run_follows_from_what_was_said(recipe, fields, topology):
    config = RECIPES[recipe].build("CartPole-v1", spec=None, preset="vector", **fields)
    assert config.topology == topology


def test_several_actors_keep_the_number_of_environments():
    assert RECIPES["ppo"].build("CartPole-v1", spec=None, actors=4).envs_per_actor == 2
