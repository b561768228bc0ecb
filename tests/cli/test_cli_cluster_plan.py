"""`rookery bench cluster-plan`: the table, JSON, and errors that name the flag."""

import json

import pytest

from rookery.cli.main import main
from rookery.core.errors import UsageError

GIVEN = "bench cluster-plan --env CartPole-v1 --actor-steps-per-s 1000 --learner-s 0.01"


def test_a_table_with_assumptions_and_what_limits(capsys):
    assert main([*GIVEN.split(), "--recipe", "impala", "--steps-per-s", "10k"]) == 0
    text = capsys.readouterr().out
    assert "10,000 environment steps/s" in text and "Assumptions:" in text and "limit" in text.splitlines()[-1]
    assert "1,000 environment steps/s of one actor (8 environments): given" in text and "measured on" not in text


def test_json_has_the_same_numbers(capsys):
    words = [*GIVEN.split(), "--recipe=apex_dqn", "--steps-per-s=0.75k", "--draws-per-s", "1M", "--json"]
    assert main([*words, "--actor-steps-per-s", "75", "--algo.replay.shards", "2"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["plan"]["actors"] == 10 and report["plan"]["shards"] == 2 and report["measured"] == []
    assert report["rates"]["draws_per_s"] == 1e6 and report["nodes"]["cores"] == 16


def test_what_is_not_given_is_measured(capsys):
    words = "bench cluster-plan --recipe a2c --env CartPole-v1 --steps-per-s 1000 --learner-s 0.001 --seconds 0.05"
    assert main([*words.split(), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["measured"] == ["actor_steps_per_s"] and report["rates"]["learner_s"] == 0.001
    assert report["rates"]["draws_per_s"] is None and report["rates"]["actor_steps_per_s"] > 0


def test_help_lists_every_flag(capsys):
    assert main(["bench", "cluster-plan", "--help"]) == 0
    text = capsys.readouterr().out
    assert "--actor-steps-per-s N" in text and "(default: 16)" in text
    assert main(["bench", "--help"]) == 0 and "cluster-plan" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, message",
    [
        ("--steps-per-s 1000", "which recipe? --recipe"),
        ("--recipe ppo", "--steps-per-s 10k"),
        ("--recipe pppo --steps-per-s 1000", "--recipe: "),
        ("--recipe ppo --steps-per-s 0", "--steps-per-s: '0' is not a number above 0"),
        ("--recipe ppo --steps-per-s -5", "--steps-per-s: '-5' is not a number above 0"),
        ("--recipe ppo --steps-per-s many", "--steps-per-s: 'many' is not"),
        ("--recipe ppo --steps-per-s", "--steps-per-s needs a value"),
        ("--recipe ppo --steps-per-s 1000M", "--steps-per-s 1e+09 needs"),
        ("--recipe ppo --steps-per-s 1k --cores-per-node 1.5", "--cores-per-node: '1.5' is not a whole number"),
        ("--recipe ppo --steps-per-s 1k --cores-per-node 1 --ray.cpus-per-actor 2", "--cores-per-node is 1"),
        ("--recipe ppo --steps-per-s 1k --gbit-per-s 0", "--gbit-per-s: '0'"),
        ("--recipe ppo --steps-per-s 1k --algo.unrol 3", "--algo.unroll"),
    ],
)
def test_bad_input_names_the_flag(words, message, capsys):
    assert main([*GIVEN.split(), *words.split()]) == UsageError.exit_code
    assert message in capsys.readouterr().err
