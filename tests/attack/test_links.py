"""Links, pipes and second names in a run folder: no verb follows, fills, empties or waits for one."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest

from rookery.cli.main import main

TRAIN = ["train", "ppo", "--env", "CartPole-v1", "--env-steps", "300", "--algo.unroll", "16", "--quiet"]
VERBS = {
    "eval": ["--episodes", "1"],
    "record": ["--max-steps", "5"],
    "plot": [],
    "resume": ["--env-steps", "900", "--quiet"],
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("links") / "run"
    assert main([*TRAIN, "--out", str(folder)]) == 0
    return folder


@pytest.fixture
def run(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture
def home(tmp_path) -> Path:
    """What is the user's own, and nobody else's affair."""
    folder = tmp_path / "home"
    (folder / "project").mkdir(parents=True, mode=0o755)
    (folder / "thesis.txt").write_text("mine")
    (folder / "project" / ".tmp-notes").write_text("mine")
    (folder / "project" / "events.out.tfevents.mine").write_text("mine")
    (folder / "project" / "actor-0.log").write_text("mine")
    return folder


def look(folder: Path) -> dict[str, tuple[int, str]]:
    return {
        str(path.relative_to(folder)): (stat.S_IMODE(path.stat().st_mode), path.read_text() if path.is_file() else "")
        for path in sorted(folder.rglob("*"))
    }


def plant(path: Path, kind: str, home: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    match kind:
        case "file link":
            path.symlink_to(home / "thesis.txt")
        case "new link":
            path.symlink_to(home / "new.txt")
        case "folder link":
            path.symlink_to(home / "project")
        case "pipe":
            os.mkfifo(path)
        case "second name":
            os.link(home / "thesis.txt", path)


READ, WRITTEN = 6, 7
CASES = [
    ("eval", "config.json", "pipe", READ),
    ("eval", "config.json", "file link", READ),
    ("eval", "spec.json", "pipe", READ),
    ("eval", "spec.json", "file link", READ),
    ("eval", "checkpoints", "folder link", READ),
    ("eval", "eval", "folder link", WRITTEN),
    ("record", "spec.json", "pipe", READ),
    ("record", "report", "folder link", WRITTEN),
    ("plot", "config.json", "pipe", READ),
    ("plot", "metrics.jsonl", "pipe", READ),
    ("plot", "metrics.jsonl", "file link", READ),
    ("plot", "report", "folder link", WRITTEN),
    ("plot", "report/curve.png", "file link", WRITTEN),
    ("plot", "report/curve.png", "new link", WRITTEN),
    ("resume", "config.json", "pipe", READ),
    ("resume", "lock", "file link", WRITTEN),
    ("resume", "lock", "new link", WRITTEN),
    ("resume", "lock", "pipe", WRITTEN),
    ("resume", "lock", "second name", WRITTEN),
    ("resume", "spec.json", "file link", WRITTEN),
    ("resume", "spec.json", "pipe", WRITTEN),
    ("resume", "summary.json", "new link", WRITTEN),
    ("resume", "metrics.jsonl", "file link", WRITTEN),
    ("resume", "metrics.jsonl", "pipe", WRITTEN),
    ("resume", "metrics.jsonl", "second name", WRITTEN),
    ("resume", "tensorboard", "folder link", WRITTEN),
    ("resume", "logs", "folder link", WRITTEN),
    ("resume", "logs/actor-0.log", "file link", WRITTEN),
    ("resume", "replay", "folder link", WRITTEN),
    ("resume", "checkpoints", "folder link", READ),
]


@pytest.mark.parametrize("verb, name, kind, code", CASES)
def test_no_verb_follows_what_was_planted(run, home, capsys, verb, name, kind, code):
    before = look(home)
    plant(run / name, kind, home)
    assert main([verb, str(run), *VERBS[verb]]) == code
    err = capsys.readouterr().err
    assert str(run / name) in err and ("it is a" in err or "2 names" in err), err
    assert look(home) == before


def test_names_that_could_be_guessed_are_not_used_and_links_among_checkpoints_not_followed(run, home):
    before = look(home)
    guessed = [run / f"{name}.json.tmp" for name in ("config", "spec", "summary")]
    for path in guessed:
        plant(path, "file link", home)
    for name in (".tmp-step-000000000400-00", ".old-step-000000000400", "step-000000000400", "step-000000999999"):
        plant(run / "checkpoints" / name, "folder link", home)
    assert main(["resume", str(run), "--env-steps", "700", "--quiet"]) == 0
    assert look(home) == before and all(path.is_symlink() for path in guessed)


def test_the_result_of_an_evaluation_is_shown_though_it_cannot_be_stored(run, home, capsys):
    plant(run / "eval", "folder link", home)
    assert main(["eval", str(run), "--episodes", "1", "--json"]) == WRITTEN
    out, err = capsys.readouterr()
    assert '"return_mean"' in out and "was not saved" in err


def test_the_path_that_the_user_gives_may_be_a_link(run, tmp_path, capsys):
    link = tmp_path / "latest"
    link.symlink_to(run)
    for verb, words in VERBS.items():
        assert main([verb, str(link), *words]) == 0, verb
    assert (run / "eval").is_dir() and (run / "report" / "curve.png").is_file()
