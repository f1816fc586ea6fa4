"""The notebook runs as it is, and shows the outputs of a run."""

import nbformat
import pytest

from tests.support.notebook import NOTEBOOK, executed


def printed(notebook: nbformat.NotebookNode) -> list[str]:
    """What each cell of code printed."""
    return [
        "".join(output.get("text", "") for output in cell.outputs)
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


@pytest.mark.slow
def test_the_notebook_runs_and_shows_what_it_prints(tmp_path):
    """A cell that raises an exception ends the run. Programs that a cell starts do not."""
    shown = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(shown)
    texts = printed(executed(tmp_path))
    # Numbers of the first lines and of programs differ in their last digits between machines.
    assert [text.split()[:1] for text in texts] == [text.split()[:1] for text in printed(shown)]
    *_, passed, failed, trained = texts
    assert passed.count("  pass") == 2
    assert "gradient of norm.weight: differs" in failed
    assert "step 20/20  validation loss" in trained
    assert (tmp_path / "runs/relu2/latest").read_text() == "step_00000020\n"
