"""What the training program records: metrics, TensorBoard, traces, the loss scale."""

import gzip
import json
import re
import time
from collections import Counter

import pytest

from megazoo import pretrain
from megazoo.formats.source import SavedModel
from megazoo.models.counts import flops_per_token
from megazoo.parallel.schedule import zb_h1
from megazoo.trainer.metrics import StepLines
from tests.support.pretraining import SMALL, records


def test_float16_tells_its_loss_scale_and_the_steps_that_it_skips(tmp_path, capsys):
    metrics = tmp_path / "metrics"
    scale = ["--initial-loss-scale", str(2.0**40), "--hysteresis", "1"]
    pretrain.main([*SMALL, *scale, "--dtype", "float16", "--steps", "3", "--metrics", str(metrics)])
    first, *_, last = [record for record in records(metrics) if "loss" in record]
    assert (first["skipped"], first["grad_norm"], first["loss_scale"]) == (True, None, 2.0**39)
    assert last["step"] == 3
    assert (
        "step 1: the gradients overflowed, step skipped; loss scale 5.49756e+11"
        in capsys.readouterr().out
    )


def test_metrics_evaluation_and_summary(tmp_path, capsys):
    metrics = tmp_path / "new" / "metrics.jsonl"
    words = ["--metrics", str(metrics), "--save", str(tmp_path / "run")]
    pretrain.main([*SMALL, *"--steps 3 --eval-interval 2".split(), *words])
    steps = [record for record in records(metrics) if "loss" in record]
    keys = "step loss grad_norm lr tokens_per_second tflops step_time "
    keys += "consumed_samples consumed_tokens peak_memory"
    parts = {
        f"{part}_time" for part in ("data", "forward", "backward", "communication", "optimizer")
    }
    assert [set(record) for record in steps] == [set(keys.split()) | parts] * 3
    assert all(0 < sum(record[part] for part in parts) <= record["step_time"] for record in steps)
    assert steps[2]["consumed_tokens"] == 3 * 8 * 32
    evaluations = [record for record in records(metrics) if "eval_loss" in record]
    assert [record["step"] for record in evaluations] == [2, 3]
    assert set(evaluations[0]) == {"step", "eval_loss", "eval_perplexity"}
    out = capsys.readouterr().out
    line = r"step 2/3  loss \d\.\d{4}  grad norm \S+  lr \S+  [\d,]+ ms  [\d,]+ tokens/s  "
    assert re.search(line + r"[\de.,-]+ TFLOP/s  \d+\.\d\d GB  \d+:\d\d left\n", out)
    for words in (
        "validation loss",
        "step_00000003",
        f"--load {tmp_path}/run --steps 6",
        f"tools/generate.py {tmp_path}/run --prompt",
        "plot_metrics.py",
    ):
        assert words in out


def test_tensorboard_and_mfu(tmp_path, capsys):
    """TensorBoard's reader finds what the metrics file says, a resumed run in place of what came
    after its start."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    metrics, board = tmp_path / "metrics.jsonl", tmp_path / "board"
    arguments = ["--metrics", str(metrics), "--tensorboard", str(board)]
    arguments += ["--peak-tflops", "0.5", "--save"]
    first = ["--steps", "3", "--save-interval", "2"]
    pretrain.main([*SMALL, *arguments, str(tmp_path / "a"), *first])
    resumed = ["--load", str(tmp_path / "a" / "step_00000002"), "--steps", "4", "--device", "cpu"]
    pretrain.main([*arguments, str(tmp_path / "b"), *resumed])
    told = EventAccumulator(str(board)).Reload()
    steps = {record["step"]: record for record in records(metrics) if "loss" in record}
    for key in ("loss", "mfu", "forward_time"):
        points = {event.step: event.value for event in told.Scalars(f"train/{key}")}
        assert points == pytest.approx(
            {step: record[key] for step, record in steps.items()}, rel=1e-6
        )
    assert [event.step for event in told.Scalars("eval/loss")] == [4]
    flops = flops_per_token(SavedModel(tmp_path / "b").config, 32)
    for record in steps.values():
        assert record["mfu"] == pytest.approx(record["tokens_per_second"] * flops / 0.5e12)
        assert record["tflops"] == pytest.approx(record["mfu"] / 2)
    assert re.search(r"TFLOP/s  mfu \d+\.\d%  ", capsys.readouterr().out)


def test_the_speed_of_a_line_is_that_of_the_steps_since_the_previous_line(monkeypatch):
    """Step 1 takes 1 s, each later step 0.2 s; an evaluation of 3 s follows step 2."""
    clock = iter([0.0, 1.0, 4.6])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    lines = StepLines(0, 8, 4, token_flops=5e8, peak=1e12)
    shown = [
        lines.line(step, 300, seconds, 2.0, 0.5, 1e-3, 610_000_000)
        for step, seconds in enumerate((1.0, 0.2, 0.2, 0.2), 1)
    ]
    start = "loss 2.0000  grad norm 0.500  lr 1.00e-03"
    assert shown == [
        f"step 1/8  {start}  1,000 ms  300 tokens/s  0.15 TFLOP/s  mfu 15.0%  0.61 GB  0:07 left",
        None,
        None,
        f"step 4/8  {start}  200 ms  1,500 tokens/s  0.75 TFLOP/s  mfu 75.0%  0.61 GB  0:05 left",
    ]


def test_profile_names_the_actions(ranks, tmp_path):
    layout = ["--pp", "2", "--schedule", "zb-h1", "--steps", "3"]
    ranks(
        pretrain.main,
        2,
        [*SMALL, *layout, "--profile", str(tmp_path), "--profile-steps", "2", "2"],
    )
    for rank in (0, 1):
        with gzip.open(tmp_path / f"rank_{rank}.json.gz") as file:
            events = [
                event
                for event in json.load(file)["traceEvents"]
                if event.get("cat") == "user_annotation"
            ]
        names = Counter(event["name"] for event in events)
        actions = [str(action) for action in zb_h1(rank, 2, 1, 4)]
        assert {name: names[name] for name in actions} == dict.fromkeys(actions, 1)
        assert names["exchange"]
        assert names["optimizer"] == names["data"] == 1
