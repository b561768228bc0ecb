"""What a config may hold: wrong types, unknown choices and numbers out of range are named, whoever made the config."""

from __future__ import annotations

import dataclasses
import math
import typing
from pathlib import Path
from typing import Generic

import numpy as np
import pytest

import rookery
from rookery.algorithms.dpg import DPGConfig
from rookery.algorithms.dqn import DQNConfig
from rookery.algorithms.ppo import PPOConfig
from rookery.algorithms.registry import encode_config
from rookery.core.config import AtariConfig, CheckpointConfig, GradientConfig, NetConfig, ReplayConfig, SupervisorConfig
from rookery.core.errors import UsageError
from rookery.core.ranges import T, converted, describe, within
from rookery.recipes import recipe
from rookery.run.configured import configure
from rookery.run.run import check, read_config
from rookery.storage.stored import decode_config

GROUPS = (AtariConfig, NetConfig, ReplayConfig, SupervisorConfig, GradientConfig, CheckpointConfig)
ALGORITHMS = (PPOConfig, DQNConfig, DPGConfig)
FREE = {"log_std", "remove_alpha", "v_min", "v_max"}  # numbers of any sign and size


def a_run(name: str = "ppo", env: str = "CartPole-v1", **fields):
    return check(configure(name, env, **fields))


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"env_steps": 0}, "env_steps is 0; it must be a whole number, 1 or more"),
        ({"env_steps": 1.5}, "env_steps is 1.5; it must be a whole number, 1 or more"),
        ({"env_steps": math.inf}, "env_steps is inf; it must be a whole number, 1 or more"),
        ({"env_steps": True}, "env_steps is True; it must be a whole number"),
        ({"actors": -2, "envs_per_actor": 1}, "actors is -2"),
        ({"actors": 0}, "actors is 0; it must be a whole number, 1 or more"),
        ({"actors": "two"}, "actors is 'two'; it must be a whole number"),
        ({"env_kwargs": None}, "env_kwargs is None; it must be a dictionary"),
        ({"threads": -1}, "threads is -1; it must be a whole number, 0 or more"),
        ({"quiet": 1}, "quiet is 1; it must be True or False"),
        ({"seed": "one"}, "seed is 'one'; it must be a whole number"),
        ({"out": 3}, "out is 3; it must be text"),
        ({"target_return": "high"}, "target_return is 'high'; it must be a number or none"),
        ({"topology": "clustr"}, "topology is 'clustr'; it must be auto or serial or local"),
        ({"checkpoint": {"every": 0}}, "checkpoint.every is 0"),
        ({"checkpoint": {"keep": 0}}, "checkpoint.keep is 0"),
        ({"supervisor": {"step_deadline": -1.0}}, "supervisor.step_deadline is -1.0; it must be above 0"),
        ({"gradients": {"max_age": -1}}, "gradients.max_age is -1"),
        ({"atari": {"stack": 0}}, "atari.stack is 0"),
        ({"atari": {"sticky": 1.5}}, "atari.sticky is 1.5; it must be from 0 to 1"),
        ({"net": {"core": "ltsm"}}, "net.core is 'ltsm'; it must be none or gru or lstm"),
        ({"net": {"core_size": 0}}, "net.core_size is 0"),
        ({"net": {"hidden": (64, 0)}}, r"net.hidden is .64, 0.; it must be a list of values, each a whole number, 1"),
        ({"net": {"hidden": 64}}, "net.hidden is 64; it must be a list of values"),
        ({"algo": {"lr": -1e-3}}, "algo.lr is -0.001; it must be 0 or more"),
        ({"algo": {"gamma": 1.5}}, "algo.gamma is 1.5; it must be from 0 to 1"),
        ({"algo": {"gamma": math.nan}}, "algo.gamma is nan"),
        ({"algo": {"max_grad_norm": 0.0}}, "algo.max_grad_norm is 0.0; it must be above 0"),
        ({"algo": {"target_kl": -0.1}}, "algo.target_kl is -0.1; it must be above 0 or none"),
        ({"algo": 5}, r"algo is a group of fields.*algo=\{\"unroll\": ...\}"),
        ({"env_kwargs": {"size": object()}}, "cannot be stored in a config"),
    ],
)
def test_what_is_wrong_is_named_with_what_it_must_be(fields, said):
    with pytest.raises(UsageError, match=said):
        a_run(**fields)


