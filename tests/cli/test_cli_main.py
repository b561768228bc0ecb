"""The command itself: verbs, exit codes, errors of one line, and what it does not load."""

import os
import subprocess
import sys

import pytest

from rookery.cli.main import VERBS, main
from rookery.core.errors import CheckpointError, EnvError, LearnerError, NumericError, StorageError, UsageError


@pytest.mark.parametrize(
    "words, message",
    [
        ("trian", "there is no verb 'trian'; did you mean train?"),
        ("--halp", "there is no flag '--halp'"),
        ("train", "which recipe?"),
        ("train --env CartPole-v1", "which recipe?"),
        ("train pppo --env CartPole-v1", "there is no recipe 'pppo'; did you mean ppo or appo or ddppo?"),
        ("train ppo --env CartPole-v1 --sed 3", "there is no flag --sed; did you mean --seed"),
        ("train ppo --env CartPole-v1 --algo.minibatches 7", "cannot be cut into 7 equal minibatches"),
        ("eval", "RUN is missing"),
        ("eval x --epsodes 3", "did you mean --episodes?"),
        ("eval x --episodes 0", "at least 1"),
        ("eval x --epsilon 1.5", "from 0 to 1"),
        ("record x --fps -3", "pictures per second"),
        ("train ppo --env CartPole-v1 --algo.lr -1", "algo.lr is -1.0; it must be 0 or more"),
        ("train dqn --env CartPole-v1 --algo.replay.slack -1", "algo.replay.slack is -1.0; it must be 0 or more"),
        ("resume", "which run?"),
        ("plot", "which run?"),
        ("record", "RUN is missing"),
        ("check-env", "ENV is missing"),
        ("recipes pppo", "did you mean ppo or appo or ddppo?"),
        ("bench scalin", "did you mean scaling or ddppo-scaling?"),
        ("bench scaling", "which environment?"),
        ("doctor --sped", "did you mean --speed?"),
    ],
)
def test_a_wrong_request_is_one_line_and_exit_code_2(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(words.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize("verb", ["eval", "resume", "plot", "record"])
def test_what_is_not_a_run_is_a_checkpoint_error(verb, capsys, tmp_path):
    assert main([verb, str(tmp_path)]) == CheckpointError.exit_code
    assert "is not a run folder" in capsys.readouterr().err


@pytest.mark.parametrize("error", [UsageError, EnvError, LearnerError, NumericError, CheckpointError, StorageError])
def test_errors_end_with_their_code_and_without_a_traceback(error, capsys, monkeypatch):
    monkeypatch.setattr("rookery.cli.recipes.recipes", raiser(error("what happened")))
    assert main(["recipes"]) == error.exit_code
    assert capsys.readouterr().err == "error: what happened\n"
    assert main(["recipes", "--debug"]) == error.exit_code
    assert "Traceback" in capsys.readouterr().err


def test_an_unforeseen_error_shows_where_it_was(capsys, monkeypatch):
    monkeypatch.setattr("rookery.cli.recipes.recipes", raiser(ZeroDivisionError("oh")))
    assert main(["recipes"]) == 4
    assert "ZeroDivisionError: oh" in capsys.readouterr().err


def test_an_interrupt_outside_a_run_is_130(capsys, monkeypatch):
    monkeypatch.setattr("rookery.cli.recipes.recipes", raiser(KeyboardInterrupt()))
    assert main(["recipes"]) == 130
    assert capsys.readouterr().err == "error: interrupted\n"


def raiser(error: BaseException):
    def raise_it(words):
        raise error

    return raise_it


@pytest.mark.parametrize("words", ["recipes", "recipes ppo --json", "--help", "train ppo --help", "doctor --no-speed"])
def test_an_answer_that_cannot_be_written_is_storage_and_a_reader_that_leaves_is_none(words, capsys, monkeypatch):
    read, left = os.pipe()
    os.close(read)
    for fd, code in ((os.open("/dev/full", os.O_WRONLY), StorageError.exit_code), (left, 0)):
        with open(fd, "w") as stream, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stream)
            assert main(words.split()) == code
        said = capsys.readouterr().err
        assert said == ("error: standard output cannot be written: No space left on device\n" if code else "")


def test_help_names_every_verb(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {verb}" in text for verb in VERBS)
    assert main([]) == 2


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(verb, capsys):
    assert main([verb, "--help"]) == 0
    assert f"rookery {verb}" in capsys.readouterr().out


def test_help_and_misspelt_verbs_do_not_load_torch():
    code = (
        "import sys; from rookery.cli.main import main\n"
        "for words in ('--help', 'trian', 'train --help', 'train', 'eval --help', 'plot'): main(words.split())\n"
        "sys.exit('torch' in sys.modules or 'gymnasium' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_python_m_rookery_is_the_command():
    done = subprocess.run([sys.executable, "-m", "rookery", "--version"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split()[0]) == (0, "rookery")


def test_every_recipe_shows_its_presets(capsys):
    from rookery.recipes import RECIPES

    for recipe in RECIPES.values():
        assert main(["recipes", recipe.name]) == 0
        text = capsys.readouterr().out
        assert recipe.about in text
        assert all(preset.name in text for preset in recipe.presets)


def test_recipes_as_json_has_the_fields(capsys):
    import json

    assert main(["recipes", "ppo", "--json"]) == 0
    (recipe,) = json.loads(capsys.readouterr().out)
    assert recipe["name"] == "ppo"
    assert any("algo.lr" in preset["fields"] for preset in recipe["presets"])
