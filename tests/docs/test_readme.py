"""The README's Python runs as printed."""

import re
from pathlib import Path

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_the_python_blocks_run_one_after_the_other(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        exec(compile(block, "README.md", "exec"), names)
    assert names["logits"].shape == (8, 64, 257)
    assert capsys.readouterr().out.endswith("torch.Size([2, 64])\n")
