"""The programs in tools/, run as users run them."""

import json
import math
import re
from pathlib import Path

import pytest

from megazoo.programs import plan, plot_layout, plot_metrics, plot_schedule
from tests.support.inference import run_main


def write_metrics(path, losses, **metrics):
    """A metrics file of a run with these losses, and one validation."""
    path.parent.mkdir(exist_ok=True)
    lines = [{"step": step, "loss": loss, **metrics} for step, loss in enumerate(losses, 1)]
    lines += [{"step": len(losses), "eval_loss": 1.5}, {"step": len(losses), "test_loss": 1.6}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def drawn_texts(path):
    """The texts of an SVG by matplotlib, which writes each as a comment."""
    return re.findall(r"<!-- (.*) -->", path.read_text())


def test_plot_metrics_draws_each_metric_that_the_runs_have(tmp_path, capsys):
    names = ["loss (nats per token)", "learning rate", "gradient norm", "tokens / s"]
    files = [
        write_metrics(tmp_path / "one.jsonl", [3.0, 2.0], lr=1e-3, grad_norm=None),
        write_metrics(tmp_path / "tp2.jsonl", [3.0, math.nan, 2.0], lr=1e-3, tokens_per_second=9.0),
    ]
    picture = tmp_path / "loss.svg"
    plot_metrics.main([*map(str, files), "--output", str(picture)])
    texts = drawn_texts(picture)
    assert [name for name in names if name in texts] == [names[0], names[1], names[3]]
    labels = {f"{run}: {part}" for run in ("one", "tp2") for part in ("training", "validation")}
    assert labels <= set(texts)
    plot_metrics.main([str(files[0]), "--output", str(tmp_path / "loss.png")])
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_plot_metrics_draws_differences_on_a_fixed_axis(tmp_path, capsys):
    same = write_metrics(tmp_path / "one" / "m.jsonl", [3.0, 2.0])
    other = write_metrics(tmp_path / "tp2" / "m.jsonl", [3.0, 2.5])
    axes = []
    for files in ([same, same], [same, other]):
        plot_metrics.main([*map(str, files), "--difference", "--output", str(tmp_path / "a.svg")])
        texts = drawn_texts(tmp_path / "a.svg")
        assert "rounding in fp32" in texts
        axes.append([text for text in texts if text.startswith("$10")])
    assert axes[0] == axes[1]
    assert len(axes[0]) == 10
    assert "|difference| from one" in texts


@pytest.mark.parametrize(
    ("paths", "labels"),
    [
        ("runs/one.jsonl runs/tp2.jsonl", "one tp2"),
        ("runs/one/m.jsonl runs/tp2/m.jsonl", "one tp2"),
        ("a/one/m.jsonl b/one/m.jsonl", "a b"),
        ("a/x/m.jsonl a/y/n.jsonl", "x/m y/n"),
        ("m.jsonl runs/m.jsonl", "m runs/m"),
        ("run.1 run.2", "run.1 run.2"),
        ("runs/m.jsonl", "m"),
    ],
)
def test_a_label_is_what_differs_in_the_paths(paths, labels):
    assert plot_metrics.labels_of([*map(Path, paths.split())]) == labels.split()


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


def test_plot_layout_draws_each_rank_in_its_place(tmp_path, capsys, monkeypatch):
    drawn = tmp_path / "a.svg"
    plot_layout.main([*"--tp 2 --pp 2 --cp 2 --dp 2 --ep 2 --output".split(), str(drawn)])
    texts = drawn_texts(drawn)
    assert sorted(int(text) for text in texts if text.isdecimal()) == [*range(16)]
    assert {"dp 1, cp 0", "pp 1", "tp 0..1"} <= set(texts)
    for arguments, message in {
        ("--tp", "0"): "--tp, --pp, --cp, --dp and --ep must each be at least 1",
        ("--dp", "2000"): "the layout has 2000 ranks: at most 1024 can be drawn",
        ("--output", "a.pdf"): "--output a.pdf must end in .png or .svg",
        tuple("--dp 4 --ep 3".split()): None,
    }.items():
        code, _, error = run_main(plot_layout, monkeypatch, capsys, *arguments)
        assert code == 2
        if message:
            assert error == f"plot_layout.py: error: {message}\n"


def test_plan_draws_the_memory_of_each_group_of_ranks(tmp_path, capsys):
    drawn = tmp_path / "a.svg"
    words = "--preset gpt2-tiny --tp 2 --pp 2 --memory 40MB --json - --plot"
    plan.main([*words.split(), str(drawn)])
    printed, texts = capsys.readouterr(), drawn_texts(drawn)
    assert printed.err == f"drew {drawn}\n"
    ranks = json.loads(printed.out)["ranks"]
    names = [f"pp {rank['pp']}, tp {rank['tp'][0]}" for rank in ranks]  # unequal shards
    assert len(names) == 4
    assert [text for text in texts if text.startswith("pp ")] == names
    assert {f"{rank['total'] / 1e6:.4g}MB" for rank in ranks} <= set(texts)
    assert {"weights", "gradients", "optimizer", "activations", "limit 40MB"} <= set(texts)
    assert {"MB per rank", "gpt2, tp 2 x pp 2 x dp 1, bfloat16, recompute none"} <= set(texts)
