"""Damaged checkpoints and folders that cannot be written: what is used instead is said; nothing is called complete."""

import json
import os
import shutil
from pathlib import Path

import pytest

import rookery
from rookery.cli.main import main
from rookery.storage import checkpoint
from rookery.storage import folder as folders

TRAIN = ["train", "ppo", "--env", "CartPole-v1", "--env-steps", "1000", "--algo.unroll", "32", "--algo.epochs", "1"]


@pytest.fixture(scope="module")
def several(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("several") / "run"
    assert main([*TRAIN, "--checkpoint.every", "300", "--out", str(folder), "--quiet"]) == 0
    return folder


@pytest.fixture
def run(several, tmp_path) -> Path:
    return Path(shutil.copytree(several, tmp_path / "run"))


def paths(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").iterdir())


def damage(path: Path) -> None:
    blob = bytearray((path / "tensors.safetensors").read_bytes())
    blob[-9] ^= 1
    (path / "tensors.safetensors").write_bytes(blob)


def test_a_run_whose_last_checkpoint_is_damaged_is_not_complete_and_goes_on(run, capsys):
    *_, older, newest = paths(run)
    damage(newest)
    assert main(["resume", str(run), "--quiet"]) == 0
    out, err = capsys.readouterr()
    assert "is complete" not in out and "done after" in out
    assert f"{newest}: tensors.safetensors does not match its digest" in err and f"{older} is used instead" in err
    assert checkpoint.newest(run / "checkpoints")[1] == [], "it was replaced"
    assert "does not match its digest" in (run / "metrics.jsonl").read_text()


def test_an_empty_folder_with_a_large_number_does_not_make_a_run_complete(run, capsys):
    (run / "checkpoints" / "step-000000999999").mkdir()
    assert main(["resume", str(run)]) == 0
    out, err = capsys.readouterr()
    steps = checkpoint.newest(run / "checkpoints")[0].env_steps
    assert f"is complete with {steps:,} steps" in out and "step-000000999999: manifest.json is missing" in err
    assert main(["resume", str(run), "--env-steps", str(steps + 200), "--quiet"]) == 0
    assert "done after" in capsys.readouterr().out
    assert checkpoint.newest(run / "checkpoints")[0].env_steps >= steps + 200


@pytest.mark.parametrize("verb", ["resume", "eval"])
def test_where_nothing_loads_the_exit_code_is_6(run, capsys, verb):
    for path in paths(run):
        damage(path)
    assert main([verb, str(run)]) == 6
    out, err = capsys.readouterr()
    assert "complete" not in out and all(path.name in err for path in paths(run))


def test_an_evaluation_says_which_checkpoint_it_used_and_why(run, capsys):
    *_, older, newest = paths(run)
    damage(newest)
    assert main(["eval", str(run), "--episodes", "2", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["checkpoint"] == older.name
    assert f"warning: checkpoint {newest}" in err and f"{older} is used instead" in err


def test_a_policy_says_it_too(run):
    *_, older, newest = paths(run)
    assert rookery.load(run).notes == ()
    damage(newest)
    with pytest.warns(UserWarning) as caught:
        policy = rookery.load(run)
    assert policy.path == older and [str(each.message) for each in caught] == list(policy.notes)
    assert newest.name in policy.notes[0] and older.name in policy.notes[1]


def test_a_best_that_nobody_knows_is_said_to_be_the_newest(run, capsys):
    assert main(["eval", str(run), "--episodes", "2", "--best"]) == 0
    assert "no checkpoint has a score yet" in capsys.readouterr().err


def test_an_evaluation_in_a_folder_that_is_read_only_shows_its_result(run, capsys, monkeypatch):
    def read_only(*_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(folders, "write", read_only)
    assert main(["eval", str(run), "--episodes", "2", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["episodes"] == 2 and "the result was not saved: Read-only file system" in err
    assert main(["eval", str(run), "--episodes", "2"]) == 0
    assert "2 episodes" in capsys.readouterr().out


def test_what_a_run_writes_beside_its_checkpoints_is_synced(run, monkeypatch):
    synced, fsync = [], os.fsync

    def watched(handle):
        synced.append(os.readlink(f"/proc/self/fd/{handle}"))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", watched)
    assert main(["resume", str(run), "--env-steps", "1500", "--quiet"]) == 0
    assert sum(Path(name).parent == run and Path(name).name.startswith(".tmp-") for name in synced) == 3
    assert synced.count(str(run)) >= 3, "the folder too, for config.json, spec.json and summary.json"
