"""The command line and `rookery.configure` speak of the same configuration."""

import dataclasses
import json
import re

import pytest

from rookery.cli.configure import changes, config_for
from rookery.cli.flags import comments_of, flags_of
from rookery.cli.main import main
from rookery.core.config import RunConfig
from rookery.core.errors import CheckpointError, UsageError
from rookery.recipes import RECIPES
from rookery.run.configured import configure


def read(*words: str) -> RunConfig:
    return config_for("ppo", list(words), "rookery train ppo")


@pytest.mark.parametrize(
    "words, fields",
    [
        ("", {}),
        ("--env-steps 1e5 --seed 3 --out /tmp/x", {"env_steps": 100_000, "seed": 3, "out": "/tmp/x"}),
        ("--env_steps=5", {"env_steps": 5}),
        ("--algo.clip 0.1 --algo.target-kl 0.02", {"algo.clip": 0.1, "algo.target_kl": 0.02}),
        ("--algo.clip-end None", {"algo.clip_end": None}),
        ("--net.hidden 32 16", {"net.hidden": (32, 16)}),
        ("--core lstm --precision bf16", {"net.core": "lstm", "net.precision": "bf16"}),
        ("--quiet --compile --net.normalize-obs", {"quiet": True, "compile": True, "net.normalize_obs": True}),
        ("--no-algo.normalize-advantage --quiet False", {"algo.normalize_advantage": False}),
        ("--target-return -100", {"target_return": -100.0}),
        ("--atari.sticky 0.25 --no-atari.fire-reset", {"atari.sticky": 0.25, "atari.fire_reset": False}),
        ("--checkpoint.every 50k --supervisor.restarts 0", {"checkpoint.every": 50_000, "supervisor.restarts": 0}),
        ("--topology local --actors 4", {"topology": "local", "actors": 4}),
        ("--actors 2 --envs-per-actor=3", {"actors": 2, "envs_per_actor": 3}),
        ("--topology serial --actors 2", {"topology": "serial", "actors": 2}),
        ("--topology auto --actors 2", {"topology": "auto", "actors": 2}),
        ("--ranks 2", {"ranks": 2}),
        ("--ray-address 10.0.0.1:6379", {"ray": {"address": "10.0.0.1:6379"}}),
        ("--topology local", {"topology": "local"}),
        ("--preset vector --algo.lr 0.5", {"preset": "vector", "algo.lr": 0.5}),
    ],
)
def test_words_and_python_give_the_same_config(words, fields):
    assert read("--env", "CartPole-v1", *words.split()) == configure("ppo", "CartPole-v1", **fields)


def test_environment_arguments_are_json():
    config = read("--env", "CartPole-v1", "--env-kwargs", '{"max_episode_steps": 9, "a": [null, true]}')
    assert config.env_kwargs == {"max_episode_steps": 9, "a": [None, True]}


def test_more_actors_share_the_presets_environments():
    one, four = read("--env", "CartPole-v1"), read("--env", "CartPole-v1", "--actors", "4")
    assert (four.actors, four.lanes) == (4, one.lanes)


def test_an_unlisted_environment_takes_the_row_of_its_kind():
    config = read("--env", "MountainCarContinuous-v0", "--seed", "2")
    assert (config.preset, config.seed) == ("continuous", 2)


@pytest.mark.parametrize(
    "words, message",
    [
        ("", "which environment"),
        ("--env CartPole-v1 --recipe dqn", "no flag --recipe"),
        ("--env CartPole-v1 --algorithm x:y", "no flag --algorithm"),
        ("--env CartPole-v1 --clip 0.1", "did you mean --algo.clip"),
        ("--env CartPole-v1 --preset cartpol", "did you mean cartpole"),
        ("--env CartPole-v1 --topology loca", "--topology: 'loca' is not one of auto, serial, local"),
        ("--env CartPole-v1 --actors two", "--actors: 'two' is not a whole number"),
        ("--env CartPole-v1 --env-kwargs {", "--env-kwargs is not JSON"),
        ("--env CartPole-v1 --env-kwargs 3", "--env-kwargs is a JSON object"),
        ("--env CartPoll-v1", "CartPole-v1"),
    ],
)
def test_a_wrong_word_is_a_usage_error(words, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        read(*words.split())


def test_changes_are_dotted_and_only_what_differs():
    old = configure("ppo", "CartPole-v1")
    new = configure("ppo", "CartPole-v1", **{"algo.clip": 0.3, "env_steps": 7, "net.hidden": (1,)})
    assert changes(old, new) == {"algo.clip": 0.3, "env_steps": 7, "net.hidden": (1,)}
    assert changes(old, old) == {}


@pytest.mark.parametrize("name", ["ppo", "dqn", "d4pg"])
def test_help_names_and_explains_every_field(capsys, name):
    assert main(["train", name, "--help"]) == 0
    text = capsys.readouterr().out
    flat = re.sub(r"[\s│]+", " ", text)
    recipe = RECIPES[name]
    blank = RunConfig(recipe=name, algorithm=recipe.algorithm, env="", algo=recipe.config())
    for flag in set(flags_of(blank)) - {"recipe", "algorithm", "history"}:
        assert f"--{flag}" in text
    groups = [blank, *(getattr(blank, field.name) for field in dataclasses.fields(blank))]
    groups += [blank.algo.replay] if name != "ppo" else []
    for group in filter(dataclasses.is_dataclass, groups):
        comments = comments_of(type(group))
        plain = {f.name for f in dataclasses.fields(group) if not dataclasses.is_dataclass(getattr(group, f.name))}
        for field in plain - {"recipe", "algorithm", "preset", "init_from", "history"}:
            assert comments[field] in flat


def test_help_for_an_environment_has_its_defaults(capsys):
    assert main(["train", "ppo", "--env", "CartPole-v1", "--help"]) == 0
    text = re.sub(r"[\s│]+", " ", capsys.readouterr().out)
    assert "preset 'cartpole'" in text and "passes over a batch (default: 20)" in text


# Beginning with the networks of another run


def test_the_network_of_another_run_is_taken_and_its_flags_are_told_if_it_does_not_fit(finished, tmp_path):
    words = ["--env", "CartPole-v1", "--init-from", str(finished)]
    config = config_for("ppo", words, "prog")
    assert config.init_from.run == str(finished) and config.net.hidden == (64, 64)
    with pytest.raises(UsageError, match=r"it would fit with --net\.hidden 64 64$"):
        config_for("ppo", [*words, "--net.hidden", "8"], "prog")
    with pytest.raises(UsageError, match="--init-best is for --init-from RUN"):
        config_for("ppo", ["--env", "CartPole-v1", "--init-best"], "prog")
    with pytest.raises(CheckpointError, match="is not a run folder"):
        config_for("ppo", ["--env", "CartPole-v1", "--init-from", str(tmp_path)], "prog")


def test_a_run_that_names_code_is_refused_with_the_command_that_allows_it(run):
    config = json.loads((run / "config.json").read_text())
    config["net"]["module"] = "stranger.nets:Torso"
    (run / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match=r"rookery train ppo .*--init-from.* --trust stranger.nets"):
        config_for("ppo", ["--env", "CartPole-v1", "--init-from", str(run)], "prog")
