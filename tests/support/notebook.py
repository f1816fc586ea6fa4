"""The notebook of docs/, run in a directory of its own.

    python -m tests.support.notebook DIRECTORY

writes the notebook with the outputs of its cells into this directory. It's a process of its own,
because a kernel's sockets can't share one with tests that close file descriptors.
"""

import os
import subprocess
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "docs" / "first_model.ipynb"
BUG = ROOT / "docs" / "missing_all_reduce.py"  # the file that a cell imports
CELL_SECONDS, SECONDS = 120, 300


def executed(directory: Path) -> nbformat.NotebookNode:
    """The notebook with the outputs of its cells, run in this directory."""
    folders = [str(Path(sys.executable).parent), os.environ["PATH"]]
    environment = os.environ | {
        "PATH": os.pathsep.join(folders),
        "PYTHONPATH": str(ROOT),
        "TERM": "dumb",
    }
    command = [sys.executable, "-m", "tests.support.notebook", str(directory)]
    subprocess.run(command, check=True, cwd=ROOT, env=environment, timeout=SECONDS)
    return nbformat.read(directory / NOTEBOOK.name, as_version=4)


def main() -> None:
    directory = Path(sys.argv[1])
    (directory / BUG.name).symlink_to(BUG)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    resources = {"metadata": {"path": str(directory)}}
    options = {"record_timing": False, "coalesce_streams": True}
    NotebookClient(notebook, timeout=CELL_SECONDS, resources=resources, **options).execute()
    nbformat.write(notebook, directory / NOTEBOOK.name)


if __name__ == "__main__":
    main()
