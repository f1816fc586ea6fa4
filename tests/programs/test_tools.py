"""The programs in tools/, run as users run them."""

import json

from megazoo.programs import plot_metrics, plot_schedule
from tests.support.inference import run_main
from tests.support.programs import run_tool


def test_plot_metrics_draws_a_png(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    lines = [{"step": step, "loss": 3 / step} for step in (1, 2, 3)] + [
        {"step": 3, "eval_loss": 1.5},
        {"step": 3, "test_loss": 1.6},
        {"step": 3, "test_loss": 1.6},
    ]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = run_tool("plot_metrics.py", metrics, metrics, "--output", tmp_path / "loss.png")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_plot_metrics_tells_mistakes_in_one_line(tmp_path, capsys, monkeypatch):
    (tmp_path / "broken").write_text('{"step": 1, "loss": 2}\nnonsense\n')
    for arguments, message in {
        (): "at least one metrics file is required (see --help)",
        ("--ouput", "x"): "unknown flag --ouput; did you mean --output? (--help lists all)",
        (tmp_path / "none",): f"{tmp_path}/none: No such file or directory",
        (tmp_path / "broken",): f"{tmp_path}/broken, line 2 is not a line of metrics",
    }.items():
        code, _, error = run_main(plot_metrics, monkeypatch, capsys, *arguments)
        assert (code, error) == (2, f"plot_metrics.py: error: {message}\n")


def test_plot_schedule_draws_png_and_svg_and_tells_the_bubble(tmp_path, capsys, monkeypatch):
    how = ["--pp", "4", "--microbatches", "8", "--output"]
    plot_schedule.main(["--schedule", "zb-h1", *how, str(tmp_path / "a.svg")])
    drawn = (tmp_path / "a.svg").read_text()
    assert drawn.count("<!-- W") == 4 * 8
    assert "<!-- zb-h1, virtual-pp 1: bubble 12.5% of the work -->" in drawn  # 3 of 24
    plot_schedule.main(["--virtual-pp", "2", *how, str(tmp_path / "a.png")])
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    for arguments, message in {
        ("--pp", "0"): "--pp, --virtual-pp and --microbatches must each be at least 1",
        tuple("--pp 1 --virtual-pp 2".split()): "--virtual-pp above 1 needs a pipeline: "
        "use --pp 2 or more",
        tuple(
            "--schedule zb-h1 --virtual-pp 2".split()
        ): "schedule zb-h1 supports one stage per rank: use virtual-pp 1, or schedule 1f1b",
        ("--output", "a.pdf"): "--output a.pdf must end in .png or .svg",
        ("--cost", "1", "2"): "--cost must be three numbers above 0: the times of F, I and W",
        ("--output", "/none/a.svg"): "can't write /none/a.svg: No such file or directory",
    }.items():
        code, _, error = run_main(plot_schedule, monkeypatch, capsys, *arguments)
        assert code in (1, 2)
        assert error == f"plot_schedule.py: error: {message}\n"
