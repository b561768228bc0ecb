"""The package as others install it: an sdist, a wheel built from it, and that wheel in an environment of its own.

The environment takes the installed libraries from this one, by their folder alone: an editable install of Rookery in it
has no effect there.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WITHOUT = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def ask(*words: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        [str(word) for word in words], cwd=cwd, env=WITHOUT, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with the sdist and the wheel. The build tool fetches hatchling where it is not installed."""
    folder = tmp_path_factory.mktemp("built")
    here = ["--no-isolation"] if importlib.util.find_spec("hatchling") else []
    ask(sys.executable, "-m", "build", *here, "--outdir", folder, ROOT, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory) -> Path:
    """The folder of a fresh environment with the wheel."""
    folder = tmp_path_factory.mktemp("fresh") / "env"
    ask(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    (wheel,) = built.glob("*.whl")
    python = folder / "bin/python"
    pip = (sys.executable, "-m", "pip", "--python", python)
    ask(*pip, "install", "-q", "--no-deps", "--no-index", "--no-compile", wheel, cwd=folder)
    (site,) = folder.glob("lib/*/site-packages")
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")  # its own .pth files are not read
    return folder


def test_the_wheel_holds_the_package_and_nothing_else(built):
    (wheel,) = built.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    files = {path for path in (ROOT / "rookery").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert "rookery/py.typed" in names
    assert names == {str(path.relative_to(ROOT)) for path in files}


def test_the_sdist_holds_what_tests_and_docs_need(built):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        tops = {name.split("/")[1] for name in archive.getnames() if "/" in name}
    assert {"rookery", "tests", "docs", "examples", "benchmarks", "LICENSE", "constraints.txt"} <= tops
    assert not tops & {".venv", ".git", "runs", "dist"}


def test_the_wheel_works_in_a_fresh_environment(installed, tmp_path):
    where = ask(installed / "bin/python", "-c", "import rookery; print(rookery.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(installed)
    program = installed / "bin/rookery"
    assert "rainbow" in ask(program, "recipes", cwd=tmp_path)
    words = ("--env", "CartPole-v1", "--env-steps", "500", "--quiet", "--out", "first")
    ask(program, "train", "ppo", *words, "--topology", "local", "--actors", "2", cwd=tmp_path)
    assert (tmp_path / "first/summary.json").exists()
