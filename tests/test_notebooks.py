"""The notebooks run, in a real kernel; what is stored of them is small and of no particular machine."""

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))


def test_there_are_notebooks():
    assert [path.stem for path in NOTEBOOKS] == ["first-run", "own-environment"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs/site")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    from notebooks import executed

    cells = executed(path, tmp_path).cells
    assert list((tmp_path / "runs").glob("*/summary.json"))
    said = [output for cell in cells for output in cell.get("outputs", []) if output.output_type != "error"]
    stored = [output for cell in json.loads(path.read_text())["cells"] for output in cell.get("outputs", [])]
    assert [each.output_type for each in said] == [each["output_type"] for each in stored]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_is_stored_is_small_and_of_no_machine(path):
    text = path.read_text()
    assert len(text) < 150_000
    cells = json.loads(text)["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    assert outputs and all(cell.get("execution_count", 1) for cell in cells), "python docs/site/notebooks.py"
    assert [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"] == []
    shown = json.dumps([output.get("text", output.get("data", {}).get("text/plain")) for output in outputs])
    assert not re.search(rf"{re.escape(sys.prefix)}|/(tmp|home|root|Users)/|\\u001b", shown)
