"""Execute the notebooks of docs/notebooks, each in a kernel and an empty folder of its own.

    python docs/site/notebooks.py    executes them and stores what they print and draw

The tests execute them too (tests/test_notebooks.py), and leave the stored outputs as they are.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
PATIENCE = 120  # seconds for one cell


def executed(path: Path, folder: Path) -> nbformat.NotebookNode:
    """The notebook with its outputs; an exception in a cell is raised here."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=PATIENCE, kernel_name="python3", record_timing=False,
        resources={"metadata": {"path": str(folder)}},
    )  # fmt: skip
    client.execute()
    return notebook


def tidied(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Without what differs from one machine to the next."""
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    for number, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{number}", {}
        for output in cell.get("outputs", []):
            output.pop("metadata", None)
            if output.output_type in ("display_data", "execute_result"):
                output.metadata = {}
    return notebook


def main() -> None:
    for path in [Path(word) for word in sys.argv[1:]] or NOTEBOOKS:
        with tempfile.TemporaryDirectory() as folder:
            nbformat.write(tidied(executed(path, Path(folder))), path)
        print(path)


if __name__ == "__main__":
    main()
