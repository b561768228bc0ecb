"""CONTRIBUTING.md and docs/extending.md tell how to add things: here somebody does what they say, word for word.

Files go to a folder outside of the repository. What changes Rookery itself changes a copy of the package.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OWN, CHANGE = ROOT / "docs/extending.md", ROOT / "CONTRIBUTING.md"
MARKED = re.compile(r"^<!-- ([^>\n]*) -->\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HERE = "run by tests/test_extending.py"


def write_files(page: Path, folder: Path) -> list[str]:
    """The files of a page, at the paths that it gives them."""
    written = []
    for mark, text in MARKED.findall(page.read_text()):
        if mark.startswith("write: "):
            path = folder / mark.removeprefix("write: ")
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            written.append(mark.removeprefix("write: "))
    return written


def apply_changes(page: Path, folder: Path) -> None:
    """The changes of a page. What surrounds each must be in its file exactly once: line numbers are not needed."""
    (changes,) = (text for mark, text in MARKED.findall(page.read_text()) if mark == "apply")
    for change in changes.split("--- ")[1:]:
        name, _, lines = change.partition("\n")
        old = "".join(line[1:] for line in lines.splitlines(True) if line[0] in " -")
        new = "".join(line[1:] for line in lines.splitlines(True) if line[0] in " +")
        before = (folder / name).read_text()
        assert before.count(old) == 1, f"{page.name}: {name} has this {before.count(old)} times:\n{old}"
        (folder / name).write_text(before.replace(old, new))


def carry_out(page: Path, folder: Path) -> list[str]:
    """The marked commands of a page, with the packages of that folder in front; what each has printed."""
    lines = [line for mark, text in MARKED.findall(page.read_text()) if mark == HERE for line in text.splitlines()]
    env = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    said = []
    for line in lines:
        words = [sys.executable, "-m", *shlex.split(line)]
        done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
        said.append(done.stdout)
    return said


def test_an_environment_an_algorithm_and_a_recipe_of_another_package(tmp_path):
    assert write_files(OWN, tmp_path) == ["own/corridor.py", "own/reinforce.py"]
    said = carry_out(OWN, tmp_path)
    assert len(said) == 3 and "ready to train on" in said[0]
    (result,) = (tmp_path / "runs/corridor/eval").glob("*.json")
    assert json.loads(result.read_text())["return_mean"] == pytest.approx(0.6)  # five steps to the goal: it has learnt


def test_a_recipe_of_another_package_trains_in_processes_and_with_memory(tmp_path, monkeypatch):
    import rookery

    write_files(OWN, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    net, where = {"core": "gru", "core_size": 8}, {"topology": "local", "actors": 2}
    run = rookery.train(
        "own.reinforce:RECIPE", env="own.corridor:make", net=net, env_steps=1_500, quiet=True, out="runs/a", **where
    )
    assert run.config.recipe == "reinforce" and run.summary["updates"] == 2
    action, _ = rookery.load(run.path, trust=("own",)).predict([0.2])
    assert action in (0, 1)


def test_a_table_step_by_step(tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(ROOT / "rookery", copy / "rookery", ignore=shutil.ignore_patterns("__pycache__"))
    write_files(OWN, copy)
    apply_changes(CHANGE, copy)
    assert write_files(CHANGE, copy) == ["rookery/tables/best.py", "own/best.py"]
    carry_out(CHANGE, copy)
    summary = json.loads((copy / "runs/best/summary.json").read_text())
    dropped = summary["ledger"]["dropped"]
    assert summary["updates"] > 0 and set(dropped) == {"not_best"}
    assert dropped["not_best"] == pytest.approx(summary["ledger"]["trained"], rel=0.2)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("nowhere:RECIPE", "No module named 'nowhere'"),
        ("rookery.recipes.ppo:RECIPES", "has no attribute 'RECIPES'"),
        ("rookery.recipes.ppo:PRESETS", "is not a Recipe"),
        (":RECIPE", "there is no recipe ':RECIPE'"),
    ],
)
def test_a_path_that_leads_to_no_recipe_is_an_error_of_one_line(path, words):
    from rookery.core.errors import UsageError
    from rookery.recipes import recipe

    with pytest.raises(UsageError, match=re.escape(words)):
        recipe(path)