@pytest.mark.parametrize(
    "recipe, env, path, wrong",
    [
        *(("dqn", "CartPole-v1", f"replay.{name}", 0) for name in ("batch", "prefetch", "remove_every")),
        ("dqn", "CartPole-v1", "replay.samples_per_insert", -1.0),
        ("dqn", "CartPole-v1", "replay.slack", -1.0),
        ("dqn", "CartPole-v1", "replay.alpha", -0.5),
        ("dqn", "CartPole-v1", "optimizer_eps", -1e-8),
        ("dqn", "CartPole-v1", "epsilon_share", 0.0),
        ("ddpg", "Pendulum-v1", "gamma", 1.5),
        ("ddpg", "Pendulum-v1", "tau", 0.0),
        ("ddpg", "Pendulum-v1", "actor_hidden", (0,)),
    ],
)
def test_an_algorithms_own_numbers_are_looked_at_too(recipe, env, path, wrong):
    *groups, name = path.split(".")
    fields: dict = {name: wrong}
    for group in reversed(groups):
        fields = {group: fields}
    with pytest.raises(UsageError, match=f"algo.{path} is"):
        a_run(recipe, env, algo=fields)


def test_a_refusal_leaves_no_folder(tmp_path):
    with pytest.raises(UsageError, match=r"algo.replay.batch"):
        rookery.train("dqn", env="CartPole-v1", out=str(tmp_path / "run"), algo={"replay": {"batch": 0}})
    assert list(tmp_path.iterdir()) == []


def test_numbers_of_numpy_paths_and_lists_are_taken_for_what_they_are(tmp_path):
    fields = {"seed": np.int64(7), "out": tmp_path / "run", "net": {"hidden": [8, np.int32(8)]}, "target_return": 1}
    run = rookery.train(
        "ppo", env="CartPole-v1", quiet=True, env_steps=64, envs_per_actor=2, actors=1,
        algo={"unroll": 8, "lr": np.float32(0.5), "minibatches": 1}, **fields,
    )  # fmt: skip
    config = read_config(run.path)
    assert config == run.config
    assert (config.seed, config.out, config.net.hidden) == (7, str(tmp_path / "run"), (8, 8))
    assert type(config.seed) is int and config.algo.lr == 0.5 and type(config.target_return) is float


def test_a_number_is_whole_however_it_is_written():
    config = a_run(env_steps=1e6, algo={"unroll": 64.0})
    assert (config.env_steps, config.algo.unroll) == (1_000_000, 64) and type(config.env_steps) is int


def test_a_file_is_refused_in_the_same_words():
    text = encode_config(a_run(algo={"gamma": 0.5})).replace(b'"gamma": 0.5', b'"gamma": 1.5')
    with pytest.raises(UsageError, match=r"config.json: algo.gamma is 1.5; it must be from 0 to 1"):
        decode_config(text)


def test_what_an_algorithm_of_ones_own_says_of_its_numbers_is_passed_on():
    @dataclasses.dataclass(frozen=True)
    class Own:
        low: float = 0.0
        high: float = 1.0

        def __post_init__(self):
            if self.low > self.high:
                raise ValueError("low must not be above high")

    @dataclasses.dataclass(frozen=True)
    class Run(Generic[T]):
        algo: T

    with pytest.raises(UsageError, match="algo cannot be used: low must not be above high"):
        converted({"algo": {"low": 2.0}}, Run[Own])


def test_a_right_config_is_not_changed():
    config = a_run()
    assert check(config) == config
    assert within(config.net) == config.net and within(config.algo) == config.algo


@pytest.mark.parametrize("kind", [*GROUPS, *ALGORITHMS], ids=lambda kind: kind.__name__)
def test_every_number_has_a_range_or_is_said_to_be_free(kind):
    hints = typing.get_type_hints(kind, include_extras=True)
    loose = {f.name for f in dataclasses.fields(kind) if hints[f.name] in (int, float, int | None, float | None)}
    assert loose <= FREE


@pytest.mark.parametrize("name", ["ppo", "dqn", "r2d2", "rainbow", "apex_dqn", "gorila", "d4pg", "apex_dpg", "ddpg"])
def test_every_preset_is_within(name):
    chosen = recipe(name)
    for preset in chosen.presets:
        check(chosen.build("some", lambda: None, preset.name))


def test_types_read_as_what_a_value_must_be():
    hints = typing.get_type_hints(DQNConfig, include_extras=True)
    assert describe(hints["lr_end"]) == "0 or more or none"
    assert describe(hints["epsilon_share"]) == "above 0, at most 1"
    assert describe(hints["optimizer"]) == "adam or rmsprop or adagrad"
    assert describe(hints["replay"]) == "a record of settings"
    assert describe(Path) == str(Path)
