import ast
import importlib
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def executed(path: Path):
    # The README's own block does what the quickstart does.
    return pytest.param(path, marks=pytest.mark.matrix if "quickstart" in path.stem else pytest.mark.slow)


@pytest.mark.parametrize("path", [executed(path) for path in NOTEBOOKS], ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(path: Path, monkeypatch: pytest.MonkeyPatch):
    # As for whoever has a key: it may go to no address that the notebook names without saying so.
    monkeypatch.setenv("OPENAI_API_KEY", "sk-nobodys")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    notebook = nbformat.read(path, as_version=4)

    # As Jupyter does it: a notebook runs in its own folder.
    folder = {"metadata": {"path": path.parent}}
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources=folder).execute()

    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_no_outputs_but_marked_ones_defines_nothing_and_imports_what_is_there(path: Path):
    for cell in (cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"):
        assert bool(cell.outputs) == ("stored-output" in cell.metadata.get("tags", ()))
        for node in ast.walk(ast.parse(cell.source)):
            assert not isinstance(node, (ast.FunctionDef, ast.ClassDef))
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("profiling_agent"):
                module = importlib.import_module(node.module or "")
                assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []
