"""Progress of long work: a bar on a terminal, lines otherwise."""

import re

import torch

import megazoo
from megazoo import terminal
from megazoo.programs import convert, evaluate, inspect_checkpoint

LINE = r"(\w+): (\d+)% of ([\d.]+)(\w*), .*/s, [\d:]+ left"


def test_lines_of_a_log_give_the_share_the_rate_and_the_time_left(monkeypatch, capsys):
    monkeypatch.setattr(terminal, "LINE_SECONDS", 0)
    with terminal.count_bar(4, "score", "rows") as bar:
        for _ in range(4):
            bar.update(1)
    lines = capsys.readouterr().err.splitlines()
    assert [re.fullmatch(LINE, line)[2] for line in lines] == ["25", "50", "75", "100"]


def test_short_work_prints_nothing(capsys):
    with terminal.byte_bar(10, "load") as bar:
        bar.update(10)
    assert capsys.readouterr().err == ""


def test_every_program_that_reads_or_writes_weights_shows_what_is_done(
    monkeypatch, capsys, tmp_path
):
    """The last line is of all bytes: nothing is left out of the count."""
    monkeypatch.setattr(terminal, "LINE_SECONDS", 0)
    model = megazoo.from_config("gpt2-tiny", seed=1)
    model.save_pretrained(tmp_path / "hf")
    (tmp_path / "text.txt").write_text("all that is read")
    model_bytes = sum(parameter.nbytes for parameter in model.parameters())
    file_bytes = sum(file.stat().st_size for file in (tmp_path / "hf").iterdir())
    text = ["--tokenizer", "byte", "--text", str(tmp_path / "text.txt")]
    for program, words, work, size in (
        (convert, [str(tmp_path / "shards"), "--tp", "2"], "convert", model_bytes),
        (inspect_checkpoint, ["--verify"], "verify", file_bytes),
        (evaluate, text, "load", model_bytes),
        (evaluate, text, "score", len("all that is read")),
    ):
        capsys.readouterr()
        program.main([str(tmp_path / "hf"), *words])
        lines = [re.fullmatch(LINE, line) for line in capsys.readouterr().err.splitlines()]
        last = [line for line in lines if line and line[1] == work][-1]
        shown = float(last[3]) * {"": 1, "k": 1e3, "M": 1e6}[last[4]]
        assert last[2] == "100", (work, last[0])
        torch.testing.assert_close(shown, float(size), rtol=0.01, atol=0)
