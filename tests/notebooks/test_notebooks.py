"""The notebooks in `examples/notebooks` run from their first cell to their last."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="run by make test-notebooks")
nbclient = pytest.importorskip("nbclient", reason="run by make test-notebooks")

EXAMPLES = Path(__file__).parents[2] / "examples"
COMPILED = shutil.ignore_patterns("__pycache__")  # other tests import the examples at the same time


@pytest.mark.timeout(900)  # one of them is a whole run
@pytest.mark.parametrize("name", sorted(path.name for path in (EXAMPLES / "notebooks").glob("*.ipynb")))
def test_a_notebook_runs_and_is_kept_without_outputs(name: str, tmp_path: Path) -> None:
    for folder in ("notebooks", "own_algorithm"):
        shutil.copytree(EXAMPLES / folder, tmp_path / folder, ignore=COMPILED)
    notebook = nbformat.read(tmp_path / "notebooks" / name, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    where = {"metadata": {"path": str(tmp_path / "notebooks")}}
    nbclient.NotebookClient(notebook, timeout=800, kernel_name="python3", resources=where).execute()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code)
    assert not any(out.output_type == "error" for cell in code for out in cell.outputs)
