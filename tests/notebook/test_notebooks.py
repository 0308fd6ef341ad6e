"""The notebooks in notebooks/ run from top to bottom, each in a fresh kernel with an embedded worker."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.integration.programs import ROOT, environment

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
TIMEOUT_SECONDS = 100


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    """A kernel's environment: no network, and no saved contexts."""
    folders = {name: str(tmp_path / name) for name in ("XDG_CONFIG_HOME", "XDG_STATE_HOME")}
    return environment(PYTHONPATH=str(ROOT), HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", **folders)


def test_all_of_them_are_there() -> None:
    assert [path.name[:3] for path in NOTEBOOKS] == ["01-", "02-", "03-", "04-", "05-", "06-"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs_and_counters(path: Path) -> None:
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    for cell in book.cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None


@pytest.mark.notebooks
@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, variables: dict[str, str], tmp_path: Path) -> None:
    book = nbformat.read(path, as_version=4)
    client = NotebookClient(
        book, timeout=TIMEOUT_SECONDS, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute(env=variables)
    warnings = [
        output["text"]
        for cell in book.cells
        for output in cell.get("outputs", [])
        if output.get("name") == "stderr" and "Warning" in output["text"] and "TqdmWarning" not in output["text"]
    ]
    assert warnings == []
