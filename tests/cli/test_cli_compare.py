"""`rookery compare`: the table and its JSON."""

import json
import shutil

import rookery
from rookery.cli.main import main
from rookery.core.errors import UsageError


def test_compare_shows_a_row_for_a_setting(run, tmp_path, capsys):
    other = shutil.copytree(run, tmp_path / "other")
    assert main(["compare", str(run), str(other), "--target-return", "9999"]) == 0
    told = capsys.readouterr().out
    for words in ("ppo", "CartPole-v1", "not reached; 0 of 2 reached 9,999", "2 runs are few", "the same seed"):
        assert words in told


def test_compare_as_json_and_in_python(run, capsys):
    assert main(["compare", str(run), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    (same,) = rookery.compare([run])
    assert row["runs"] == 1 and row["final"]["iqm"] == same.final.value


def test_mistakes_are_told(run, capsys):
    assert main(["compare"]) == UsageError.exit_code
    assert main(["compare", str(run), "--score", "CartPole-v1=much"]) == UsageError.exit_code
    assert "ENV=LOW:HIGH" in capsys.readouterr().err
