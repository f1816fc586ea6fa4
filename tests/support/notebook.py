"""The notebook of docs/, run in a directory of its own."""

import os
import sys
from pathlib import Path
from unittest import mock

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "docs" / "first_model.ipynb"
BUG = ROOT / "docs" / "missing_all_reduce.py"  # the file that a cell imports


def executed(directory: Path) -> nbformat.NotebookNode:
    """The notebook with the outputs of its cells, run in a new kernel in this directory."""
    (directory / BUG.name).symlink_to(BUG)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    folders = [str(Path(sys.executable).parent), os.environ["PATH"]]
    environment = {"PATH": os.pathsep.join(folders), "PYTHONPATH": str(ROOT), "TERM": "dumb"}
    resources = {"metadata": {"path": str(directory)}}
    with mock.patch.dict(os.environ, environment):
        client = NotebookClient(
            notebook, timeout=300, resources=resources, record_timing=False, coalesce_streams=True
        )
        client.execute()
    return notebook
