"""`rookery sweep`: how values, ranges and seeds are spelt, and what is said of mistakes before anything starts."""

from __future__ import annotations

import pytest

from rookery.cli import sweep_words
from rookery.cli.main import main
from rookery.cli.sweep_words import sorted_words, values
from rookery.core.errors import UsageError
from rookery.run.configured import configure
from rookery.sweeps.plan import Range


@pytest.fixture(scope="module")
def base():
    return configure("ppo", "CartPole-v1")


def test_flags_of_the_sweep_are_told_from_fields_of_the_run():
    words = "ppo --env CartPole-v1 --seeds 5 --set algo.lr 1e-4,3e-4 --set net.core-size=64,128 --optuna=20"
    words += " --search algo.clip log 0.1 0.3 --env-steps 50k --retry --quiet"
    found = sorted_words(words.split())
    assert found.rest == ["ppo", "--env", "CartPole-v1", "--env-steps", "50k", "--quiet"]
    assert found.one == {"seeds": "5", "optuna": "20", "retry": ""}
    assert found.set == {"algo.lr": "1e-4,3e-4", "net.core_size": "64,128"}
    assert sweep_words.ranges(found.search) == {"algo.clip": Range(0.1, 0.3, log=True)}
    assert sorted_words(["--set", "core", "none,lstm"]).set == {"net.core": "none,lstm"}


@pytest.mark.parametrize(
    "path, words, expected",
    [
        ("algo.lr", "1e-4,3e-4", [1e-4, 3e-4]),
        ("env_steps", "50k,1e5,2M", [50_000, 100_000, 2_000_000]),
        ("net.hidden", "64 64,32", [[64, 64], [32]]),
        ("net.hidden", "[[64, 64], [32]]", [[64, 64], [32]]),
        ("net.core", "none,lstm", ["none", "lstm"]),
        ("target_return", "none,475", [None, 475.0]),
        ("net.normalize_obs", "true,off", [True, False]),
        ("env_kwargs", '[{"length": 10}, {}]', [{"length": 10}, {}]),
        ("net.module", "a.b:C,a.b:D", ["a.b:C", "a.b:D"]),
    ],
)
def test_values_have_the_type_of_their_field(base, path, words, expected):
    assert values(base, path, words) == expected


@pytest.mark.parametrize(
    "path, words, why",
    [
        ("algo.lr", "1e-4,much", "--set algo.lr: 'much' cannot be used; it must be"),
        ("env_steps", "0", "must be a whole number, 1 or more"),
        ("net.hidden", "64 wide", "--set net.hidden: 'wide'"),
        ("net.core", "none,rnn", "must be none or gru or lstm"),
        ("env_kwargs", "length=10", "give a list in JSON"),
        ("net.hidden", "[64, 64", "begins like a list in JSON"),
        ("algo.learning_rate", "1", "there is no field 'algo.learning_rate' to vary"),
    ],
)
def test_wrong_values_are_named(base, path, words, why):
    with pytest.raises(UsageError) as caught:
        values(base, path, words)
    assert why in str(caught.value)


def test_seeds_are_a_number_or_a_list():
    assert sweep_words.seeds("5") == 5 and sweep_words.seeds("3,7,9") == (3, 7, 9) and sweep_words.seeds("7,") == (7,)
    with pytest.raises(UsageError, match="neither a number of seeds nor a list"):
        sweep_words.seeds("a")


@pytest.mark.parametrize(
    "words, why",
    [
        ("", "usage: rookery sweep"),
        ("--env CartPole-v1", "which recipe? It comes first"),
        ("ppo", "which environment?"),
        ("ppo --env CartPole-v1 --seed 3", "a sweep has --seeds"),
        ("ppo --env CartPole-v1 --seeeds 2", "there is no flag --seeeds; did you mean --seeds?"),
        ("ppo --env CartPole-v1 --set algo.lr", "--set is not complete; write for example --set algo.lr 1e-4,3e-4"),
        ("ppo --env CartPole-v1 --set algo.lr 1 --set algo.lr 2", "has its values already"),
        ("ppo --env CartPole-v1 --search algo.lr log 1 2", "say how many trials"),
        ("ppo --env CartPole-v1 --optuna 3 --search algo.lr normal 1 2", "write range LOW HIGH or log LOW HIGH"),
        ("ppo --env CartPole-v1 --jobs none", "--jobs: 'none' is not a positive whole number"),
        ("ppo --env CartPole-v1 --jobbs 2", "there is no flag --jobbs"),
        ("ppo --env CartPole-v1 --overwrite", "--overwrite does not belong to a sweep"),
        ("ppo --env CartPole-v1 --set algo.gamma 0.9,1.5", "must be from 0 to 1"),
        ("--resume nowhere", "nowhere is not the folder of a sweep"),
        ("--resume nowhere --set algo.lr 1,2", "--set belongs to the sweep and cannot change"),
    ],
)
def test_mistakes_are_told_and_nothing_is_written(words, why, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", *words.split()]) in (2, 6)
    out, err = capsys.readouterr()
    assert why in out + err and list(tmp_path.iterdir()) == []


def test_help_shows_the_spellings(capsys):
    assert main(["sweep", "--help"]) == 0
    assert "--search FIELD log LOW HIGH" in capsys.readouterr().out
